"""What a call can say, in any combination: run as it is, and compared by `hl.verify` with dense float64.

Every draw is a call that works or one that is refused by name; anything else fails here.  $EXAMPLES says how many.
"""

from __future__ import annotations

import inspect
import os
import random as standard
from typing import Any

import pytest
import torch
import torch.distributed as dist
from interpreting import INSIDE, rerun
from torch import Tensor

import headloss as hl
from headloss.divergence import is_divergence
from headloss.losses import LOSSES

NARROW = [torch.float32, torch.float16]  # the interpreter cuts bfloat16 off
BACKEND, DTYPES = ("triton", NARROW) if INSIDE else ("torch", [torch.float64, torch.float64, torch.float32])
ROUNDS = 5  # calls per test


@pytest.mark.timeout(600)
@pytest.mark.skipif(INSIDE, reason="this is the other process")
def test_under_the_interpreter(request: pytest.FixtureRequest) -> None:
    pytest.importorskip("triton")
    rerun(__file__, *(["--slow"] if request.config.getoption("--slow") else []))


def margin(top_logprob: Tensor) -> Tensor:
    return (1 - top_logprob[:, 0] + top_logprob[:, 1]).clamp(min=0)


def mixed(logprob: Tensor, entropy: Tensor, lse: Tensor, *, a: float = 0.3) -> Tensor:
    return -logprob * (1 + a * entropy.detach()) + 0.01 * lse**2


def by_segment(logprob: Tensor, advantage: Tensor, segments: hl.Segments) -> Tensor:
    return -segments.means(logprob * advantage)


def at_ids(ids_logprob: Tensor, logprob: Tensor) -> Tensor:
    return -ids_logprob.clamp(min=-50).sum(-1) - logprob


def likely(logprob: Tensor) -> Tensor:
    return (logprob > -3).to(logprob.dtype)


def spread(entropy: Tensor, logprob: Tensor) -> dict[str, Tensor]:
    return {"gap": entropy - logprob, "entropy_max": entropy}


by_segment.returns = "segment"  # type: ignore[attr-defined]
OWN = {"margin": margin, "mixed": mixed, "by_segment": by_segment, "at_ids": at_ids}
METRICS = ["entropy", "accuracy", "perplexity", "teacher_agreement", "max_logprob", spread]
TEACHES = {"teacher_cross_entropy", "logit_dot", "teacher_ids", "teacher_logprob", "tail_logprob"}
PLAIN = ("advantage", "value", "returns", "old_value", "draw")


class Draw:
    """One call: an objective, a source, targets and all that it is given."""

    def __init__(self, seed: int, backend: str = BACKEND) -> None:
        self.backend, self.pick = backend, standard.Random(seed)
        self.seeded = torch.Generator(torch.get_default_device()).manual_seed(seed)
        self.dtype, self.V, self.call = self.pick.choice(DTYPES), self.pick.choice([19, 37, 53]), {}
        N = self.pick.choice([7, 11, 13, 24])
        self.shape = (N // 2, 2) if N == 24 and self.chance(0.4) else (N,)
        self.kept = self.chance(0.35)
        self.source_and_targets()
        self.objective_of_terms()
        self.inputs()

    def chance(self, p: float) -> bool:
        return self.pick.random() < p

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.seeded, dtype=torch.float64)

    def rand(self, *shape: int) -> Tensor:
        return torch.rand(*shape, generator=self.seeded, dtype=torch.float64)

    def integers(self, high: int) -> Tensor:
        return torch.randint(high, self.shape, generator=self.seeded)

    def source_and_targets(self) -> None:
        V, D, more = self.V, self.pick.choice([3, 8]), {}
        if self.chance(0.3):
            more["temperature"] = self.pick.choice([0.7, 2.0, (self.rand(*self.shape) + 0.5).to(self.dtype)])
        more |= {"softcap": 5.0} if self.chance(0.2) else {}
        more |= {"scale": 0.5} if self.chance(0.2) else {}
        tokens, rows, self.full = None, V, V
        if self.chance(0.2) and not self.kept:
            self.full = V + self.pick.choice([5, 14])
            more["vocab_ids"] = tokens = torch.randperm(self.full, generator=self.seeded)[:V]
        elif self.chance(0.15):
            more["vocab"], rows = V, V + 3
        sharp = self.pick.choice([1.0, 1.0, 5.0])
        if self.chance(0.65):
            leaves = [self.normal(*self.shape, D) * sharp, self.normal(rows, D), self.normal(rows)]
            leaves = [x.to(self.dtype).requires_grad_(self.chance(0.85)) for x in leaves]
            more |= {"memory": self.pick.choice([4, 12, 20]) * rows * 8} if self.chance(0.4) else {}
            self.source: Any = hl.Linear(*leaves[: self.pick.choice([2, 2, 3])], **more)
        else:
            self.source = hl.Logits((self.normal(*self.shape, rows) * sharp).to(self.dtype).requires_grad_(), **more)
        self.targets: Any = self.integers(self.full)
        if tokens is not None:
            self.targets = torch.where(self.rand(*self.shape) < 0.8, tokens[self.integers(V)], self.targets)
        self.targets[self.rand(*self.shape) < self.pick.choice([0, 0.3])] = -100

    def term(self, name: str) -> hl.Term:
        fn, pick = OWN.get(name) or LOSSES[name], self.pick
        how: dict[str, Any] = {"top": pick.choice([2, 3])} if name == "margin" else {}
        if is_divergence(fn):
            how |= {"top": 3} if self.chance(0.15) else {}
            how |= {"tail": pick.choice(["none", "bucket", "renormalise"])} if self.chance(0.5) else {}
        how |= {"weight": pick.choice([0.5, torch.tensor(0.3), 0.0])} if self.chance(0.3) else {}
        how |= {"temperature": pick.choice([0.5, 3.0, 1.0])} if self.chance(0.25) else {}
        how |= {"row_weight": pick.choice(["kept", likely, ["kept", likely]])} if self.chance(0.25) else {}
        if self.chance(0.35):
            how["reduction"] = pick.choice(["token_sum", "weighted_mean", "seq_mean_token_mean", "seq_mean_token_sum"])
            if how["reduction"].startswith("seq") and self.chance(0.4):
                how["reduction_segments"] = "prompts"
        how |= {"targets": "own_targets"} if self.chance(0.1) else {}
        how |= {"support": "all"} if self.kept and self.chance(0.3) else {}
        return hl.Term(fn, **how)

    def objective_of_terms(self) -> None:
        names = [self.pick.choice([*LOSSES, *OWN]) for _ in range(self.pick.choice([1, 1, 2, 3]))]
        metrics = self.pick.sample(METRICS, self.pick.choice([0, 1, 2]))
        self.objective = hl.Objective(
            **{f"{n}_{i}": self.term(n) for i, n in enumerate(names)}, metrics=metrics, backend=self.backend
        )
        self.asked = set()
        for term in self.objective.terms.values():
            for fn in (term.fn, *(w for w in term.row_weights if callable(w))):
                self.asked |= {p.name for p in inspect.signature(fn).parameters.values() if p.kind != p.KEYWORD_ONLY}
            own = (*(w for w in term.row_weights if isinstance(w, str)), term.targets, term.reduction_segments)
            self.asked |= {x for x in own if x is not None}
        teaches = bool(self.asked & TEACHES) or "teacher_agreement" in metrics
        if teaches or any(is_divergence(t.fn) for t in self.objective.terms.values()):
            self.call["teacher"] = self.teacher(self.pick.choice(["dense", "dense", "sparse", "head", "routed"]))

    def teacher(self, kind: str) -> Any:
        logits = lambda: (self.normal(*self.shape, self.full) * 2).to(self.dtype)
        if kind == "dense":
            return hl.Logits(logits(), temperature=self.pick.choice([1.0, 2.0]))
        if kind == "head":
            return hl.Linear(self.normal(*self.shape, 4).to(self.dtype), self.normal(self.full, 4).to(self.dtype))
        if kind == "routed":
            return hl.Routed({"a": hl.Logits(logits()), "b": hl.Logits(logits())}, self.integers(3) - 1)
        top = logits().float().log_softmax(-1).topk(4)
        return hl.Sparse(top.indices.masked_fill(self.rand(*self.shape, 4) < 0.1, -1), top.values)

    def input(self, name: str, segments: hl.Segments) -> Any:
        own = torch.promote_types(self.dtype, torch.float32)  # what a loss makes of narrow inputs alone, is narrow
        wide = self.pick.choice([torch.float64, own, own])
        match name:
            case "prompts":
                return hl.Segments.from_ids(self.integers(2), 3)
            case "pairs":
                return torch.tensor([[0, 1], [1, 2]])
            case "desirable":
                return hl.PerSegment(torch.arange(segments.num_segments) % 2 == 0)
            case "optimal_advantage":
                return hl.PerSegment(self.normal(segments.num_segments).to(wide))
            case "kl":
                return torch.tensor(0.3)
            case "own_targets":
                targets = self.integers(self.full)
                return targets.masked_fill((self.rand(*self.shape) < 0.2) | (self.targets == -100), -100)
            case "foreign_logprob":
                return self.normal(*self.shape, 9).log_softmax(-1)
            case "kept" | "token_weight":
                weight = self.rand(*self.shape)
                return hl.PerRow(weight.masked_fill(weight < 0.2, 0).to(wide))
            case "old_logprob" | "ref_logprob" | "sampler_logprob":
                return hl.PerRow((-3 + 0.5 * self.normal(*self.shape)).to(wide))
        return hl.PerRow(self.normal(*self.shape).to(wide).requires_grad_(name == "value"))

    def inputs(self) -> None:
        S, call = self.pick.choice([3, 4, 5]), self.call
        segments = hl.Segments.from_ids(self.integers(S), S + self.pick.choice([0, 1]))
        if "segments" in self.asked or any(t.needs_segments for t in self.objective.terms.values()):
            call["segments"] = segments
        named = ("prompts", "pairs", "desirable", "optimal_advantage", "kl", "own_targets", "foreign_logprob", "kept")
        named += ("token_weight", "old_logprob", "ref_logprob", "sampler_logprob", *PLAIN)
        call |= {n: self.input(n, segments) for n in sorted(self.asked) if n in named}
        if "ids_logprob" in self.asked and "teacher" not in call:
            call["ids"] = self.rand(*self.shape, self.full).argsort(-1)[..., :3]
        if self.kept:
            mask = self.rand(*self.shape, self.V) < self.pick.choice([0.1, 0.5, 1.0])
            mask[..., 0] |= ~mask.any(-1)
            call["support"] = hl.Support.from_mask(mask)
        call |= {"grad_scale": 1024.0} if self.chance(0.15) else {}
        call |= {"num_items": 17} if self.chance(0.15) else {}
        call |= {"host_read": False} if self.chance(0.1) else {}
        if self.chance(0.15):
            call["weights"] = {next(iter(self.objective.terms)): self.pick.choice([0.7, 0.0, torch.tensor(2.0)])}
        if self.chance(0.2):
            taken = {n: call.pop(n) for n in ("segments", "support") if n in call}
            self.targets = hl.prepare(self.targets, vocab_ids=self.source.vocab_ids, **taken)


def first_seeds(slow: bool) -> range:
    return range(0, int(os.environ.get("EXAMPLES", "400")) if slow else 10 if INSIDE else 60, ROUNDS)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "first" in metafunc.fixturenames:
        metafunc.parametrize("first", first_seeds(bool(metafunc.config.getoption("--slow", False))))


@pytest.mark.filterwarnings("ignore")
def test_it_is_right_or_refused(first: int) -> None:
    right_or_refused(range(first, first + ROUNDS))


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("begin", range(0, 80, 10))
def test_on_a_gpu(begin: int) -> None:
    with torch.device("cuda"):
        right_or_refused(range(begin, begin + 10), "auto")


def right_or_refused(seeds: range, *backend: str) -> None:
    ran = 0
    for seed in seeds:
        try:
            draw = Draw(seed, *backend)
            found = hl.verify(draw.objective, draw.source, draw.targets, rows=64, **draw.call)
        except (TypeError, ValueError) as error:
            assert str(error).split(":")[0].isidentifier(), f"seed {seed}: {error!r} names no argument"
            continue
        ran += 1
        assert found.ok, f"seed {seed}: {found}"
    assert ran, "all were refused"


def cut(source: Any, start: int, stop: int, width: int) -> tuple[Any, dict[str, Tensor]]:
    """A rank's columns of a source, and its leaves."""
    names = [n for n in ("logits", "hidden", "weight", "bias") if getattr(source, n, None) is not None]
    take = {"logits": (..., slice(start, stop)), "hidden": (...,)}
    leaves = {}
    for name in names:
        x = getattr(source, name)
        leaves[name] = x.detach()[take.get(name, slice(start, stop))].clone().requires_grad_(x.requires_grad)
    how = {n: getattr(source, n) for n in ("temperature", "scale", "softcap", "memory") if hasattr(source, n)}
    shard = hl.VocabShard(dist.group.WORLD, start, source.vocab, width=width)
    return type(source)(*leaves.values(), shard=shard, **how), leaves


def on_ranks(seeds: range) -> int:
    """The same calls on a vocabulary that two ranks share, in any parts: the same loss, metrics and gradients."""
    ran, rank = 0, dist.get_rank()
    for seed in seeds:
        try:
            draw = Draw(seed)
            out = draw.objective(draw.source, draw.targets, **draw.call)
        except (TypeError, ValueError):
            continue
        V, teacher = draw.source.vocab, draw.call.get("teacher")
        at = draw.pick.randrange(V + 1)
        start, stop = (0, at) if rank == 0 else (at, V)
        if draw.source.vocab_ids is not None or isinstance(teacher, hl.Routed):
            continue
        if isinstance(teacher, hl.Logits | hl.Linear):
            draw.call["teacher"], _ = cut(teacher, start, stop, max(at, V - at))
        source, leaves = cut(draw.source, start, stop, max(at, V - at))
        got = draw.objective(source, draw.targets, **draw.call)
        tolerance = 1e-9 if draw.dtype == torch.float64 else 2e-4
        close = lambda a, b: torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance, equal_nan=True)
        close(got.loss.detach(), out.loss.detach())
        close({n: float(m) for n, m in got.metrics.items()}, {n: float(m) for n, m in out.metrics.items()})
        live = {n: x for n, x in leaves.items() if x.requires_grad and out.loss.requires_grad}
        if live:
            mine = torch.autograd.grad(got.loss, list(live.values()), allow_unused=True, materialize_grads=True)
            whole = [getattr(draw.source, n) for n in live]
            whole = torch.autograd.grad(out.loss, whole, allow_unused=True, materialize_grads=True)
            for name, x, y in zip(live, mine, whole, strict=True):
                part = {"logits": y[..., start:stop], "hidden": y}.get(name, y[start:stop])
                scale = y.abs().max().clamp(min=1e-3)
                close(x / scale, part / scale)
        ran += 1
    return ran


@pytest.mark.skipif(INSIDE, reason="ran in the other process")
def test_two_ranks_agree_with_one(ranks: Any, request: pytest.FixtureRequest) -> None:
    many = int(os.environ.get("EXAMPLES", "400")) if request.config.getoption("--slow") else 20
    assert min(ranks(2, on_ranks, range(many))) > many // 3
