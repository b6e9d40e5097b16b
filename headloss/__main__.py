from headloss.cli import main

main(prog_name="python -m headloss")
