"""The example, as its first line says to run it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from spawn import free_port

import headloss


def test_tensor_parallel_example() -> None:
    example = Path(__file__).parents[2] / "examples" / "tensor_parallel.py"
    run = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", f"--master-port={free_port()}"]
    home = str(Path(headloss.__file__).parents[1])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": home}
    done = subprocess.run(
        [*run, str(example)], env=environment, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "the losses of 20 steps are equal" in done.stdout
    assert done.stdout.count("are equal") == 1, "only one rank speaks"
