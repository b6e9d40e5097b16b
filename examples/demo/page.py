"""What the demo saw, on one page: an HTML file that needs nothing else, and the same plots as a PNG.

Matplotlib draws; it is asked for here and nowhere else.
"""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from examples.demo.compare import Way
from examples.demo.phases import CLIP, TO_REFERENCE, Curves, K

BLUE, ORANGE, GREEN, GREY = "#2f6db5", "#d9772b", "#3f8f5f", "#8a8f98"
KINDS = {"top-K": (f"top {K} of the teacher", BLUE), "dense": ("dense teacher", ORANGE), "labels": ("labels", GREY)}
STYLE: Any = {
    "font.size": 9.5,
    "axes.titlesize": 10.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#b8bcc4",
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#eceef1",
    "xtick.color": "#555b66",
    "ytick.color": "#555b66",
    "axes.labelcolor": "#333842",
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "lines.linewidth": 1.8,
}


class Story(NamedTuple):
    """All that the page shows."""

    version: str
    digits: int
    noise: float
    teacher: Curves
    students: Mapping[str, Curves]
    gspo: Curves
    ways: Sequence[Way]
    tables: Sequence[Sequence[Sequence[str]]]  # of the models and of the comparison, the first row is the head
    footer: str


class Section(NamedTuple):
    title: str
    text: str
    alt: str
    lines: int  # of its longest legend
    draw: Callable[[Any, Story], None]


def write_page(folder: Path, story: Story) -> tuple[Path, Path]:
    """`index.html` and `demo.png` in `folder`.  ImportError without matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    folder.mkdir(parents=True, exist_ok=True)
    page, picture = folder / "index.html", folder / "demo.png"
    with pyplot.rc_context(STYLE):
        images = []
        for section in SECTIONS:
            figure = pyplot.figure(figsize=(12, 3.1 + 0.18 * section.lines), layout="constrained")
            section.draw(figure, story)
            images.append(_png(figure))
            pyplot.close(figure)
        heights = [3.3 + 0.18 * section.lines for section in SECTIONS]
        whole = pyplot.figure(figsize=(12, sum(heights) + 0.6), layout="constrained")
        whole.suptitle(f"headloss {story.version}   {_headline(story)}", fontsize=13, x=0.008, ha="left")
        parts: Any = whole.subfigures(len(SECTIONS), 1, hspace=0.03, height_ratios=heights)
        for section, part in zip(SECTIONS, parts, strict=True):
            part.suptitle(section.title, fontsize=12, x=0.008, ha="left", color="#333842")
            section.draw(part, story)
        whole.savefig(picture, dpi=110)
        pyplot.close(whole)
    page.write_text(_html(story, images), encoding="utf-8")
    return page, picture


def _teacher(figure: Any, story: Story) -> None:
    loss, entropy, right = figure.subplots(1, 3)
    _curve(loss, story.teacher, "ce", "cross-entropy", BLUE)
    _titles(loss, "Loss", "step", "nats a token")
    second = loss.twinx()
    _curve(second, story.teacher, "z", "z-loss, before its weight of 1e-4", ORANGE)
    second.set_ylabel("squared nats", color=ORANGE)
    second.grid(False)
    _legend(loss, loss.get_lines() + second.get_lines())
    _curve(entropy, story.teacher, "entropy", None, BLUE)
    _titles(entropy, "Entropy of the softmax", "step", "nats a token")
    _curve(right, story.teacher, "held out/accuracy", "token accuracy", GREY)
    _curve(right, story.teacher, "held out/exact_match", "exact match", BLUE)
    _titles(right, "SavedForBackward-out prompts", "step", "fraction right")
    right.set_ylim(0, 1.03)
    _legend(right)


def _students(figure: Any, story: Story) -> None:
    exact, ce, entropy = figure.subplots(1, 3)
    for kind, curves in story.students.items():
        label, colour = KINDS[kind]
        style = {"linestyle": "--"} if kind == "dense" else {}
        _curve(
            exact,
            curves,
            "held out/exact_match",
            f"{label}: {curves.last('held out/exact_match'):.2f}",
            colour,
            **style,
        )
        _curve(ce, curves, "held out/ce", label, colour, **style)
        _curve(entropy, curves, "entropy", label, colour, **style)
    for axes, name in ((exact, "held out/exact_match"), (ce, "held out/ce"), (entropy, "entropy")):
        level = story.teacher.last(name)
        axes.axhline(level, color=GREEN, linewidth=1.2, linestyle=":", label=f"the teacher: {level:.2f}")
    _titles(exact, "Exact match, held-out prompts", "step", "fraction right")
    exact.set_ylim(0, 1.03)
    _titles(ce, "Cross-entropy, held-out prompts", "step", "nats a token")
    _titles(entropy, "Entropy of the student", "step", "nats a token")
    for axes in (exact, ce, entropy):
        axes.set_ylim(bottom=0)
        _legend(axes)


def _gspo(figure: Any, story: Story) -> None:
    right, kl, clip, entropy = figure.subplots(1, 4)
    _curve(right, story.gspo, "held out/exact_match", "exact match, greedy, held out", BLUE)
    _curve(right, story.gspo, "sampled", "exact match, sampled", ORANGE)
    _curve(right, story.gspo, "reward", "reward: digits right", GREY)
    _titles(right, "Right answers", "iteration", "fraction")
    right.set_ylim(0, 1.03)
    _legend(right)
    _curve(kl, story.gspo, "kl", "to the student it was, exact", BLUE)
    _curve(kl, story.gspo, "rl/kl", "to the epoch before, k3", ORANGE)
    _titles(kl, "KL", "iteration", "nats a token")
    kl.set_ylim(bottom=0)
    _legend(kl)
    _curve(clip, story.gspo, "rl/clip_fraction", None, BLUE)
    _titles(clip, f"Clipped, ratio beyond 1 ± {CLIP}", "iteration", "fraction of answers")
    clip.set_ylim(bottom=0)
    _curve(entropy, story.gspo, "entropy", None, BLUE)
    _titles(entropy, "Entropy of the policy", "iteration", "nats a token")
    entropy.set_ylim(bottom=0)


def _compare(figure: Any, story: Story) -> None:
    time, peak, error = figure.subplots(1, 3, sharey=True)
    names = [way.name for way in story.ways]
    colours = [GREY, ORANGE, BLUE]
    for axes, title, unit, values, form in (
        (time, "Time, forward and backward", "ms", [1e3 * w.seconds for w in story.ways], "{:.0f} ms"),
        (peak, "Peak memory beyond the inputs", "MiB", [w.peak / 2**20 for w in story.ways], "{:.3g} MiB"),
        (
            error,
            "Largest error of a gradient",
            "relative to float64, in units of 1e-6",
            [1e6 * w.grad_error for w in story.ways],
            "{:.2g}e-6",
        ),
    ):
        bars = axes.barh(names, values, color=colours, height=0.6)
        axes.bar_label(bars, [form.format(v) for v in values], padding=4)
        axes.set_xlim(0, 1.25 * max(values))
        axes.set_title(title)
        axes.set_xlabel(unit)
        axes.grid(False, axis="y")
    time.invert_yaxis()


def _curve(axes: Any, curves: Curves, name: str, label: str | None, colour: str, **style: Any) -> None:
    axes.plot(*zip(*curves.points[name], strict=True), color=colour, label=label, **style)


def _titles(axes: Any, title: str, x: str, y: str) -> None:
    axes.set_title(title)
    axes.set_xlabel(x)
    axes.set_ylabel(y)


def _legend(axes: Any, lines: Sequence[Any] | None = None) -> None:
    """Below the axes, where no curve can run into it."""
    lines = axes.get_lines() if lines is None else lines
    names = [line.get_label() for line in lines]
    axes.legend(lines, names, loc="upper left", bbox_to_anchor=(-0.02, -0.2), borderaxespad=0)


SECTIONS = (
    Section(
        "1  A teacher",
        "Cross-entropy and 1e-4 z-loss on the written answers, through one <code>FusedLMHead</code>.",
        "The teacher's loss, entropy and accuracy by step",
        2,
        _teacher,
    ),
    Section(
        "2  Smaller students",
        f"The same start, prompts and steps for each. One sees the teacher's {K} likeliest tokens and a bucket for the "
        "rest (<code>hl.Sparse</code>), one the teacher's whole softmax (<code>hl.Linear</code>), both by forward KL; "
        "one only the written answers, by cross-entropy.",
        "Exact match, cross-entropy and entropy of the three students by step",
        4,
        _students,
    ),
    Section(
        "3  GSPO on a reward that can be checked",
        f"The top-{K} student answers each prompt several times; answers with more digits right than their siblings "
        f"become likelier. An exact KL to the student it was, weight {TO_REFERENCE:g}, rides along in the same sweep.",
        "Right answers, KL, clip fraction and entropy by iteration",
        3,
        _gspo,
    ),
    Section(
        "4  Fused against separate",
        "Cross-entropy, z-loss and an entropy bonus on one head: as three losses on the logits, "
        "and as one objective on the logits or straight on the hidden states.",
        "Time, peak memory and error of separate and fused losses",
        0,
        _compare,
    ),
)

CSS = """
body { margin: 0; background: #fff; color: #23272f; font: 16px/1.55 system-ui, "Segoe UI", "DejaVu Sans", sans-serif; }
main { max-width: 1120px; margin: 0 auto; padding: 36px 24px 48px; }
h1 { font-size: 27px; margin: 0 0 4px; }
h2 { font-size: 19px; margin: 36px 0 4px; border-top: 1px solid #e4e7eb; padding-top: 22px; }
p { margin: 4px 0 12px; max-width: 60em; }
.lead { font-size: 18px; color: #4b5160; }
code, pre { font: 14px/1.45 ui-monospace, "DejaVu Sans Mono", monospace; }
code { background: #f3f4f6; padding: 1px 4px; border-radius: 3px; }
pre { background: #f7f8fa; border: 1px solid #e4e7eb; border-radius: 6px; padding: 12px 16px; overflow-x: auto; }
img { width: 100%; height: auto; display: block; }
table { border-collapse: collapse; margin: 12px 0; font-variant-numeric: tabular-nums; font-size: 15px; }
th, td { padding: 5px 18px 5px 0; border-bottom: 1px solid #e4e7eb; text-align: right; white-space: nowrap; }
th { color: #4b5160; font-weight: 600; }
th:first-child, td:first-child, .models :is(th, td):nth-child(2) { text-align: left; }
.scroll { overflow-x: auto; }
footer { margin-top: 32px; color: #6b7280; font-size: 14px; }
"""


def _html(story: Story, images: Sequence[bytes]) -> str:
    models, ways = map(_table, story.tables)
    parts = [
        "<!doctype html>\n<html lang='en'>\n<head>\n<meta charset='utf-8'>\n",
        "<meta name='viewport' content='width=device-width, initial-scale=1'>\n",
        "<link rel='icon' href='data:,'>\n<title>headloss demo</title>\n",
        f"<style>{CSS}</style>\n</head>\n<body>\n<main>\n",
        f"<h1>headloss {html.escape(story.version)}</h1>\n<p class='lead'>{html.escape(_headline(story))}</p>\n",
        f"<p>The task is to sort {story.digits} digits; in the answers to learn from, {story.noise:.0%} of the digits "
        "were replaced by random ones. Every loss, metric and KL on this page is a plain function of a few facts about "
        "each row of the head's softmax, which is read once.</p>\n",
        f"<div class='models'>{models}</div>",
    ]
    for section, image in zip(SECTIONS, images, strict=True):
        data = base64.b64encode(image).decode()
        parts.append(f"<h2>{section.title}</h2>\n<p>{section.text}</p>\n")
        parts.append(f"<img alt='{html.escape(section.alt, quote=True)}' src='data:image/png;base64,{data}'>\n")
    parts.append(f"{ways}<footer>{html.escape(story.footer)}</footer>\n</main>\n</body>\n</html>\n")
    return "".join(parts)


def _headline(story: Story) -> str:
    exact = "held out/exact_match"
    topk, dense = (story.students[k].last(exact) for k in ("top-K", "dense"))
    return (
        f"The teacher sorts {story.teacher.last(exact):.0%}; its top {K} bring a student to {topk:.0%}, "
        f"its whole softmax to {dense:.0%}; GSPO takes the first to {story.gspo.last(exact):.0%}."
    )


def _table(rows: Sequence[Sequence[str]]) -> str:
    head, *body = ["".join(f"<{tag}>{html.escape(x)}</{tag}>" for x in row) for tag, row in _tagged(rows)]
    lines = "".join(f"<tr>{row}</tr>\n" for row in body)
    return f"<div class='scroll'><table>\n<tr>{head}</tr>\n{lines}</table></div>\n"


def _tagged(rows: Sequence[Sequence[str]]) -> list[tuple[str, Sequence[str]]]:
    return [("td" if i else "th", row) for i, row in enumerate(rows)]


def _png(figure: Any) -> bytes:
    held = io.BytesIO()
    figure.savefig(held, format="png", dpi=170)
    return held.getvalue()
