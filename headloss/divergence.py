"""Divergences between student and teacher, as element-wise functions of (log p, log q).

A loss whose parameters are `logp` and `logq` is a divergence: it is summed over the vocabulary, or over the columns
that a sparse teacher names.  One function serves both.

    def alpha_divergence(logp, logq, *, alpha=0.5):
        return ((alpha * logq + (1 - alpha) * logp).exp() - logp.exp()) / (alpha * (alpha - 1))

With a dense teacher the sum needs both softmaxes first, so the row is read a second time, in the same visit.  If the
facts of the first read are enough, the divergence has an attribute `one_pass`: a loss on facts with the same value.
With a sparse teacher it becomes a loss on `ids_logprob` and `tail_logprob`.  The tail is treated in one of three ways:

    bucket        the rest of the vocabulary is one more outcome, with the mass the teacher leaves, at least a rounding
    none          only the ids count; their probabilities come from the softmax over the whole vocabulary
    renormalise   student and teacher are softmaxes over the ids alone: no full softmax, and no full GEMM

log p and log q are clamped at -1e4, so that an outcome of probability 0 adds a finite number times its weight, not NaN.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from headloss.bounded_cache import store
from headloss.options import parameters_of
from headloss.teachers import FLOOR
from headloss.trace.cache_keys import ByIdentity
from headloss.trace.call import call_guarded
from headloss.trace.classify import without_hooks
from headloss.trace.function_reads import Reads, is_ours, mark_all_ours, reads_of
from headloss.trace.gradient import reach_of
from headloss.trace.in_place import Buffer, InPlace, in_place
from headloss.trace.signature import function_name

Lazy = Callable[[], Tensor]
TAILS = ("bucket", "none", "renormalise")


def is_divergence(fn: Callable[..., Any]) -> bool:
    """Whether a loss is an element-wise function of (log p, log q)."""
    parameters = parameters_of(fn).values()
    return [p.name for p in parameters if p.kind is not p.KEYWORD_ONLY] == ["logp", "logq"]


MANY = 1 << 15  # rows, and columns, that a user's function is tried on


class Element:
    """A divergence with its options, as a sweep runs it; equal if it has the same function and reads the same."""

    def __init__(self, fn: Callable[..., Any], options: Mapping[str, Any], pure: bool = False) -> None:
        self.fn, self.options, self.pure = fn, dict(options), pure
        self._key = (ByIdentity(fn), self.reads().key)

    def reads(self) -> Reads:
        """What the function reads now besides log p and log q."""
        return reads_of(self.fn, self.options, pure=self.pure)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Element) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    def __str__(self) -> str:
        parameters = parameters_of(self.fn).values()
        options = ", ".join(
            f"{p.name}={self.options.get(p.name, p.default)}" for p in parameters if p.kind is p.KEYWORD_ONLY
        )
        return f"{function_name(self.fn)}({options})"

    def value(self, logp: Tensor, logq: Tensor) -> Tensor:
        given = {"logp": logp, "logq": logq}
        value = call_guarded(self.fn, function_name(self.fn), given, lambda x: self.fn(*x.values(), **self.options))
        if not isinstance(value, Tensor) or value.shape != logp.shape:
            got = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise TypeError(f"{self}: wanted one value per element of log p, {tuple(logp.shape)}, got {got}")
        return value

    def check_again(self, first: bool = False) -> None:
        """`check`, unless a function that reads the same values has passed: what it reads may have changed since.

        `first`: a term is being made of it, so it is checked even if it is ours or `pure`.
        """
        if not first and (self.pure or is_ours(self.fn)):
            return
        found = self.reads()
        if self.pure or found.unknown:
            self.check(of_many=first)
        elif found.key not in _CHECKED:
            self.check()
            store(_CHECKED, found.key, None, _MOST_KEPT)

    def check(self, of_many: bool = True) -> None:
        """Raise if a column's value depends on other columns: it would change with how rows and vocabulary are split.

        `of_many`: also try as many rows and columns as a chunk may have.
        """
        spread = torch.arange(70, dtype=torch.float64, device="cpu").view(14, 5)
        height = torch.where(spread < 45, 20.0, 1.0)  # nine rows have columns of probability near 0, five have none
        logp, logq = (height * (spread * k).sin() for k in (1.3, 2.1))
        logp, logq = logp.log_softmax(-1), logq.log_softmax(-1)
        try:
            whole, part = self.value(logp, logq), self.value(logp[:, 1:4], logq[:, 1:4])
            rows = [self.value(logp[i:], logq[i:]) for i in (1, 9, 13)]
            times = [(MANY // 14, 1), (1, MANY // 5)] if of_many and not is_ours(self.fn) else []
            many = [(whole.repeat(n), self.value(logp.repeat(n), logq.repeat(n))) for n in times]
        except RuntimeError:  # for example, it holds tensors on another device
            return
        cuts = ((whole[:, 1:4], part), *((whole[-len(x) :], x) for x in rows), *many)
        if not all(torch.allclose(x, y, rtol=1e-9, atol=1e-12, equal_nan=True) for x, y in cuts):
            raise TypeError(
                f"{self}: wanted an element-wise function of log p and log q, but a column's value depends on others, "
                f"or on how many there are"
            )

    def captured(self, device: torch.device) -> str:
        """In words, what the function reads besides log p and log q that requires grad; empty if nothing."""
        if is_ours(self.fn) or not (self.pure or self.reads().unknown):
            return ""
        with torch.enable_grad():
            logp = torch.full((1, 1), -1.0, dtype=torch.float32, device=device, requires_grad=True)
            return reach_of(self.value(logp, logp.detach()), {}, [logp]).captured

    def value_and_slope(self, logp: Tensor, logq: Tensor) -> tuple[Tensor, Tensor]:
        """f_j, and c_j = df/d(log p_j)."""
        if torch.is_inference_mode_enabled():
            with torch.inference_mode(False):
                return self.value_and_slope(logp.clone(), logq.clone())
        slope = None
        with without_hooks(), torch.enable_grad():
            leaf = logp.detach().requires_grad_()
            value = self.value(leaf, logq)
            if value.requires_grad:
                (slope,) = torch.autograd.grad(value, leaf, torch.ones_like(value))
        return value.detach(), torch.zeros_like(logp) if slope is None else slope

    def mark(self, columns: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A number that stands for what the function reads now; for so many columns, as it may capture a table of them.

        Made of the key of what it reads or, where that is not known, of its values and slopes on a made-up row.
        """
        found = self.reads()
        if not found.unknown:
            return torch.tensor(hash(found.key[1:]), device="cpu")  # without the default dtype and device
        logp = torch.linspace(-9.0, -0.1, columns, dtype=dtype, device=device)[None]
        return torch.cat(self.value_and_slope(logp, logp.flip(-1))).view(torch.int32).sum()

    def sum_and_pull(self, logp: Lazy, logq: Lazy, p: Tensor, q: Tensor, out: Tensor, buffer: Buffer) -> Tensor:
        """The sum over the columns, given p and q too, so that our own functions need no exponentials.  Writes the
        gradient with respect to the logits, c - p sum c with c = df/d(log p), to `out`.  `buffer`: memory to work in.
        """
        steps = self._steps(p)
        if steps is None:
            each, slope = self.value_and_slope(logp(), logq())
            value = each.sum(-1)
        else:
            value, own = steps({"logp": logp, "logq": logq, "p": lambda: p, "q": lambda: q}, buffer)
            if own is None:
                out.zero_()
                return value
            if steps.by_p:  # c = p df/dp, in one pass, which needs contiguous rows to write to
                if out.is_contiguous():
                    torch._softmax_backward_data(own, p, -1, p.dtype, grad_input=out)
                else:
                    out.copy_(torch._softmax_backward_data(own, p, -1, p.dtype))
                return value
            slope = own
        torch.addcmul(slope, p, slope.sum(-1, keepdim=True), value=-1, out=out)
        return value

    def _steps(self, like: Tensor) -> InPlace | None:
        """How to run one of our own functions without autograd."""
        if not is_ours(self.fn) or isinstance(like, FakeTensor):
            return None
        key = self.reads().key, like.dtype
        made = _STEPS.get(key)
        if made is None:
            made = store(_STEPS, key, (in_place(functools.partial(self.fn, **self.options), like.dtype),), _MOST_KEPT)
        return made[0]


_STEPS: dict[Any, tuple[InPlace | None]] = {}
_CHECKED: dict[Any, None] = {}  # by what a function reads, so that one defined anew in every step is checked once
_MOST_KEPT = 256


def sparse_loss(fn: Callable[..., Any], tail: str) -> Callable[..., Any]:
    """The same divergence as a loss on the columns that a sparse teacher names."""
    return _made(_over_ids_alone if tail == "renormalise" else _over_ids, fn, tail)


def _made(make: Callable[..., Any], fn: Callable[..., Any], *how: str) -> Callable[..., Any]:
    """The loss that `make` builds from a divergence; built once for our own, which read nothing that can change."""
    if is_ours(fn) and not fn.__kwdefaults__:
        return _made_once(make, fn, *how)
    loss = _with_options(make(fn, *how), fn)
    if is_ours(fn):
        mark_all_ours(loss)
    return loss


@functools.cache
def _made_once(make: Callable[..., Any], fn: Callable[..., Any], *how: str) -> Callable[..., Any]:
    loss = _with_options(make(fn, *how), fn)
    loss.fixed = True  # type: ignore[attr-defined]  # for `function_reads.ours`
    return loss


def _over_ids(fn: Callable[..., Any], tail: str) -> Callable[..., Any]:
    def ids(ids_logprob, teacher_ids, teacher_logprob, **options):  # type: ignore[no-untyped-def]
        is_id = teacher_ids >= 0
        logp = torch.where(is_id, ids_logprob, 0.0).clamp(min=FLOOR)
        logq = torch.where(is_id, teacher_logprob, 0.0).clamp(min=FLOOR)
        value = torch.where(is_id, fn(logp, logq, **options), 0.0).sum(-1)
        mass = torch.where(is_id, logq.exp(), 0.0).sum(-1)
        student = torch.where(is_id, logp.exp(), 0.0).sum(-1)
        return value, {"student_mass": student, "teacher_mass": mass}

    def bucket(ids_logprob, tail_logprob, teacher_ids, teacher_logprob, **options):  # type: ignore[no-untyped-def]
        value, masses = ids(ids_logprob, teacher_ids, teacher_logprob, **options)
        mass = masses["teacher_mass"]
        left = torch.log1p(-mass.clamp(max=1.0))
        rounding = math.log(torch.finfo(mass.dtype).eps)  # a mass of 1 is only 1 up to this: it rules out no tail
        left = torch.where(tail_logprob > FLOOR, left.clamp(min=rounding), left.clamp(min=FLOOR))
        return value + fn(tail_logprob.clamp(min=FLOOR), left, **options), masses

    return bucket if tail == "bucket" else ids


def _over_ids_alone(fn: Callable[..., Any], tail: str) -> Callable[..., Any]:
    def loss(ids_logit, teacher_ids, teacher_logprob, **options):  # type: ignore[no-untyped-def]
        is_id = teacher_ids >= 0
        s = torch.where(is_id, ids_logit, -math.inf)
        most = s.logsumexp(-1, keepdim=True).detach()
        s = (s - most.masked_fill(most == -math.inf, 0.0)).clamp(min=FLOOR)  # relative to the largest
        logp = torch.where(is_id, s, FLOOR).log_softmax(-1)
        mass = teacher_logprob.logsumexp(-1, keepdim=True)
        logq = (teacher_logprob - mass.masked_fill(mass == -math.inf, 0.0)).clamp(min=FLOOR)
        logp, logq = torch.where(is_id, logp, 0.0), torch.where(is_id, logq, 0.0)  # else padding has a slope of NaN
        return torch.where(is_id, fn(logp, logq, **options), 0.0).sum(-1)

    return loss


def top_loss(fn: Callable[..., Any], tail: str) -> Callable[..., Any]:
    """The same divergence as a loss on the student's likeliest columns, where a dense teacher is read too."""
    return _made(_over_top, fn, tail)


def _over_top(fn: Callable[..., Any], tail: str) -> Callable[..., Any]:
    def loss(top_logprob, teacher_top_logprob, **options):  # type: ignore[no-untyped-def]
        masses = {"student_mass": top_logprob.exp().sum(-1), "teacher_mass": teacher_top_logprob.exp().sum(-1)}
        logp, logq = top_logprob.clamp(min=FLOOR), teacher_top_logprob
        if tail == "renormalise":
            logp, logq = logp.log_softmax(-1).clamp(min=FLOOR), logq.log_softmax(-1).clamp(min=FLOOR)
        return fn(logp, logq, **options).sum(-1), masses

    return loss


def _with_options(loss: Callable[..., Any], fn: Callable[..., Any]) -> Callable[..., Any]:
    """`loss` with its **options spelled out in its signature, as those of `fn`."""
    own = [p for p in parameters_of(loss).values() if p.kind is not p.VAR_KEYWORD]
    options = [p for p in parameters_of(fn).values() if p.kind is p.KEYWORD_ONLY]
    loss.__signature__ = inspect.Signature([*own, *options])  # type: ignore[attr-defined]
    loss.__name__ = function_name(fn)
    return loss


def bucket_loss(fn: Callable[..., Any]) -> Callable[..., Any]:
    """A dense divergence plus one more outcome: the teacher's tokens that a student with fewer tokens lacks."""
    return _made(_with_rest, fn)


def _with_rest(fn: Callable[..., Any]) -> Callable[..., Any]:
    def loss(divergence, teacher_tail_logprob, **options):  # type: ignore[no-untyped-def]
        return divergence + fn(torch.full_like(teacher_tail_logprob, FLOOR), teacher_tail_logprob, **options)

    return loss


def summed(divergence: Tensor) -> Tensor:
    """The loss behind a dense divergence: the fact itself."""
    return divergence
