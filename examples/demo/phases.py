"""The demo's three trainings.  Every loss and every number below comes from an `hl.Objective`.

    teach      cross-entropy and a little z-loss, on labels
    distill    a smaller student, from the teacher's top K, from all of its softmax, or from the labels alone
    reinforce  GSPO on a reward that anybody can check, held near the student by an exact KL

Dimension key:  B sequences   T positions   D hidden size   K ids
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

import headloss as hl
from examples.demo.sorting import Sorting
from examples.demo.tiny import TinyTransformer
from headloss.losses import cross_entropy, forward_kl, gspo, reverse_kl, z_loss

K = 4  # ids that the sparse teacher names
CLIP = 0.05
TO_REFERENCE = 1e-3

Tick = Callable[[], None]
silent: Tick = lambda: None


def exact_match(argmax: Tensor, targets: Tensor, segments: hl.Segments) -> Tensor:
    """(S,): whether every token of the answer is the likeliest one; greedy decoding then gives this very answer."""
    return segments.means((argmax == targets).double()) == 1


METRICS: list[str | Callable[..., Any]] = ["entropy", "accuracy", exact_match]
TEACH = hl.Objective(ce=cross_entropy, z=hl.Term(z_loss, weight=1e-4), metrics=METRICS)
LABELS = hl.Objective(ce=cross_entropy, metrics=METRICS)
DISTILL = hl.Objective(kl=hl.Term(forward_kl, tail="bucket"), metrics=METRICS)  # for a sparse teacher or a dense one
REINFORCE = hl.Objective(
    rl=hl.Term(gspo, low=CLIP, high=CLIP, reduction="seq_mean_token_mean"),
    kl=hl.Term(reverse_kl, weight=TO_REFERENCE),
    metrics=["entropy"],
)


class Curves:
    """What one training showed: `add` sums up steps, `point` makes one point of each curve of them."""

    def __init__(self) -> None:
        self.points: dict[str, list[tuple[int, float]]] = {}
        self._meter, self._steps = hl.Meter(), list[dict[str, float]]()

    def add(self, out: hl.Output, **more: float) -> None:
        self._meter.add(out.metrics)
        self._steps.append({"loss": float(out.loss.detach()), **{k: float(v) for k, v in out.terms.items()}, **more})

    def point(self, step: int, held_out: dict[str, float]) -> None:
        """The mean of the steps since the last point, next to what was measured on held-out prompts."""
        means = {k: sum(s[k] for s in self._steps) / len(self._steps) for k in (self._steps[0] if self._steps else ())}
        values = means | self._meter.compute() | {f"held out/{k}": v for k, v in held_out.items()}
        for name, value in values.items():
            self.points.setdefault(name, []).append((step, value))
        self._steps.clear()

    def last(self, name: str) -> float:
        return self.points[name][-1][1]


class Training(NamedTuple):
    """How long and how hard."""

    steps: int
    batch: int
    lr: float
    every: int  # steps between two points of a curve


class Trained(NamedTuple):
    model: TinyTransformer
    curves: Curves


def teach(task: Sorting, model: TinyTransformer, how: Training, seed: int, tick: Tick = silent) -> Trained:
    """Phase 1: the labels teach the teacher."""
    return _supervise(task, model, how, seed, TEACH, lambda tokens: None, tick)


def distill(
    task: Sorting,
    teacher: TinyTransformer,
    student: TinyTransformer,
    kind: str,
    how: Training,
    seed: int,
    tick: Tick = silent,
) -> Trained:
    """Phase 2: a student of `kind` "top-K", "dense" or "labels"; the same prompts for each."""

    @torch.no_grad()
    def look_up(tokens_BT: Tensor) -> hl.Linear | hl.Sparse | None:
        if kind == "labels":
            return None
        seen = teacher.source(tokens_BT)
        if kind == "dense":
            return seen
        logprobs_BTK, ids_BTK = (seen.hidden @ seen.weight.t()).log_softmax(-1).topk(K)  # what a server would send
        return hl.Sparse(ids_BTK, logprobs_BTK)

    objective = LABELS if kind == "labels" else DISTILL
    return _supervise(task, student, how, seed, objective, look_up, tick)


def reinforce(
    task: Sorting, student: TinyTransformer, how: Training, group: int, seed: int, tick: Tick = silent
) -> Trained:
    """Phase 3: the student's own answers, `group` to a prompt, the better ones made likelier."""
    model, curves = copy.deepcopy(student), Curves()
    reference = student.requires_grad_(False)
    random = torch.Generator().manual_seed(seed)
    curves.point(0, examine(task, model))
    for step, optimizer in _steps(model, how):
        prompts_BP = task.prompts(how.batch, random).repeat_interleave(group, 0)
        answers_BA = model.sample(prompts_BP, task.A, random)
        reward_B = task.reward(prompts_BP, answers_BA)
        tokens_BT, targets_BT = task.rows(prompts_BP, answers_BA)
        given: dict[str, Any] = {
            "advantage": advantages(reward_B, group)[:, None].expand(targets_BT.shape),
            "segments": hl.Segments.from_batch(targets_BT),
            "teacher": reference.source(tokens_BT),
        }
        for _epoch in range(2):
            out = _head(model, tokens_BT, targets_BT, REINFORCE, given)
            _descend(optimizer, model, out.loss)
            given.setdefault("old_logprob", out.facts.logprob.detach())  # the first epoch's facts: no pass of its own
        curves.add(out, reward=float(reward_B.mean()), sampled=float((reward_B == 1).float().mean()))
        tick()
        if step % how.every == 0 or step == how.steps:
            curves.point(step, examine(task, model))
    return Trained(model, curves)


def advantages(reward_B: Tensor, group: int) -> Tensor:
    """(B,): how much better than the other answers to the same prompt, in standard deviations."""
    by_prompt = reward_B.view(-1, group)
    centred = by_prompt - by_prompt.mean(1, keepdim=True)
    return (centred / (by_prompt.std(1, keepdim=True) + 1e-4)).flatten()


@torch.no_grad()
def examine(task: Sorting, model: TinyTransformer, count: int = 512) -> dict[str, float]:
    """Metrics on held-out prompts, the same ones each time."""
    prompts_BP = task.prompts(count, torch.Generator().manual_seed(11), held_out=True)
    tokens_BT, targets_BT = task.rows(prompts_BP, task.answers(prompts_BP))
    out = LABELS(model.source(tokens_BT), targets_BT, segments=hl.Segments.from_batch(targets_BT))
    return {**hl.Meter().add(out.metrics).compute(), "ce": float(out.terms["ce"])}


def _supervise(
    task: Sorting,
    model: TinyTransformer,
    how: Training,
    seed: int,
    objective: hl.Objective,
    look_up: Callable[[Tensor], hl.Linear | hl.Sparse | None],
    tick: Tick,
) -> Trained:
    """Written answers as targets, with a teacher's opinion of them where there is one."""
    curves, random = Curves(), torch.Generator().manual_seed(seed)
    curves.point(0, examine(task, model))
    for step, optimizer in _steps(model, how):
        prompts_BP = task.prompts(how.batch, random)
        tokens_BT, targets_BT = task.rows(prompts_BP, task.labels(prompts_BP, random))
        given = {"segments": hl.Segments.from_batch(targets_BT), "teacher": look_up(tokens_BT)}
        out = _head(model, tokens_BT, targets_BT, objective, given)
        _descend(optimizer, model, out.loss)
        curves.add(out)
        tick()
        if step % how.every == 0 or step == how.steps:
            curves.point(step, examine(task, model))
    return Trained(model, curves)


def _head(
    model: TinyTransformer, tokens_BT: Tensor, targets_BT: Tensor, objective: hl.Objective, given: dict[str, Any]
) -> hl.Output:
    return model.head(model(tokens_BT), targets=targets_BT, objective=objective, inputs=hl.Inputs(**given))


def _steps(model: TinyTransformer, how: Training) -> Iterator[tuple[int, torch.optim.Optimizer]]:
    """1, 2, ... with an optimizer whose rate warms up and then falls along a cosine."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=how.lr, betas=(0.9, 0.98), weight_decay=0.01)
    wave = torch.optim.lr_scheduler.OneCycleLR(optimizer, how.lr, how.steps + 1, pct_start=0.1, cycle_momentum=False)
    for step in range(1, how.steps + 1):
        yield step, optimizer
        wave.step()


def _descend(optimizer: torch.optim.Optimizer, model: TinyTransformer, loss: Tensor) -> None:
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
