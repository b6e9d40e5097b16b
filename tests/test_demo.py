"""The command line: the demo in its fast form, its page in a browser, its parts, and the table of losses."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import headloss as hl
from examples.demo import compare, demo, page, phases
from examples.demo.sorting import EOS, Sorting
from examples.demo.tiny import TinyTransformer
from headloss.cli import main, memory
from headloss.cli.losses import entries
from headloss.losses import LOSSES

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
SCRAP = demo.FAST._replace(  # nothing is learnt, all is shown
    teach=phases.Training(2, 8, 1e-3, 1),
    distill=phases.Training(2, 8, 1e-3, 1),
    reinforce=phases.Training(2, 2, 1e-3, 1),
    group=2,
)


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The final numbers of `demo --fast --json`, alone on standard output."""
    pytest.importorskip("matplotlib")
    out = tmp_path_factory.mktemp("demo")
    line = [sys.executable, "-m", "headloss", "demo", "--fast", "--json", "--seed", "0", "--out", str(out)]
    done = subprocess.run(line, check=False, capture_output=True, text=True, timeout=280, cwd=out)
    assert done.returncode == 0, done.stderr
    assert not done.stderr, "quiet when nobody is watching"
    return json.loads(done.stdout)


def test_the_teacher_learns_and_students_follow(told: dict[str, Any]) -> None:
    students = {kind: found["exact_match"] for kind, found in told["students"].items()}
    assert told["teacher"]["exact_match"] > 0.9  # chance: one in a thousand
    assert students["top-K"] > 0.4 and abs(students["top-K"] - students["dense"]) < 0.15, students
    assert students["top-K"] > students["labels"] - 0.05, students


def test_gspo_makes_right_answers_likelier(told: dict[str, Any]) -> None:
    gspo = told["gspo"]
    assert gspo["after"]["exact_match"] > gspo["before"]["exact_match"] - 0.02, gspo
    assert gspo["reward"][-1] > gspo["reward"][0] + 0.1, gspo
    assert gspo["sampled_exact_match"][-1] > gspo["sampled_exact_match"][0] + 0.2, gspo
    assert 0 < gspo["kl_to_student"] < 2


def test_fused_and_separate_losses_agree(told: dict[str, Any]) -> None:
    assert [way["name"] for way in told["compare"]] == list(compare.WAYS)
    for way in told["compare"]:
        assert way["loss_error"] < 1e-5 and way["grad_error"] < 1e-4 and way["seconds"] > 0, way


def test_the_page_needs_nothing_else(told: dict[str, Any]) -> None:
    text = Path(told["page"]).read_text(encoding="utf-8")
    panels = [panel for section in page.SECTIONS for panel in section.panels]
    assert text.count("<img ") == text.count("alt=") == len(panels) == len({p.title for p in panels}) == 14
    assert all(p.x and (p.y or p.x in ("ms", "MiB") or "relative" in p.x) for p in panels), "axes have names and units"
    assert "minmax(min(100%" in text and "width=device-width" in text  # one panel per line on a phone
    assert "<th></th>" not in text, "every column has a header"
    addresses = re.findall(r"(?:src|href)\s*=\s*['\"](.{0,20})", text) + re.findall(r"url\((.{0,20})", text)
    assert addresses and all(a.startswith("data:") for a in addresses)
    assert "http" not in re.sub(r"base64,[A-Za-z0-9+/=]+", "", text)
    assert Path(told["png"]).read_bytes().startswith(b"\x89PNG")


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium here")
def test_the_page_opens_in_a_browser(told: dict[str, Any], tmp_path: Path) -> None:
    whole = Path(told["page"])
    dom, log = open_page(whole, tmp_path / "good")
    assert "headloss" in dom and dom.count("<img ") == 14
    assert "CONSOLE" not in log, log
    broken = tmp_path / "broken.html"
    broken.write_text(whole.read_text(encoding="utf-8").replace("</main>", "<script>absent()</script></main>"))
    assert "absent is not defined" in open_page(broken, tmp_path / "bad")[1], "an error on the console is seen here"


def open_page(file: Path, profile: Path) -> tuple[str, str]:
    """What a headless browser made of the page, and what it logged."""
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]
    flags += ["--disable-dev-shm-usage", "--enable-logging=stderr", f"--user-data-dir={profile}", "--dump-dom"]
    done = subprocess.run(
        [str(CHROMIUM), *flags, file.as_uri()], check=False, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


def test_demo_tells_its_story_without_control_codes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "FAST", SCRAP)
    monkeypatch.setattr(page, "write_page", lambda folder, story: (folder / "index.html", folder / "demo.png"))
    result = CliRunner().invoke(main, ["demo", "--fast", "--seed", "3", "--out", "here"])
    shown = result.output
    assert result.exit_code == 0, shown
    assert "\x1b" not in shown and "\r" not in shown
    for name in (
        *compare.WAYS,
        "teacher",
        "student, top 4",
        "student, dense",
        "student, labels",
        "GSPO",
        "here/index.html",
    ):
        assert name in shown
    assert max(map(len, shown.splitlines())) <= 80


def test_without_matplotlib_the_demo_says_how_to_get_the_page(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(demo, "FAST", SCRAP)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    result = CliRunner().invoke(main, ["demo", "--fast", "--out", str(tmp_path)])
    assert result.exit_code == 0, result.output
    assert "pip install 'headloss[plot]'" in result.output and not os.listdir(tmp_path)


def test_a_package_without_the_checkout_says_where_the_demo_is(tmp_path: Path) -> None:
    package = Path(hl.__file__).parent
    shutil.copytree(package, tmp_path / "headloss", ignore=shutil.ignore_patterns("__pycache__"))
    line, environ = [sys.executable, "-m", "headloss", "demo", "--fast"], os.environ | {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run(line, check=False, capture_output=True, text=True, timeout=120, cwd=tmp_path, env=environ)
    assert done.returncode == 1 and "examples/demo" in done.stderr and "make demo" in done.stderr, done.stderr
    assert "Traceback" not in done.stderr and not done.stdout


def test_every_way_of_the_comparison_gives_the_same_numbers() -> None:
    ticks: list[None] = []
    ways = compare.compare(N=24, V=300, D=8, rounds=2, seed=0, tick=lambda: ticks.append(None))
    assert [w.name for w in ways] == list(compare.WAYS) and len(ticks) == compare.steps(2)
    for way in ways:
        assert way.loss_error < 1e-5 and way.grad_error < 1e-4 and way.seconds > 0


def test_peak_bytes_counts_what_lives_at_the_same_time() -> None:
    def work() -> None:
        for _ in range(3):
            x = torch.empty(1000, dtype=torch.float64)  # 8000 bytes, one after the other
            x.fill_(0)
            del x

    assert 8000 <= memory.peak_bytes(work) < 8000 + 1000
    both = memory.peak_bytes(lambda: (torch.empty(1000), torch.empty(500)))
    assert 6000 <= both < 6000 + 1000


def test_the_task() -> None:
    task, random = Sorting(digits=4, noise=0.5), torch.Generator().manual_seed(0)
    for held_out in (False, True):
        prompts = task.prompts(500, random, held_out)
        number = (prompts[:, 1:-1] * torch.tensor([1000, 100, 10, 1])).sum(1)
        assert bool(((number % 11 == 0) == held_out).all())
    answers = task.answers(prompts)
    assert answers[:3].tolist() == [[*sorted(p[1:-1]), EOS] for p in prompts[:3].tolist()]
    labels = task.labels(prompts, random)
    assert 0.4 < float((labels != answers)[:, :-1].float().mean()) < 0.5 and bool((labels[:, -1] == EOS).all())
    assert float(task.reward(prompts, answers).min()) == 1.0
    answers[0, 0] = EOS
    assert float(task.reward(prompts, answers)[0]) == pytest.approx(4 / 5)
    tokens, targets = task.rows(prompts, task.answers(prompts))
    assert tokens.shape == targets.shape == (500, task.T)
    assert bool((targets[:, : task.P - 1] == -100).all()) and torch.equal(
        tokens[:, task.P :], targets[:, task.P - 1 : -1]
    )


def test_exact_match_is_what_greedy_decoding_gives() -> None:
    task = Sorting(digits=3)
    torch.manual_seed(0)
    model = TinyTransformer(task.vocab, task.T, D=16, layers=1)
    phases.teach(task, model, phases.Training(80, 32, 1e-2, 80), seed=0)
    prompts = task.prompts(200, torch.Generator().manual_seed(11), held_out=True)
    tokens = prompts
    with torch.no_grad():
        for _ in range(task.A):
            tokens = torch.cat([tokens, model.head(model(tokens)[:, -1]).argmax(-1, keepdim=True)], 1)
    right = float((task.reward(prompts, tokens[:, task.P :]) == 1).double().mean())
    assert 0 < right < 1 and phases.examine(task, model, 200)["exact_match"] == pytest.approx(right)


def test_advantages_compare_answers_to_the_same_prompt() -> None:
    reward = torch.tensor([0.0, 1.0, 0.5, 0.5])
    found = phases.advantages(reward, group=2)
    assert found[0] < 0 < found[1] and found[2] == found[3] == 0


def test_the_tiny_transformer_does_not_look_ahead() -> None:
    model = TinyTransformer(vocab=13, length=12, D=16, layers=2).eval()
    tokens = torch.randint(13, (2, 12))
    changed = tokens.clone()
    changed[:, 7:] = (changed[:, 7:] + 1) % 13
    torch.testing.assert_close(model(tokens)[:, :7], model(changed)[:, :7])
    assert isinstance(model.head, hl.FusedLMHead)


def test_losses_prints_every_loss() -> None:
    result = CliRunner().invoke(main, ["losses"], env={"COLUMNS": "160"})
    assert result.exit_code == 0, result.output
    for name in LOSSES:
        assert name in result.output
    for entry in entries():
        assert entry.formula and (entry.facts or entry.inputs), entry
