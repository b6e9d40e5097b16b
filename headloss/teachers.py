"""Facts that compare a row with a teacher: their sums, merge, values and pulls, organised like `facts.py`.

Dimension key:  N rows   K ids per row   R parts to be merged
Symbols:        u teacher logits   q = softmax(u / T)   p the student's softmax over the columns that both have

A dense teacher (logits, or hidden and weight) is swept together with the student.  With x = (z - max) / T and
y = (u - teacher max) / T, over the columns that student and teacher share:

    teacher_cross_entropy   -sum q log p     p_j - q_j
    reverse_cross_entropy   -sum p log q     -p_j (log q_j + reverse_cross_entropy)
    shared_entropy          -sum p log p     -p_j (log p_j + shared_entropy)
    teacher_entropy         -sum q log q     none: a constant of the student
    teacher_argmax          its best column  none: a metric
    teacher_tail_logprob    log of its mass on tokens that the student lacks, on a larger vocabulary: a constant
    logit_dot               sum z u          u_j, by z and not by s: these three ignore the temperature
    logit_square            sum z^2          2 z_j
    teacher_logit_square    sum u^2          none: a constant of the student
    divergence              sum f(log p, log q) for any element-wise f, with c_j = df/d(log p_j):  c_j - p_j sum_k c_k

The last needs both softmaxes before its own sum: a second read of the row in the same visit.

A sparse teacher names K columns per row.  The loss sees only those and the tail, the rest of the vocabulary:

    ids_logprob (N, K)   log p at the ids           1[j = i_k] - p_j
    tail_logprob         log sum_{j not an id} p_j  1[j not an id] e^(s_j - tail lse) - p_j
    ids_logit (N, K)     s at the ids               1[j = i_k]: no softmax at all
    topk_overlap         the fraction of the n ids that are among the n likeliest columns: a metric

The sweep itself finds the K likeliest columns of a row; the lower column wins a tie:

    top_ids (N, K)               the columns, the likeliest first   none
    top_logprob (N, K)           log p there                        1[j = i_k] - p_j
    teacher_top_logprob (N, K)   a dense teacher's log q there      none: a constant of the student

The tail has its own maximum, and its pull uses e^(s_j - tail lse): 1 - sum p would lose all digits in float32.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from headloss.fact_rule import Pull, Rule, sum_pulls

FLOOR = -1.0e4  # exp(FLOOR) is 0 in every dtype, and 0 * FLOOR is 0 where 0 * -inf would be NaN

Temperature = float | Tensor
Pairs = Sequence[tuple[Temperature, Temperature]]  # of student and teacher, one per temperature of the comparison


class DenseChunk(NamedTuple):
    """A dense teacher in a sweep: its raw logits for the rows of a chunk, and how to read them."""

    raw_CV: Tensor
    scale: float
    softcap: float | None
    temperatures: tuple[Temperature, ...]  # the teacher's, one per temperature of the comparison
    columns: int  # how many of the student's columns of this rank it shares
    tail: tuple[Tensor, ...] = ()  # (C,) its log-sum-exp over columns that the student lacks, one per temperature


class SparseChunk(NamedTuple):
    """A sparse teacher in a sweep: the columns it names, in the whole vocabulary; -1 names none."""

    ids_CK: Tensor
    sorted_CK: Tensor | None = None  # the same columns in order, where that is known
    once: bool = False  # whether every row surely names each column once at most

    def in_order(self) -> Tensor:
        return (self.ids_CK.sort(-1).values if self.sorted_CK is None else self.sorted_CK).contiguous()


class TopChunk(NamedTuple):
    """How many of the likeliest columns are wanted per row, and a teacher's logits to be read at them."""

    k: int
    of: DenseChunk | None = None


TeacherChunk = DenseChunk | SparseChunk


def places(ids_CK: Tensor, start: int, V: int) -> tuple[Tensor, Tensor]:
    """Each id (or target) as an index into the V columns passed in, and whether it is one; if not, it is arbitrary."""
    column_CK = ids_CK - start if start else ids_CK
    here_CK = (column_CK >= 0) & (column_CK < V)  # no column of a part is negative, whose start is not
    return column_CK.clamp(0, max(0, V - 1)), here_CK


class JointMoments(NamedTuple):
    """Sums over the shared columns of one part at one temperature of student and teacher.  Each is (N,)."""

    S: Tensor  # sum e^x, the student's
    X: Tensor | None  # sum x e^x
    St: Tensor  # sum e^y, the teacher's
    Y: Tensor | None  # sum y e^y
    F: Tensor | None  # sum x e^y
    G: Tensor | None  # sum y e^x


class DensePartial(NamedTuple):
    max: Tensor  # (N,) the teacher's
    argmax: Tensor | None
    moments: tuple[JointMoments, ...]  # one per temperature
    square: Tensor | None = None  # (N,) sum z^2 over the shared columns; the next two likewise
    teacher_square: Tensor | None = None  # sum u^2
    dot: Tensor | None = None  # sum z u


class TeacherTop(NamedTuple):
    """A dense teacher's logits at the student's likeliest columns."""

    max: Tensor  # (N,) the teacher's
    at: tuple[Tensor, ...]  # (N, K) (u - max) / T at the columns, one per temperature
    sums: tuple[Tensor, ...]  # (N,) sum e^((u - max) / T)


class SparsePartial(NamedTuple):
    ids: Tensor  # (N, K) z at the ids - max, -inf for an id that is not in this part
    tail_max: Tensor | None  # (N,)
    tails: tuple[Tensor, ...]  # (N,) sum over the tail of e^((z - tail_max) / T), one per temperature
    top: Tensor | None  # (N, K) the largest z - max
    columns: Tensor | None = None  # (N, K) if `ids` are the largest: their columns, in the whole vocabulary
    teacher_top: TeacherTop | None = None


TeacherPartial = DensePartial | SparsePartial


class DenseSoftmax(NamedTuple):
    """log p_j = (z_j - max) / T - log_S and log q_j = (u_j - teacher max) / T - log_St, over the shared columns."""

    max: Tensor
    log_S: tuple[Tensor, ...]
    log_St: tuple[Tensor, ...]
    slopes: tuple[Tensor | None, ...] = ()  # sum_k c_k of each divergence, in the order of the Want, or None


class SparseSoftmax(NamedTuple):
    """The tail's own softmax: (z_j - tail_max) / T - tail_log_sum."""

    tail_max: Tensor | None
    tail_log_sums: tuple[Tensor, ...]


TeacherSoftmax = DenseSoftmax | SparseSoftmax


class DivergencePull(NamedTuple):
    """The pull of one divergence, g (c_j - p_j C); see the table above."""

    element: Any
    g: Tensor
    C: Any  # (N,); None if the pull sees the whole row and sums c itself


class DensePull(NamedTuple):
    """p_j (a + b log p_j + c log q_j) + d q_j, and divergences, at one temperature; None where no fact needs the term.

    z z_j + u u_j is the gradient by z itself, so it is not divided by a temperature.
    """

    a: Tensor | None = None
    b: Tensor | None = None
    c: Tensor | None = None
    d: Tensor | None = None
    divergences: tuple[DivergencePull, ...] = ()
    z: Tensor | None = None
    u: Tensor | None = None

    @property
    def of_logits(self) -> bool:
        return self.z is not None or self.u is not None


class SparsePull(NamedTuple):
    """ids_k 1[j = i_k] + tail 1[j not an id] e^(s_j - tail lse), at one temperature.  -p_j is in the student's pull."""

    ids: Tensor | None = None  # (N, K)
    tail: Tensor | None = None


TeacherPulls = tuple[DensePull, ...] | tuple[SparsePull, ...]  # one per temperature


def column(T: Temperature) -> Temperature:
    """A temperature next to (N, K): one per row as (N, 1)."""
    return T.unsqueeze(-1) if isinstance(T, Tensor) else T


def _overlap(ids: Tensor, top: Tensor) -> Tensor:
    """For a row with n ids: the fraction of them that are among its n likeliest columns."""
    n_N = (ids > -math.inf).sum(-1, keepdim=True)
    least_N = top.gather(-1, (n_N - 1).clamp(min=0))
    among = (ids >= least_N) & (ids > -math.inf)
    return among.sum(-1).to(ids.dtype) / n_N[:, 0].clamp(min=1)


# Values are computed from fields of `JointMoments`, and from log_S, log_St and argmax; see `fact_rule.Rule`.
DENSE: dict[str, Rule] = {
    "teacher_cross_entropy": Rule(lambda log_S, F, St: log_S - F / St, lambda g: DensePull(a=g, d=-g)),
    "reverse_cross_entropy": Rule(lambda log_St, G, S: log_St - G / S, lambda g, value: DensePull(a=-g * value, c=-g)),
    "teacher_entropy": Rule(lambda log_St, Y, St: log_St - Y / St, moves=False),
    "shared_entropy": Rule(lambda log_S, X, S: log_S - X / S, lambda g, value: DensePull(a=-g * value, b=-g)),
    "teacher_argmax": Rule(lambda argmax: argmax.long(), moves=False),
    "teacher_tail_logprob": Rule(None, moves=False),  # see `facts.with_tails`
    "logit_dot": Rule(lambda dot: dot, lambda g: DensePull(u=g)),
    "logit_square": Rule(lambda square: square, lambda g: DensePull(z=2 * g)),
    "teacher_logit_square": Rule(lambda teacher_square: teacher_square, moves=False),
    "divergence": Rule(None, lambda g: DensePull()),  # the second read gives its value and its pull
}
# From fields of `SparsePartial`, and from T, log_S, tail_log_sum and the student's max.
SPARSE: dict[str, Rule] = {
    "ids_logprob": Rule(
        lambda ids, T, log_S: ids / column(T) - log_S.unsqueeze(-1),
        lambda g: SparsePull(ids=g),
        student_pull=lambda g: Pull(a=-g.sum(-1)),
    ),
    "tail_logprob": Rule(
        lambda tail_max, max, T, tail_log_sum, log_S: (tail_max - max) / T + tail_log_sum - log_S,
        lambda g: SparsePull(tail=g),
        student_pull=lambda g: Pull(a=-g),
    ),
    "ids_logit": Rule(
        lambda ids, max, T: (ids + max.unsqueeze(-1)) / column(T), lambda g: SparsePull(ids=g), reads_value=True
    ),
    "topk_overlap": Rule(_overlap),
}
# From the same, and from teacher_at and teacher_log_sum.
TOP: dict[str, Rule] = {
    "top_ids": Rule(lambda columns: columns.long(), moves=False, reads_value=True),
    "top_logprob": SPARSE["ids_logprob"],
    "teacher_top_logprob": Rule(
        lambda teacher_at, teacher_log_sum: (teacher_at - teacher_log_sum.unsqueeze(-1)).clamp(min=FLOOR), moves=False
    ),
}
COMPARING = DENSE | SPARSE | TOP


def merge_teacher(parts: TeacherPartial, shift: Tensor, pairs: Pairs) -> TeacherPartial:
    """Combine R partials, stacked as (R, N, ...) tensors; `shift` is how far the student's maxima moved."""
    if isinstance(parts, SparsePartial):
        return _merge_sparse(parts, shift, pairs)
    best = parts.max.amax(0)
    moved = how_far(parts.max, best)
    argmax = None if parts.argmax is None else parts.argmax.gather(0, parts.max.argmax(0, keepdim=True))[0]
    moments = []
    for (S, X, St, Y, F, G), (T, Tt) in zip(parts.moments, pairs, strict=True):
        d, dt = (shift / T).clamp(min=FLOOR), (moved / Tt).clamp(min=FLOOR)
        k, kt = d.exp(), dt.exp()
        d, dt = d.masked_fill(shift == -math.inf, 0.0), dt.masked_fill(moved == -math.inf, 0.0)  # F and G have FLOOR
        moments.append(
            JointMoments(
                S=(k * S).sum(0),
                X=None if X is None else (k * (X + d * S)).sum(0),
                St=(kt * St).sum(0),
                Y=None if Y is None else (kt * (Y + dt * St)).sum(0),
                F=None if F is None else torch.where(kt > 0, kt * (F + d * St), 0.0).sum(0),
                G=None if G is None else torch.where(k > 0, k * (G + dt * S), 0.0).sum(0),
            )
        )
    of_logits = [None if x is None else x.sum(0) for x in parts[3:]]
    return DensePartial(best, argmax, tuple(moments), *of_logits)


def logit_sums(z_BU: Tensor, u_BU: Tensor, asked: Callable[[str], bool]) -> list[Tensor | None]:
    """The last three fields of a `DensePartial`, each if asked for."""
    pairs = {"square": (z_BU, z_BU), "teacher_square": (u_BU, u_BU), "dot": (z_BU, u_BU)}
    return [torch.linalg.vecdot(*pair) if asked(name) else None for name, pair in pairs.items()]


def logit_pull(grad_BU: Tensor, z_BU: Tensor, u_BU: Tensor, pull: DensePull, rows: slice) -> None:
    """Add the pull on the logits themselves (`z`, `u`) to d(loss)/d(z)."""
    for k, x_BU in ((pull.z, z_BU), (pull.u, u_BU)):
        if k is not None:
            grad_BU.addcmul_(x_BU, k[rows, None].to(x_BU.dtype))


def _merge_sparse(parts: SparsePartial, shift: Tensor, pairs: Pairs) -> SparsePartial:
    tail_max, tails, top = None, parts.tails, None
    if parts.tail_max is not None:
        tail_max = parts.tail_max.amax(0)
        moved = how_far(parts.tail_max, tail_max)
        tails = tuple(((moved / T).clamp(min=FLOOR).exp() * S).sum(0) for S, (T, _) in zip(tails, pairs, strict=True))
    if parts.top is not None:
        every = (parts.top + shift[..., None]).movedim(0, 1).flatten(1)
        top = every.topk(parts.top.shape[-1], -1).values
    if parts.columns is not None:
        every, columns = (x.movedim(0, 1).flatten(1) for x in (parts.ids + shift[..., None], parts.columns))
        chosen = largest(every, columns, parts.columns.shape[-1])
        teacher_top = None if parts.teacher_top is None else _merge_teacher_top(parts.teacher_top, chosen, pairs)
        return SparsePartial(every.gather(-1, chosen), None, (), None, columns.gather(-1, chosen), teacher_top)
    return SparsePartial((parts.ids + shift[..., None]).amax(0), tail_max, tails, top)


def largest(values_NM: Tensor, columns_NM: Tensor, k: int) -> Tensor:
    """(N, k) the indices of the k largest, in descending order; if equal, the lower column first."""
    by_column_NM = columns_NM.argsort(-1)
    by_value_NM = values_NM.gather(-1, by_column_NM).argsort(dim=-1, descending=True, stable=True)
    return by_column_NM.gather(-1, by_value_NM[:, :k])


def _merge_teacher_top(parts: TeacherTop, chosen: Tensor, pairs: Pairs) -> TeacherTop:
    best = parts.max.amax(0)
    moved, at, sums = how_far(parts.max, best), [], []
    for at_RNK, S_RN, (_, T) in zip(parts.at, parts.sums, pairs, strict=True):
        d_RN = (moved / T).clamp(min=FLOOR)
        at.append((at_RNK + d_RN[..., None]).movedim(0, 1).flatten(1).gather(-1, chosen))
        sums.append((d_RN.exp() * S_RN).sum(0))
    return TeacherTop(best, tuple(at), tuple(sums))


def how_far(maxima: Tensor, best: Tensor) -> Tensor:
    """How far each part's maximum moves to the common one."""
    return torch.where(maxima == -math.inf, -math.inf, maxima - best)  # -inf - (-inf) must not reach the sums


def finish_teacher(
    partial: TeacherPartial,
    asked: Sequence[Any],
    temperatures: Sequence[float | None],
    max_N: Tensor,
    student: Mapping[float | None, tuple[Temperature, Tensor]],
) -> tuple[dict[Any, Tensor], TeacherSoftmax]:
    """The facts asked for, and the softmax that their pull needs.  `student`: its temperature and log-sum by key."""
    if isinstance(partial, SparsePartial):
        return _finish_sparse(partial, asked, temperatures, max_N, student)
    moments = [m._replace(S=_positive(m.S), St=_positive(m.St)) for m in partial.moments]
    log_S, log_St = tuple(m.S.log() for m in moments), tuple(m.St.log() for m in moments)
    rows = [
        {**m._asdict(), **partial._asdict(), "log_S": log_S_N, "log_St": log_St_N}
        for m, log_S_N, log_St_N in zip(moments, log_S, log_St, strict=True)
    ]
    made = [f for f in asked if f.element is None and f.name != "teacher_tail_logprob"]
    values = {f: DENSE[f.name].value(rows[temperatures.index(f.temperature)]) for f in made}
    return values, DenseSoftmax(partial.max.masked_fill(partial.max == -math.inf, 0.0), log_S, log_St)


def _finish_sparse(
    partial: SparsePartial,
    asked: Sequence[Any],
    temperatures: Sequence[float | None],
    max_N: Tensor,
    student: Mapping[float | None, tuple[Temperature, Tensor]],
) -> tuple[dict[Any, Tensor], TeacherSoftmax]:
    tail_log_sums = tuple(_positive(S).log() for S in partial.tails)
    values, teacher_top = {}, partial.teacher_top
    for fact in asked:
        T, log_S = student[fact.temperature]
        i = temperatures.index(fact.temperature)
        tail = tail_log_sums[i] if tail_log_sums else None
        row = {**partial._asdict(), "max": max_N, "T": T, "log_S": log_S, "tail_log_sum": tail}
        if teacher_top is not None:
            row |= {"teacher_at": teacher_top.at[i], "teacher_log_sum": _positive(teacher_top.sums[i]).log()}
        values[fact] = (SPARSE | TOP)[fact.name].value(row)
    tail_max = partial.tail_max
    if tail_max is not None:
        tail_max = tail_max.masked_fill(tail_max == -math.inf, 0.0)
    return values, SparseSoftmax(tail_max, tail_log_sums)


def _positive(S: Tensor) -> Tensor:
    return S.masked_fill(S == 0, 1.0)  # 0: there was no column, or every logit was -inf


def teacher_coefficients(
    softmax: TeacherSoftmax,
    temperatures: Sequence[float | None],
    asked: Sequence[Any],
    facts: Mapping[Any, Tensor],
    grads: Mapping[Any, Tensor],
) -> TeacherPulls:
    """The chain rule for one teacher's facts, per temperature."""
    pulls: list[Any] = []
    divergent = [f for f in asked if f.element is not None]
    slopes = dict(zip(divergent, softmax.slopes, strict=True)) if isinstance(softmax, DenseSoftmax) else {}
    for T in temperatures:
        pulling = [f for f in asked if f.temperature == T and grads.get(f) is not None]
        kind: Any = SparsePull if isinstance(softmax, SparseSoftmax) else DensePull
        total = sum_pulls(kind, [COMPARING[f.name].pull(grads[f], facts.get(f)) for f in pulling])
        divergences = [DivergencePull(f.element, grads[f], slopes[f]) for f in pulling if f.element is not None]
        pulls.append(total._replace(divergences=tuple(divergences)) if divergences else total)
    return tuple(pulls)
