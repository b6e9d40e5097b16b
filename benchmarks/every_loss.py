"""Every loss of the package on a CPU, against eager PyTorch: `python -m benchmarks.every_loss`, part of `make suite`.

Dimension key:  N rows   V vocabulary   K ids   S segments

Both compute the same loss from the same logits, forward and backward, in turns within one run.  Eager makes the facts
with torch's own functions (`F.cross_entropy`, `log_softmax`, `logsumexp`, `topk`) and calls the loss on them;
divergences take log_softmax of both sides.  Their gradients are compared first: where they differ there is no time.
Results: benchmarks/results/every_loss_cpu.json, or the folder $OUT.
"""

from __future__ import annotations

import argparse
import inspect
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

import headloss as hl
from headloss.checks.dense_facts import DenseSegments
from headloss.cli.problem import example
from headloss.divergence import is_divergence
from headloss.losses import LOSSES, cross_entropy
from proof.record import command, environment, write

K, S = 64, 8
FACTS = (
    "logprob", "lse", "mean_logprob", "entropy", "sum_p2", "top_logprob", "logit_dot", "logit_square",
    "teacher_logit_square",
)  # fmt: skip
LEFT_OUT = ("value_loss",)  # reads no softmax
GIVEN = ("class_weight", "class_mean", "class_cross_entropy", "length_weight", "segments", "targets", "kl")

Loss = Callable[[], Tensor]


class Case(NamedTuple):
    group: str
    name: str
    ours: Loss
    eager: Loss


class Problem:
    """Logits of a student and a teacher, targets, ids, and inputs of the losses."""

    def __init__(self, N: int, V: int) -> None:
        torch.manual_seed(0)
        self.N, self.V = N, V
        self.x = (3 * torch.randn(N, V)).requires_grad_()
        self.teacher = 3 * torch.randn(N, V)
        self.targets = torch.randint(V, (N,))
        self.ids = torch.rand(N, V).topk(min(K, V - 1), -1).indices
        self.ids_logprob = self.teacher.log_softmax(-1).gather(-1, self.ids)
        self.logprob = -F.cross_entropy(self.x.detach(), self.targets, reduction="none")

    def facts(self, names: list[str]) -> dict[str, Tensor]:
        """As eager code makes them: one log_softmax for all that need one."""
        shared = {"entropy", "sum_p2", "mean_logprob", "top_logprob"} & {*names}
        logp = self.x.log_softmax(-1) if shared else torch.empty(0)
        make: dict[str, Callable[[], Tensor]] = {
            "logprob": lambda: (
                logp.gather(-1, self.targets[:, None])[:, 0]
                if shared
                else -F.cross_entropy(self.x, self.targets, reduction="none")
            ),
            "lse": lambda: self.x.logsumexp(-1),
            "mean_logprob": lambda: logp.mean(-1),
            "entropy": lambda: -(logp.exp() * logp).sum(-1),
            "sum_p2": lambda: (2 * logp).exp().sum(-1),
            "top_logprob": lambda: logp.topk(8, -1).values,
            "logit_dot": lambda: (self.x * self.teacher).sum(-1),
            "logit_square": lambda: self.x.square().sum(-1),
            "teacher_logit_square": lambda: self.teacher.square().sum(-1),
        }
        return {name: make[name]() for name in names if name in make}


def term_case(p: Problem, name: str, fn: Callable[..., Any]) -> Case:
    """A loss on facts."""
    parameters = [q.name for q in inspect.signature(fn).parameters.values() if q.kind is not q.KEYWORD_ONLY]
    smoothed = fn is cross_entropy or name == "eaft"  # take mean_logprob and top_logprob only with an option
    wanted = ["logprob"] if fn is cross_entropy else [n for n in parameters if n in FACTS]
    wanted = [n for n in wanted if not (smoothed and n in ("mean_logprob", "top_logprob"))]
    drawn = [n for n in parameters if n not in FACTS and n not in GIVEN]
    inputs = {n: example(n, p.N, S, p.logprob, torch.randn) for n in drawn}
    if name == "uld":
        inputs["foreign_logprob"] = p.teacher.log_softmax(-1).topk(8, -1).values
    given: dict[str, Any] = dict(inputs)
    if "segments" in parameters:
        rows = torch.arange(p.N) // (p.N // S)
        inputs["segments"], given["segments"] = DenseSegments(rows, S), hl.Segments.from_batch((S, p.N // S))  # type: ignore[assignment]
    if "logit_dot" in parameters:
        given["teacher"] = hl.Logits(p.teacher)
    if fn is cross_entropy:
        inputs["mean_logprob"] = None  # type: ignore[assignment]
    objective, targets = hl.Objective(it=fn), p.targets if "logprob" in parameters else None

    def eager() -> Tensor:
        if fn is cross_entropy:
            return F.cross_entropy(p.x, p.targets)
        found = fn(**p.facts(wanted), **inputs)
        return (found[0] if isinstance(found, tuple) else found).mean()

    return Case(
        "no teacher, or its logits alone", name, lambda: objective(hl.Logits(p.x), targets, **given).loss, eager
    )


def dense_cases(p: Problem, name: str, fn: Callable[..., Any]) -> Iterator[Case]:
    """A divergence from a teacher's logits."""

    def eager(teacher: Tensor, temperature: float = 1.0) -> Loss:
        def loss() -> Tensor:
            sides = p.x[:, : teacher.shape[1]], teacher
            logp, logq = ((z if temperature == 1.0 else z / temperature).log_softmax(-1) for z in sides)
            if name == "forward_kl":
                return F.kl_div(logp, logq, reduction="none", log_target=True).sum(-1).mean()
            return fn(logp, logq).sum(-1).mean()

        return loss

    def top() -> Tensor:
        logp, at = p.x.log_softmax(-1).topk(p.ids.shape[1], -1)
        return fn(logp, p.teacher.log_softmax(-1).gather(-1, at)).sum(-1).mean()

    narrow = p.teacher[:, : p.V - 37].contiguous()
    for what, term, teacher, other in (
        ("a dense teacher", hl.Term(fn), p.teacher, eager(p.teacher)),
        ("a dense teacher, temperature 2", hl.Term(fn, temperature=2.0), p.teacher, eager(p.teacher, 2.0)),
        ("a teacher with fewer columns", hl.Term(fn), narrow, eager(narrow)),
        ("the student's top 64", hl.Term(fn, top=p.ids.shape[1], tail="none"), p.teacher, top),
    ):
        objective = hl.Objective(it=term)
        ours = lambda objective=objective, teacher=teacher: objective(hl.Logits(p.x), teacher=hl.Logits(teacher)).loss
        yield Case(what, name, ours, other)


def sparse_cases(p: Problem, name: str, fn: Callable[..., Any]) -> Iterator[Case]:
    """A divergence from 64 ids of a teacher."""
    for tail in ("bucket", "none", "renormalise"):

        def eager(tail: str = tail) -> Tensor:
            found, logq = p.x.gather(-1, p.ids), p.ids_logprob
            if tail == "renormalise":
                return fn(found.log_softmax(-1), logq.log_softmax(-1)).sum(-1).mean()
            logp = found - p.x.logsumexp(-1, keepdim=True)
            inside = fn(logp, logq).sum(-1)
            if tail == "none":
                return inside.mean()
            rest = [torch.log1p(-x.exp().sum(-1)) for x in (logp, logq)]
            return (inside + fn(*rest)).mean()

        objective = hl.Objective(it=hl.Term(fn, tail=tail))
        ours = lambda objective=objective: objective(hl.Logits(p.x), teacher=hl.Sparse(p.ids, p.ids_logprob)).loss
        yield Case(f"64 ids, tail={tail!r}", name, ours, eager)


def cases(p: Problem) -> Iterator[Case]:
    for name, fn in LOSSES.items():
        if is_divergence(fn):
            yield from dense_cases(p, name, fn)
            yield from sparse_cases(p, name, fn)
        elif name not in LEFT_OUT:
            yield term_case(p, name, fn)


def measure(p: Problem, case: Case, rounds: int) -> dict[str, Any]:
    """Medians of so many rounds in turns; nothing if the gradients differ."""

    def step(loss: Loss) -> Tensor:
        return torch.autograd.grad(loss(), p.x)[0]

    ours, eager = step(case.ours), step(case.eager)
    error = float((ours - eager).norm() / eager.norm())
    line: dict[str, Any] = {"group": case.group, "loss": case.name, "difference": error}
    del ours, eager
    if not error < 1e-3:  # of tvd, a column whose two probabilities are equal but for rounding has either sign
        return line | {"wrong": True}
    times: dict[str, list[float]] = {"ms": [], "eager ms": []}
    for i in range(rounds):
        turns = list(zip(times, (case.ours, case.eager), strict=True))
        for name, loss in turns[:: 1 - 2 * (i % 2)]:
            begun = time.perf_counter()
            step(loss)
            times[name].append(1e3 * (time.perf_counter() - begun))
    ms = {name: statistics.median(x) for name, x in times.items()}
    return line | ms | {"ratio": ms["ms"] / ms["eager ms"]}


def run(N: int, V: int, rounds: int) -> dict[str, Any]:
    p, lines = Problem(N, V), []
    for case in cases(p):
        line = measure(p, case, rounds)
        lines.append(line)
        told = (
            "WRONG"
            if "wrong" in line
            else f"{line['ms']:8.2f} ms, eager {line['eager ms']:8.2f}  {line['ratio']:5.2f}x"
        )
        print(f"{case.name:26s} {case.group:32s} {told}", flush=True)
    return {"N": N, "V": V, "dtype": "float32", "rounds": rounds, "lines": lines}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=512)
    parser.add_argument("--vocab", type=int, default=32000)
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    result = {
        "command": command("benchmarks.every_loss"),
        **environment("cpu"),
        **run(args.rows, args.vocab, args.rounds),
    }
    write("every_loss_cpu", result)


if __name__ == "__main__":
    main()
