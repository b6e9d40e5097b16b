"""The results of the demo on one page: a self-contained HTML file, and the same plots as a PNG.

Only this file needs matplotlib.
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
COLOURS = [GREY, GREEN, ORANGE, BLUE]
STYLES = {"top-K": "-", "dense": "--", "labels": "-"}
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
    """Everything that the page shows."""

    version: str
    digits: int
    noise: float
    teacher: Curves
    students: Mapping[str, Curves]
    gspo: Curves
    ways: Sequence[Way]
    timed: bool  # whether their times say anything
    tables: Sequence[Sequence[Sequence[str]]]  # of the models and of the comparison, the first row is the head
    footer: str


class Panel(NamedTuple):
    """One pair of axes: what it shows, for those who see it and those who do not."""

    title: str
    x: str
    y: str
    draw: Callable[[Any, Story], None]
    caption: str = ""


class Section(NamedTuple):
    title: str
    text: str
    panels: Sequence[Panel]


def write_page(folder: Path, story: Story) -> tuple[Path, Path]:
    """`index.html` and `demo.png` in `folder`.  ImportError without matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    folder.mkdir(parents=True, exist_ok=True)
    page, picture = folder / "index.html", folder / "demo.png"
    with pyplot.rc_context(STYLE):
        images = {}
        for section in SECTIONS:
            for panel in section.panels:
                figure, axes = pyplot.subplots(figsize=(4.6, 3.5), layout="constrained")
                _draw(axes, panel, story)
                images[panel.title] = _png(figure)
                pyplot.close(figure)
        whole = pyplot.figure(figsize=(16, 3.7 * len(SECTIONS) + 0.6), layout="constrained")
        whole.suptitle(f"headloss {story.version}   {_headline(story)}", fontsize=13, x=0.008, ha="left")
        parts: Any = whole.subfigures(len(SECTIONS), 1, hspace=0.03)
        for section, part in zip(SECTIONS, parts, strict=True):
            part.suptitle(section.title, fontsize=12, x=0.008, ha="left", color="#333842")
            for axes, panel in zip(part.subplots(1, len(section.panels)), section.panels, strict=True):
                _draw(axes, panel, story)
        whole.savefig(picture, dpi=110)
        pyplot.close(whole)
    page.write_text(_html(story, images), encoding="utf-8")
    return page, picture


def _draw(axes: Any, panel: Panel, story: Story) -> None:
    panel.draw(axes, story)
    axes.set(title=panel.title, xlabel=panel.x, ylabel=panel.y)
    if len(axes.get_lines()) > 1:
        axes.legend(loc="upper left", bbox_to_anchor=(-0.02, -0.2), borderaxespad=0)  # below: no curve runs into it


def _of_teacher(*curves: tuple[str, str | None, str], top: float | None = None) -> Callable[[Any, Story], None]:
    def draw(axes: Any, story: Story) -> None:
        for name, label, colour in curves:
            _curve(axes, story.teacher, name, label, colour)
        axes.set_ylim(0, top)

    return draw


def _of_students(name: str, top: float | None = None) -> Callable[[Any, Story], None]:
    def draw(axes: Any, story: Story) -> None:
        for kind, curves in story.students.items():
            label, colour = KINDS[kind]
            _curve(axes, curves, name, f"{label}: {curves.last(name):.2f}", colour, linestyle=STYLES[kind])
        level = story.teacher.last(name)
        axes.axhline(level, color=GREEN, linewidth=1.2, linestyle=":", label=f"the teacher: {level:.2f}")
        axes.set_ylim(0, top)

    return draw


def _of_policy(*curves: tuple[str, str | None, str], top: float | None = None) -> Callable[[Any, Story], None]:
    def draw(axes: Any, story: Story) -> None:
        for name, label, colour in curves:
            _curve(axes, story.gspo, name, label, colour)
        axes.set_ylim(0, top)

    return draw


def _of_ways(value: Callable[[Way], float], form: str) -> Callable[[Any, Story], None]:
    def draw(axes: Any, story: Story) -> None:
        values = [value(way) for way in story.ways]
        bars = axes.barh([way.name.replace(", ", ",\n") for way in story.ways], values, color=COLOURS, height=0.6)
        axes.bar_label(bars, [form.format(v) for v in values], padding=4)
        axes.set_xlim(0, 1.35 * max(values))
        axes.grid(False, axis="y")
        axes.invert_yaxis()

    return draw


def _time(axes: Any, story: Story) -> None:
    if story.timed:
        _of_ways(lambda w: 1e3 * w.seconds, "{:.0f} ms")(axes, story)
    else:
        axes.text(
            0.5, 0.5, "this head is too small to time:\nrun without --fast", ha="center", transform=axes.transAxes
        )
        axes.set_yticks([])
        axes.grid(False)


def _curve(axes: Any, curves: Curves, name: str, label: str | None, colour: str, **style: Any) -> None:
    axes.plot(*zip(*curves.points[name], strict=True), color=colour, label=label, **style)


SECTIONS = (
    Section(
        "1  A teacher",
        "Cross-entropy and 1e-4 z-loss on the training answers, with one <code>FusedLMHead</code>.",
        (
            Panel("Cross-entropy", "step", "nats per token", _of_teacher(("ce", None, BLUE))),
            Panel(
                "z-loss, before its weight of 1e-4",
                "step",
                "squared nats",
                _of_teacher(("z", None, ORANGE)),
                "The square of the log of the softmax's denominator. Its small weight keeps it from running away but "
                "does not bring it to 0.",
            ),
            Panel("Entropy of the softmax", "step", "nats per token", _of_teacher(("entropy", None, BLUE))),
            Panel(
                "Held-out prompts",
                "step",
                "fraction right",
                _of_teacher(
                    ("held out/accuracy", "token accuracy", GREY),
                    ("held out/exact_match", "exact match", BLUE),
                    top=1.03,
                ),
            ),
        ),
    ),
    Section(
        "2  Smaller students",
        f"Three students with the same start, prompts and steps. One sees the teacher's {K} likeliest tokens and a "
        "bucket for the rest (<code>hl.Sparse</code>), one the teacher's whole softmax (<code>hl.Linear</code>), both "
        "with forward KL. The third sees only the training answers, with cross-entropy.",
        (
            Panel(
                "Exact match of students",
                "step",
                "fraction of held-out prompts right",
                _of_students("held out/exact_match", top=1.03),
                f"One seed. With a vocabulary of 13, the top {K} have nearly all of the teacher's probability; which "
                "of the two ends higher is chance, and depends on <code>--seed</code>.",
            ),
            Panel("Cross-entropy of students", "step", "nats per held-out token", _of_students("held out/ce")),
            Panel("Entropy of students", "step", "nats per token", _of_students("entropy")),
        ),
    ),
    Section(
        "3  GSPO on a reward that can be checked",
        f"The top-{K} student answers each prompt several times; answers with more correct digits than the others "
        f"become likelier. The exact KL to the student before RL, weight {TO_REFERENCE:g}, comes from the same pass.",
        (
            Panel(
                "Right answers",
                "iteration",
                "fraction",
                _of_policy(
                    ("held out/exact_match", "exact match, greedy, held out", BLUE),
                    ("sampled", "exact match, sampled", ORANGE),
                    ("reward", "reward: digits right", GREY),
                    top=1.03,
                ),
            ),
            Panel(
                "KL",
                "iteration",
                "nats per token",
                _of_policy(
                    ("kl", "to the student before RL, exact", BLUE), ("rl/kl", "to the sampling policy, k3", ORANGE)
                ),
            ),
            Panel(
                f"Clipped: ratio beyond 1 ± {CLIP}",
                "iteration",
                "fraction of answers",
                _of_policy(("rl/clip_fraction", None, BLUE)),
            ),
            Panel("Entropy of the policy", "iteration", "nats per token", _of_policy(("entropy", None, BLUE))),
        ),
    ),
    Section(
        "4  Fused against separate",
        "Cross-entropy, z-loss and an entropy bonus on one head: as three separate losses on the logits, written "
        "carefully by hand with one shared softmax, and as one objective on the logits or on the hidden states. On a "
        "CPU the matrix products take most of the time; a GPU gains more.",
        (
            Panel("Time, forward and backward", "ms", "", _time),
            Panel("Peak memory beyond the inputs", "MiB", "", _of_ways(lambda w: w.peak / 2**20, "{:.3g} MiB")),
            Panel(
                "Largest error of a gradient",
                "relative to float64, in units of 1e-6",
                "",
                _of_ways(lambda w: 1e6 * w.grad_error, "{:.2g}e-6"),
            ),
        ),
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
.panels { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 250px), 1fr)); gap: 8px 20px; }
figure { margin: 8px 0; }
figcaption { font-size: 14px; color: #4b5160; }
img { width: 100%; height: auto; display: block; }
@media (max-width: 480px) { main { padding: 20px 14px 32px; } th, td { padding-right: 10px; font-size: 13px; } }
table { border-collapse: collapse; margin: 12px 0; font-variant-numeric: tabular-nums; font-size: 15px; }
th, td { padding: 5px 18px 5px 0; border-bottom: 1px solid #e4e7eb; text-align: right; white-space: nowrap; }
th { color: #4b5160; font-weight: 600; }
th:first-child, td:first-child, .models :is(th, td):nth-child(2) { text-align: left; }
.scroll { overflow-x: auto; }
footer { margin-top: 32px; color: #6b7280; font-size: 14px; }
"""


def _html(story: Story, images: Mapping[str, bytes]) -> str:
    models, ways = map(_table, story.tables)
    parts = [
        "<!doctype html>\n<html lang='en'>\n<head>\n<meta charset='utf-8'>\n",
        "<meta name='viewport' content='width=device-width, initial-scale=1'>\n",
        "<link rel='icon' href='data:,'>\n<title>headloss demo</title>\n",
        f"<style>{CSS}</style>\n</head>\n<body>\n<main>\n",
        f"<h1>headloss {html.escape(story.version)}</h1>\n<p class='lead'>{html.escape(_headline(story))}</p>\n",
        f"<p>The task is to sort {story.digits} digits; {story.noise:.0%} of the digits in the training answers are "
        "random. Every loss, metric and KL on this page is a plain function of a few facts about each row of the "
        "head's softmax, which is read once.</p>\n",
        f"<div class='models'>{models}</div>",
    ]
    for section in SECTIONS:
        parts.append(f"<h2>{section.title}</h2>\n<p>{section.text}</p>\n<div class='panels'>\n")
        for panel in section.panels:
            data = base64.b64encode(images[panel.title]).decode()
            said = f"{panel.title}: {panel.y} by {panel.x}" if panel.y else f"{panel.title}: {panel.x}"
            alt = html.escape(said, quote=True)
            caption = f"<figcaption>{panel.caption}</figcaption>" if panel.caption else ""
            parts.append(f"<figure><img alt='{alt}' src='data:image/png;base64,{data}'>{caption}</figure>\n")
        parts.append("</div>\n")
    parts.append(f"{ways}<footer>{html.escape(story.footer)}</footer>\n</main>\n</body>\n</html>\n")
    return "".join(parts)


def _headline(story: Story) -> str:
    exact = "held out/exact_match"
    topk, dense = (story.students[k].last(exact) for k in ("top-K", "dense"))
    return (
        f"New prompts solved: the teacher {story.teacher.last(exact):.0%}, a student of its top {K} tokens {topk:.0%}, "
        f"of its whole softmax {dense:.0%}; the first after GSPO {story.gspo.last(exact):.0%}."
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
