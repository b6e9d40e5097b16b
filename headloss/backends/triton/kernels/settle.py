# mypy: ignore-errors
"""Settling, between the two sweeps: the facts of all rows, the losses, their sums and the gradient's coefficients.

Dimension key:  N rows   B rows of a block   G segments and, first of all, the rows without one   F numbers per row

A program owns a segment and reads its rows once for each level of sums (`printer/segments.py`), then once more to write
the results per row.  `sums` (F, N) has the results of a sweep over a chunk, or (W, F, N) those of W ranks that share
the vocabulary.  `found` (F, N) receives what `visit_kernel` stores there, except the terms' values; `rows` (F, N) what
the pull reads; `by_segment` (F, G) each term's sum, how many rows count, and the segment's metrics.  All sums run in
the same order each time.

The rows of group g are those from offsets[g] to offsets[g + 1], directly or by way of `order`.  Rows with target -100
among them are ignored.
"""

import triton
import triton.language as tl

from headloss.backends.triton.kernels.logits import temperature
from headloss.backends.triton.kernels.printed_arguments import argument, number
from headloss.backends.triton.kernels.row_outputs import COLUMN, TEACHER_COLUMN
from headloss.backends.triton.kernels.sums import put, rebased, rebased_total


@triton.jit
def block_of(first, end, target, order, F: tl.constexpr):
    """The rows of a block, which lanes are in the group, and which rows count; other lanes repeat the last row."""
    B: tl.constexpr = F.B
    lane = first + tl.arange(0, B)
    here = lane < end
    row = tl.minimum(lane, end - 1).to(tl.int64)
    if F.ORDERED:
        row = tl.load(order + row)
    live = here
    if F.IGNORE:
        live = live & (tl.load(target + row) != -100)
    return row, here, live


@triton.jit
def live_only(x, live):
    """x, but 0 in ignored rows; of the same type."""
    return tl.where(live, x, tl.full([], 0, x.dtype))


@triton.jit
def field(sums, slot, N, like, PRESENT: tl.constexpr):
    """A number per row, or 0 if it is not PRESENT; and the slot of the next."""
    found = tl.zeros_like(like)
    if PRESENT:
        found = tl.load(sums + slot * N)
        slot += 1
    return found, slot


@triton.jit
def sums_of(sums, N, F: tl.constexpr):
    """Load the sums of a sweep over a block, in the order of `sweeps.named`: target, total, its count, S, X and Q."""
    top = tl.load(sums)
    away, slot = field(sums, 1, N, top, F.PICK)
    total, slot = field(sums, slot, N, top, F.TOTAL)
    count, slot = field(sums, slot, N, top, F.TOTAL)
    if F.BEST:
        slot += 1
    S, X, Q = (), (), ()
    for i in tl.static_range(len(F.PER_ROW)):
        s, slot = field(sums, slot, N, top, True)
        x, slot = field(sums, slot, N, top, F.WANT_X[i])
        q, slot = field(sums, slot, N, top, F.WANT_Q[i])
        S, X, Q = S + (s,), X + (x,), Q + (q,)
    return away, total, count, S, X, Q


@triton.jit
def sums_of_rank(sums, top, T, N, F: tl.constexpr):
    """The same for the columns of one rank, relative to the maximum over all ranks."""
    m = tl.load(sums)
    away, total, count, S, X, Q = sums_of(sums, N, F)
    shift = tl.where(m == -float("inf"), -float("inf"), m - top)
    S_, X_, Q_ = (), (), ()
    for i in tl.static_range(len(T)):
        s, x, q = rebased(shift, T[i], S[i], X[i], Q[i])
        S_, X_, Q_ = S_ + (s,), X_ + (x,), Q_ + (q,)
    return away + shift, rebased_total(shift, total, count), S_, X_, Q_


@triton.jit
def plus(xs, ys):
    sums = ()
    for i in tl.static_range(len(xs)):
        sums = sums + (xs[i] + ys[i],)
    return sums


@triton.jit
def merged(sums, T, N, ranks, stride, F: tl.constexpr):
    """`facts.merge` over ranks that share a vocabulary, one after the other, so that all ranks find the same bits."""
    top = tl.load(sums)
    best = tl.zeros_like(top)
    if F.BEST:
        best = tl.load(sums + F.BEST_SLOT * N)
    if F.RANKS:
        for rank in range(1, ranks):
            at = sums + rank * stride
            m = tl.load(at)
            if F.BEST:
                best = tl.where(m > top, tl.load(at + F.BEST_SLOT * N), best)  # a tie keeps the earlier column
            top = tl.maximum(top, m)
        away, total, S, X, Q = sums_of_rank(sums, top, T, N, F)
        for rank in range(1, ranks):
            away_, total_, S_, X_, Q_ = sums_of_rank(sums + rank * stride, top, T, N, F)
            away, total = tl.maximum(away, away_), total + total_
            S, X, Q = plus(S, S_), plus(X, X_), plus(Q, Q_)
    else:
        away, total, _count, S, X, Q = sums_of(sums, N, F)
    return top, away, total, best.to(tl.int64), S, X, Q


@triton.jit
def teacher_sums(sums, slot, N, like, F: tl.constexpr):
    """Load the sums of dense teachers, which follow the student's own, in the order of `settle.packed`: maxima,
    argmaxes, the six sums per temperature of the comparison, and each divergence with the sum of its slopes."""
    DIVERGENCES: tl.constexpr = F.DIVERGENCES
    tops, bests, joint, divergences, slopes = (), (), (), (), ()
    for _i in tl.static_range(len(F.TEACHER_BEST)):
        x, slot = field(sums, slot, N, like, True)
        tops = tops + (x,)
    for i in tl.static_range(len(F.TEACHER_BEST)):
        x, slot = field(sums, slot, N, like, F.TEACHER_BEST[i])
        bests = bests + (x.to(tl.int64),)
    for i in tl.static_range(len(F.JOINT)):
        x, slot = field(sums, slot, N, like, F.JOINT[i])
        joint = joint + (x,)
    for _i in tl.static_range(DIVERGENCES):
        x, slot = field(sums, slot, N, like, True)
        divergences = divergences + (x,)
        x, slot = field(sums, slot, N, like, True)
        slopes = slopes + (x,)
    return tops, bests, joint, divergences, slopes


@triton.jit
def facts_of(sums, column, live, row, N, ranks, stride, columns, given, VALUES: tl.constexpr, F: tl.constexpr):
    """`facts.finish` of a block: facts, the student's maximum and log_sums, and the teachers'."""
    T = ()
    for i in tl.static_range(len(F.PER_ROW)):
        T = T + (temperature(given.temperatures[i], row, F.PER_ROW[i]),)
    teacher_numbers = ()
    top, away, total, best, S, X, Q = merged(sums + column, T, N, ranks, stride, F)
    if F.TEACHERS:
        tops, bests, joint, divergences, slopes = teacher_sums(sums + column, F.TEACHER_SLOT, N, top, F)
        values, logs, teacher_logs = VALUES(top, away, total, best, T, S, X, Q, columns, bests, joint, divergences)
        for i in tl.static_range(len(tops)):
            teacher_numbers = teacher_numbers + (live_only(tl.where(tops[i] > -float("inf"), tops[i], 0.0), live),)
        for i in tl.static_range(len(teacher_logs)):
            teacher_numbers = teacher_numbers + (live_only(teacher_logs[i], live),)
        for i in tl.static_range(len(slopes)):
            teacher_numbers = teacher_numbers + (live_only(slopes[i], live),)
    else:
        values, logs = VALUES(top, away, total, best, T, S, X, Q, columns)
    facts, log_sums = (), ()
    for i in tl.static_range(len(values)):
        facts = facts + (live_only(values[i], live),)
    for i in tl.static_range(len(logs)):
        log_sums = log_sums + (live_only(logs[i], live),)
    return facts, live_only(tl.where(top > -float("inf"), top, 0.0), live), log_sums, teacher_numbers


@triton.jit
def inputs_of(given, row, group, live, F: tl.constexpr):
    inputs = ()
    for i in tl.static_range(len(F.INPUT_ROWS)):
        if F.INPUT_ROWS[i] == 2:
            inputs = inputs + (argument(given.inputs[i], tl.maximum(group - 1, 0), 0, 0, 1),)
        elif F.INPUT_ROWS[i] == 1:
            inputs = inputs + (live_only(argument(given.inputs[i], row, 0, 0, 1), live),)
        else:
            inputs = inputs + (argument(given.inputs[i], 0, 0, 0, F.INPUT_ROWS[i]),)
    return inputs


@triton.jit
def weights_of(given, row, count, F: tl.constexpr):
    """Each term's weight of a row, or of the segment: in the value, and in the gradient."""
    weights, seeds = (), ()
    for i in tl.static_range(len(F.BASE_KINDS)):
        weight = number(given.bases[i], row, F.BASE_KINDS[i] >= 0, F.BASE_KINDS[i] == 1).to(tl.float32)
        if F.MEANS[i]:
            weight = tl.div_rn(weight, tl.maximum(count, 1.0).to(tl.float32))
        weights = weights + (weight,)
        seeds = seeds + (weight * number(given.factors[i], 0, F.FACTOR_KINDS[i] >= 0, False).to(tl.float32),)
    return weights, seeds


@triton.jit
def zeros(FIRST: tl.constexpr, COUNT: tl.constexpr, F: tl.constexpr):
    """Sums to start from, each in float32 or (WIDE) in float64."""
    B: tl.constexpr = F.B
    sums = ()
    for i in tl.static_range(COUNT):
        if F.WIDE[FIRST + i]:
            sums = sums + (tl.zeros([B], tl.float64),)
        else:
            sums = sums + (tl.zeros([B], tl.float32),)
    return sums


@triton.jit
def added(sums, parts, live):
    more = ()
    for i in tl.static_range(len(sums)):
        more = more + (sums[i] + tl.where(live, parts[i], 0.0).to(sums[i].dtype),)
    return more


@triton.jit
def read(
    first, end, group, count, sums, target, order, given, N, first_row, ranks, stride, columns,
    VALUES: tl.constexpr, F: tl.constexpr,
):  # fmt: skip
    """Load a block of rows, with everything of them that the printed function takes."""
    B: tl.constexpr = F.B
    row, here, live = block_of(first, end, target, order, F)
    facts, top, log_sums, teacher_numbers = facts_of(
        sums, row - first_row, live, row, N, ranks, stride, columns, given, VALUES, F
    )
    inputs = inputs_of(given, row, group, live, F)
    weights, seeds = weights_of(given, row, count, F)
    y = tl.zeros([B], tl.int64)
    if F.TARGET:
        y = live_only(tl.load(target + row).to(tl.int64), live)
    return row, here, live, facts, top, log_sums, teacher_numbers, inputs, weights, seeds, y


@triton.jit(
    do_not_specialize=["N", "all_rows", "first_row", "first_group", "groups", "ranks", "stride"],
    do_not_specialize_on_alignment=["target", "order", "offsets"],
)
def settle_kernel(
    at, target, order, offsets, given, N, all_rows, first_row, first_group, groups, ranks, stride,
    FN: tl.constexpr, VALUES: tl.constexpr, F: tl.constexpr,
):  # fmt: skip
    B: tl.constexpr = F.B
    group = first_group + tl.program_id(0)
    inside = group > 0
    if F.RUNS:  # which are no segments
        begin = (first_row + tl.program_id(0) * B).to(tl.int64)
        end = tl.minimum(begin + B, first_row + N)
    else:
        begin, end = tl.load(offsets + group), tl.load(offsets + group + 1)
    step, wide, across, stride = N.to(tl.int64), all_rows.to(tl.int64), groups.to(tl.int64), stride.to(tl.int64)
    columns = number(given.vocab, 0, False, False).to(tl.float32)
    earlier, literals = (), ()
    for i in tl.static_range(len(given.numbers)):
        literals = literals + (number(given.numbers[i], 0, False, False).to(tl.float32),)

    count = (end - begin).to(tl.float64)
    if F.IGNORE:
        counted = tl.zeros([B], tl.int32)
        for first in range(begin, end, B):
            row, here, live = block_of(first, end, target, order, F)
            counted += live.to(tl.int32)
        count = tl.sum(counted, 0).to(tl.float64)

    for walk in tl.static_range(len(F.SUMS)):
        partial = zeros(len(earlier), F.SUMS[walk], F)
        for first in range(begin, end, B):
            row, here, live, facts, top, log_sums, teacher_numbers, inputs, weights, seeds, y = read(
                first, end, group, count, at.sums, target, order, given, step, first_row, ranks, stride, columns,
                VALUES, F,
            )  # fmt: skip
            parts = FN(walk, facts, inputs, y, literals, seeds, columns, earlier, count, inside)
            partial = added(partial, parts, live)
        for i in tl.static_range(len(partial)):
            earlier = earlier + (tl.sum(partial[i], 0),)

    LAST: tl.constexpr = len(F.SUMS)
    totals = ()
    for _i in tl.static_range(len(F.OF_SEGMENTS)):
        totals = totals + (tl.zeros([B], tl.float32),)
    for first in range(begin, end, B):
        row, here, live, facts, top, log_sums, teacher_numbers, inputs, weights, seeds, y = read(
            first, end, group, count, at.sums, target, order, given, step, first_row, ranks, stride, columns, VALUES, F
        )
        values, metrics, by_fact, by_input, pulls, teacher_pulls = FN(
            LAST, facts, inputs, y, literals, seeds, columns, earlier, count, inside
        )
        weighted = ()
        for i in tl.static_range(len(values)):
            weighted = weighted + (values[i] * weights[i],)
        totals = added(totals, weighted, live)

        out = put(top, at.found + row, wide, True, here)
        softmax = log_sums + teacher_numbers
        for i in tl.static_range(len(softmax)):
            out = put(softmax[i], out, wide, True, here)
        for i in tl.static_range(len(F.KINDS)):
            if F.KINDS[i] == COLUMN:
                tl.store(at.best + row, facts[i], mask=here)
            elif F.KINDS[i] == TEACHER_COLUMN:
                tl.store(at.teacher_best + row + F.BEST_OF[i] * wide, facts[i], mask=here)
            else:
                out = put(facts[i], out, wide, True, here)
        rest = metrics + by_fact + by_input
        for i in tl.static_range(len(rest)):
            out = put(tl.where(live, rest[i], 0.0), out, wide, True, here)
        if F.GRADIENT:
            into = put(top, at.rows + (row - first_row), step, True, here)
            for i in tl.static_range(len(F.USED)):
                into = put(log_sums[F.USED[i]], into, step, True, here)
                for k in tl.static_range(5):
                    pulled = tl.where(live, pulls[5 * F.USED[i] + k], 0.0)
                    into = put(pulled, into, step, F.PRESENT[5 * F.USED[i] + k], here)
            for i in tl.static_range(len(F.TEACHER_PULLS)):
                into = put(tl.where(live, teacher_pulls[i], 0.0), into, step, F.TEACHER_PULLS[i], here)

    # results per segment: one without rows does not count
    counts = inside & (count > 0)
    inputs = inputs_of(given, 0, group, counts, F)
    weights, seeds = weights_of(given, 0, count, F)
    values, metrics = FN(LAST + 1, (), inputs, 0, literals, seeds, columns, earlier, count, inside)
    by_segment = at.by_segment + group
    for i in tl.static_range(len(F.OF_SEGMENTS)):
        if F.OF_SEGMENTS[i]:
            tl.store(by_segment + i * across, tl.where(counts, values[i] * weights[i], 0.0))
        else:
            tl.store(by_segment + i * across, tl.sum(totals[i], 0))
    tl.store(by_segment + len(F.OF_SEGMENTS) * across, tl.where(inside, count, 0.0).to(tl.float32))
    for i in tl.static_range(len(metrics)):
        tl.store(by_segment + (len(F.OF_SEGMENTS) + 1 + i) * across, metrics[i])
