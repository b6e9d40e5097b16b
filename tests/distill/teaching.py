"""Teachers, written down once more: dense float64, every logit in memory, sparse teachers row by row in Python.

Dimension key:  N rows   R rows that count   V vocabulary   U columns that both have   K ids   D hidden size

Nothing here calls headloss to compute a number.  FORMULAS has each divergence once more, from probabilities; a
divergence of headloss without one makes test_divergences.py red.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import headloss as hl

FLOOR = -1.0e4  # an outcome that the teacher rules out counts as this likely
TAILS = ("bucket", "none", "renormalise")


# Divergences of outcomes with probabilities p (student) and q (teacher), along the last dimension.


def soft_cross_entropy(p: Tensor, q: Tensor) -> Tensor:
    return -torch.xlogy(q, p.clamp(min=math.exp(-700))).sum(-1)


def forward_kl(p: Tensor, q: Tensor) -> Tensor:
    return F.kl_div(p.clamp(min=math.exp(-700)).log(), q, reduction="none").sum(-1)


def reverse_kl(p: Tensor, q: Tensor) -> Tensor:
    logq = torch.where(q > 0, q, 1.0).log().masked_fill(q == 0, FLOOR)
    return F.kl_div(logq, p, reduction="none").sum(-1)


def jsd(p: Tensor, q: Tensor, *, beta: float = 0.5) -> Tensor:
    m = beta * q + (1 - beta) * p
    return (beta * torch.xlogy(q, q) + (1 - beta) * torch.xlogy(p, p) - torch.xlogy(m, m)).sum(-1)


def tvd(p: Tensor, q: Tensor) -> Tensor:
    return torch.maximum(p, q).sum(-1) - (p.sum(-1) + q.sum(-1)) / 2


def skew_kl(p: Tensor, q: Tensor, *, alpha: float = 0.1) -> Tensor:
    return F.kl_div((alpha * q + (1 - alpha) * p).log(), q, reduction="none").sum(-1)


FORMULAS: dict[str, Callable[..., Tensor]] = {
    fn.__name__: fn for fn in (soft_cross_entropy, forward_kl, reverse_kl, jsd, tvd, skew_kl)
}
OPTIONS: dict[str, list[dict[str, float]]] = {  # besides the defaults
    "jsd": [{"beta": 0.1}, {"beta": 0.9}],
    "skew_kl": [{"alpha": 0.4}, {"alpha": 0.0}],
}


def alpha_divergence(logp: Tensor, logq: Tensor, *, alpha: float = 0.5) -> Tensor:
    """A user's own: ((q/p)^alpha - 1) p / (alpha (alpha - 1)), which is a divergence for normalised p and q."""
    return ((alpha * logq + (1 - alpha) * logp).exp() - logp.exp()) / (alpha * (alpha - 1))


def _alpha(p: Tensor, q: Tensor, *, alpha: float = 0.5) -> Tensor:
    return ((q**alpha * p ** (1 - alpha)).sum(-1) - p.sum(-1)) / (alpha * (alpha - 1))


DIVERGENCES: dict[str, Callable[..., Any]] = {
    name: fn for name, fn in hl.losses.LOSSES.items() if "logq" in fn.__code__.co_varnames[: fn.__code__.co_argcount]
}
CASES = [
    *(
        (fn, FORMULAS.get(name), options)
        for name, fn in DIVERGENCES.items()
        for options in [{}, *OPTIONS.get(name, [])]
    ),
    (alpha_divergence, _alpha, {}),
    (alpha_divergence, _alpha, {"alpha": 0.7}),
]


@dataclass(frozen=True)
class Model:
    """Logits, or hidden, weight and bias; and how they are read."""

    tensors: dict[str, Tensor]
    transform: dict[str, Any] = field(default_factory=dict)

    @property
    def kind(self) -> str:
        return "Logits" if "logits" in self.tensors else "Linear"

    @property
    def vocab(self) -> int:
        return self.tensors["logits"].shape[-1] if self.kind == "Logits" else len(self.tensors["weight"])

    def source(self, tensors: Mapping[str, Tensor] | None = None, **more: Any) -> Any:
        x = self.tensors if tensors is None else tensors
        if self.kind == "Logits":
            more.pop("memory", None)
            return hl.Logits(x["logits"], **self.transform, **more)
        return hl.Linear(x["hidden"], x["weight"], x.get("bias"), **self.transform, **more)

    def logits(self, tensors: Mapping[str, Tensor], valid: Tensor) -> Tensor:
        """z of the rows that count: what stands in the others cannot matter."""
        take = lambda x: x.reshape(-1, x.shape[-1])[valid].double()
        if self.kind == "Logits":
            z = take(tensors["logits"])
        else:
            z = take(tensors["hidden"]) @ tensors["weight"].double().T
            z = z + tensors["bias"].double() if "bias" in tensors else z
        z = z * self.transform.get("scale", 1.0)
        cap = self.transform.get("softcap")
        return z if cap is None else cap * torch.tanh(z / cap)

    def divided(self, z: Tensor, valid: Tensor, temperature: float | None) -> Tensor:
        T = self.transform.get("temperature", 1.0) if temperature is None else temperature
        if isinstance(T, Tensor):
            T = T.double().expand(valid.shape if T.ndim == 0 else T.shape).reshape(-1)[valid][:, None]
        return z / T


@dataclass(frozen=True)
class Problem:
    student: Model
    targets: Tensor
    teacher: Model | None = None
    ids: Tensor | None = None  # of a sparse teacher, (..., K)
    logprobs: Tensor | None = None

    @property
    def valid(self) -> Tensor:
        return self.targets.reshape(-1) != -100

    @property
    def rows(self) -> int:
        return int(self.valid.sum())

    def leaves(self, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
        return {n: x.detach().clone().to(dtype).requires_grad_() for n, x in self.student.tensors.items()}

    def teacher_source(self) -> Any:
        if self.teacher is not None:
            return self.teacher.source()
        return hl.Sparse(self.ids, self.logprobs)

    def student_scores(self, leaves: Mapping[str, Tensor], temperature: float | None = None) -> Tensor:
        """s = z / T over the whole vocabulary, (R, V)."""
        return self.student.divided(self.student.logits(leaves, self.valid), self.valid, temperature)

    def dense(self, leaves: Mapping[str, Tensor], temperature: float | None = None) -> tuple[Tensor, Tensor]:
        """log p and log q over the columns that both have."""
        assert self.teacher is not None
        U = min(self.student.vocab, self.teacher.vocab)
        s_RV = self.student_scores(leaves, temperature)
        z_RV = self.teacher.logits(self.teacher.tensors, self.valid)
        t_RV = self.teacher.divided(z_RV, self.valid, temperature)
        return s_RV[:, :U].log_softmax(-1), t_RV[:, :U].log_softmax(-1)

    def named(self) -> list[dict[int, float]]:
        """The sparse teacher's probability of each id it names, a row at a time; repeated ids add up."""
        assert self.ids is not None and self.logprobs is not None
        K = self.ids.shape[-1]
        rows = []
        for ids, logprobs in zip(self.ids.reshape(-1, K)[self.valid], self.logprobs.reshape(-1, K)[self.valid]):
            found: dict[int, float] = {}
            for i, x in zip(ids.tolist(), logprobs.tolist()):
                if i >= 0:
                    found[i] = found.get(i, 0.0) + math.exp(x)
            rows.append(found)
        return rows

    def sparse(
        self, leaves: Mapping[str, Tensor], tail: str, temperature: float | None = None
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """p and q of the outcomes that are compared, row by row."""
        for s_V, named in zip(self.student_scores(leaves, temperature), self.named()):
            ids = torch.tensor(list(named), dtype=torch.long)
            q = torch.tensor(list(named.values()), dtype=torch.float64)
            if tail == "renormalise":
                yield s_V[ids].softmax(-1), q / q.sum()
                continue
            p_V = s_V.softmax(-1)
            if tail == "none":
                yield p_V[ids], q
                continue
            others = torch.ones_like(p_V, dtype=torch.bool)
            others[ids] = False
            left = max(2.0**-52, 1.0 - math.fsum(named.values())) if others.any() else 0.0  # a mass of 1 is rounded
            yield torch.cat([p_V[ids], p_V[others].sum()[None]]), torch.cat([q, q.new_tensor([left])])


def values(
    problem: Problem,
    leaves: Mapping[str, Tensor],
    formula: Callable[..., Tensor],
    options: Mapping[str, Any],
    tail: str = "bucket",
    temperature: float | None = None,
) -> Tensor:
    """The divergence of every row that counts."""
    if problem.teacher is not None:
        logp, logq = problem.dense(leaves, temperature)
        return formula(logp.exp(), logq.exp(), **options)
    found = [formula(p, q, **options) for p, q in problem.sparse(leaves, tail, temperature) if len(q)]
    return torch.stack(found) if found else next(iter(leaves.values())).new_zeros(0)


def truth(problem: Problem, loss: Callable[[Mapping[str, Tensor]], Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """A mean over rows and its gradient."""
    leaves = problem.leaves()
    value = loss(leaves).sum() / max(1, problem.rows)
    grads = torch.autograd.grad(value, list(leaves.values()), allow_unused=True)
    return value.detach(), {n: torch.zeros_like(x) if g is None else g for (n, x), g in zip(leaves.items(), grads)}


def run(
    objective: hl.Objective,
    problem: Problem,
    *,
    dtype: torch.dtype = torch.float64,
    rows: int | None = None,
    **call: Any,
) -> tuple[Any, dict[str, Tensor]]:
    """What headloss says; `rows` is how many of the student's logits the budget has room for."""
    leaves = problem.leaves(dtype)
    source = problem.student.source(leaves, **({} if rows is None else {"memory": budget(problem, rows)}))
    if "teacher" not in call:
        call["teacher"] = problem.teacher_source()
    out = objective(source, problem.targets, **call)
    out.loss.backward()
    return out, {n: x.grad for n, x in leaves.items()}


def budget(problem: Problem, rows: int) -> int:
    """A `memory` that holds this many rows of student and teacher."""
    width = sum(8 * _width(m) for m in (problem.student, problem.teacher) if m is not None)
    return rows * width


def _width(model: Model) -> int:
    """Columns of a row; over a shard the widest rank's, twice, for two chunks exist at once."""
    shard = model.transform.get("shard")
    return model.vocab if shard is None else 2 * shard.even_width


def close(got: Any, want: Any, tolerance: float = 1e-10, what: str = "") -> None:
    got, want = (torch.as_tensor(x, dtype=torch.float64) for x in (got, want))
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance, msg=lambda m: f"{what}: {m}")


def check(out: Any, grads: Mapping[str, Tensor], want: Any, tolerance: float = 1e-10, what: str = "") -> None:
    value, by_name = want
    close(out.loss.detach(), value, tolerance, f"{what} loss")
    for name, g in by_name.items():
        close(grads[name], g, tolerance, f"{what} gradient of {name}")


# Problems: nothing divides anything, and ignored rows hold NaN and infinities.


def model(
    kind: str, shape: tuple[int, ...], vocab: int, *, size: int = 5, sharp: float = 2.0, **transform: Any
) -> Model:
    randn = lambda *size: torch.randn(*size, dtype=torch.float64)
    if kind == "Logits":
        return Model({"logits": sharp * randn(*shape, vocab)}, transform)
    tensors = {"hidden": sharp * randn(*shape, size), "weight": randn(vocab, size), "bias": randn(vocab)}
    return Model(tensors, transform)


def spoil(x: Tensor, targets: Tensor) -> Tensor:
    """NaN and infinities in the rows that are ignored."""
    gone = (targets == -100).view(*targets.shape, *(1 for _ in x.shape[targets.ndim :]))
    bad = torch.tensor([math.nan, math.inf, -math.inf], dtype=x.dtype).repeat(targets.numel())
    return torch.where(gone, bad[: targets.numel()].view(gone.shape), x)


def spoiled(model: Model, targets: Tensor) -> Model:
    tensors = {n: spoil(x, targets) if n in ("logits", "hidden") else x for n, x in model.tensors.items()}
    return replace(model, tensors=tensors)


def sparse_teacher(shape: tuple[int, ...], vocab: int, K: int = 6) -> tuple[Tensor, Tensor]:
    """Ids that repeat, are padded and come in no order; masses below 1, above 1, and with probabilities of 0."""
    ids = torch.rand(*shape, vocab).argsort(-1)[..., :K].clone()
    logprobs = (torch.randn(*shape, K, dtype=torch.float64)).log_softmax(-1) + math.log(0.8)
    flat_ids, flat = ids.view(-1, K), logprobs.view(-1, K)
    flat_ids[::3, 1] = flat_ids[::3, 4]  # repeated
    flat_ids[1::4, 2] = flat_ids[1::4, 0] = flat_ids[1::4, 5]
    flat_ids[::2, 3] = -1
    flat[::2, 3] = math.nan  # nobody says what stands at padding
    flat[2::5, 0] = -math.inf
    flat[3::7] += 0.7  # weights of sampled tokens: more than 1
    return ids, logprobs


def make(
    student: str = "Logits",
    teacher: str = "Logits",
    shape: tuple[int, ...] = (13,),
    vocab: int = 23,
    *,
    teacher_vocab: int | None = None,
    ignored: bool = True,
    transform: Mapping[str, Any] | None = None,
    teacher_transform: Mapping[str, Any] | None = None,
    sharp: float = 2.0,
    seed: int = 0,
) -> Problem:
    torch.manual_seed(seed)
    targets = torch.randint(vocab, shape)
    if ignored:
        targets[torch.rand(shape) < 0.3] = -100
    student_source = spoiled(model(student, shape, vocab, sharp=sharp, **(transform or {})), targets)
    if teacher == "Sparse":
        ids, logprobs = sparse_teacher(shape, vocab)
        return Problem(student_source, targets, None, ids, spoil(logprobs, targets))
    teacher_source = model(teacher, shape, teacher_vocab or vocab, size=4, sharp=sharp, **(teacher_transform or {}))
    return Problem(student_source, targets, spoiled(teacher_source, targets))
