# mypy: ignore-errors
"""Settle: between the two sweeps, the facts of all rows, the losses, their sums and the coefficients of the gradient.

Dimension key:  N rows   B rows of a block   G segments and, first of all, the rows without one   F numbers per row

A program owns a segment and walks its rows once for each level of sums (`printer/segments.py`), then once more to write
what belongs to rows.  `sums` (F, N) is what a sweep left of a chunk; `found` (F, N) takes what `visit_kernel` leaves
there but for the terms' values; `rows` (F, N) what the pull reads; `by_segment` (F, G) each term's sum, how many rows
count, and the segment's metrics.  All sums run in the same order each time.

The rows of group g are those from offsets[g] to offsets[g + 1], by themselves or as `order` numbers them.  Rows of
target -100 among them are ignored.
"""

import triton
import triton.language as tl

from headloss.backends.triton.kernels.given import argument, number
from headloss.backends.triton.kernels.logits import temperature


@triton.jit
def block_of(at, end, target, order, ORDERED: tl.constexpr, IGNORE: tl.constexpr, B: tl.constexpr):
    """The rows of a block, where it lies inside the group, and which of those count; lanes beyond it stay inside."""
    lane = at + tl.arange(0, B)
    here = lane < end
    row = tl.minimum(lane, end - 1).to(tl.int64)
    if ORDERED:
        row = tl.load(order + row)
    live = here
    if IGNORE:
        live = live & (tl.load(target + row) != -100)
    return row, here, live


@triton.jit
def kept(x, live):
    """0 in rows that do not count, as everywhere; of the same type."""
    return tl.where(live, x, tl.full([], 0, x.dtype))


@triton.jit
def facts_of(
    sums, column, live, row, N, vocab, temperatures, VALUES: tl.constexpr, PER_ROW: tl.constexpr,
    TARGET: tl.constexpr, TOTAL: tl.constexpr, BEST: tl.constexpr, WANT_X: tl.constexpr, WANT_Q: tl.constexpr,
):  # fmt: skip
    """`facts.finish` of a block: facts, maximum and log_sums.  The sums stand in the order of `sweeps.named`."""
    sums += column
    top = tl.load(sums)
    slot = 1
    away, total, best = top, top, tl.zeros_like(column)
    if TARGET:
        away = tl.load(sums + slot * N)
        slot += 1
    if TOTAL:
        total = tl.load(sums + slot * N)
        slot += 2
    if BEST:
        best = tl.load(sums + slot * N).to(tl.int64)
        slot += 1
    T, S, X, Q = (), (), (), ()
    for i in tl.static_range(len(temperatures)):
        T = T + (temperature(temperatures[i], row, PER_ROW[i]),)
        S = S + (tl.load(sums + slot * N),)
        slot += 1
        if WANT_X[i]:
            X = X + (tl.load(sums + slot * N),)
            slot += 1
        else:
            X = X + (0.0,)
        if WANT_Q[i]:
            Q = Q + (tl.load(sums + slot * N),)
            slot += 1
        else:
            Q = Q + (0.0,)
    values, logs = VALUES(top, away, total, best, T, S, X, Q, vocab)
    facts, log_sums = (), ()
    for i in tl.static_range(len(values)):
        facts = facts + (kept(values[i], live),)
    for i in tl.static_range(len(logs)):
        log_sums = log_sums + (kept(logs[i], live),)
    return facts, kept(tl.where(top > -float("inf"), top, 0.0), live), log_sums


@triton.jit
def inputs_of(inputs, row, group, live, KINDS: tl.constexpr):
    given = ()
    for i in tl.static_range(len(inputs)):
        if KINDS[i] == 2:
            given = given + (argument(inputs[i], tl.maximum(group - 1, 0), 0, 0, 1),)
        elif KINDS[i] == 1:
            given = given + (kept(argument(inputs[i], row, 0, 0, 1), live),)
        else:
            given = given + (argument(inputs[i], 0, 0, 0, KINDS[i]),)
    return given


@triton.jit
def weights_of(bases, factors, row, count, BASES: tl.constexpr, FACTORS: tl.constexpr, MEANS: tl.constexpr):
    """Each term's weight of a row, or of the segment, in its value; and in the gradient."""
    weights, seeds = (), ()
    for i in tl.static_range(len(bases)):
        weight = number(bases[i], row, BASES[i] >= 0, BASES[i] == 1).to(tl.float32)
        if MEANS[i]:
            weight = tl.div_rn(weight, tl.maximum(count, 1.0).to(tl.float32))
        weights = weights + (weight,)
        seeds = seeds + (weight * number(factors[i], 0, FACTORS[i] >= 0, False).to(tl.float32),)
    return weights, seeds


@triton.jit
def zeros(FIRST: tl.constexpr, COUNT: tl.constexpr, WIDE: tl.constexpr, B: tl.constexpr):
    """Sums of nothing, each in float32 or (WIDE) in float64."""
    sums = ()
    for i in tl.static_range(COUNT):
        if WIDE[FIRST + i]:
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
    at, end, group, count, sums, target, order, temperatures, inputs, bases, factors, N, first_row, vocab,
    VALUES: tl.constexpr, TARGET: tl.constexpr, TOTAL: tl.constexpr, BEST: tl.constexpr,
    WANT_X: tl.constexpr, WANT_Q: tl.constexpr, LOOKS: tl.constexpr, PER_ROW: tl.constexpr, INPUTS: tl.constexpr,
    BASES: tl.constexpr, FACTORS: tl.constexpr, MEANS: tl.constexpr, ORDERED: tl.constexpr,
    IGNORE: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    """A block of rows with everything that the printed function takes of them."""
    row, here, live = block_of(at, end, target, order, ORDERED, IGNORE, B)
    facts, top, log_sums = facts_of(
        sums, row - first_row, live, row, N, vocab, temperatures, VALUES, PER_ROW,
        TARGET, TOTAL, BEST, WANT_X, WANT_Q,
    )  # fmt: skip
    given = inputs_of(inputs, row, group, live, INPUTS)
    weights, seeds = weights_of(bases, factors, row, count, BASES, FACTORS, MEANS)
    y = tl.zeros([B], tl.int64)
    if LOOKS:
        y = kept(tl.load(target + row).to(tl.int64), live)
    return row, here, live, facts, top, log_sums, given, weights, seeds, y


@triton.jit(
    do_not_specialize=["N", "all_rows", "first_row", "first_group", "groups", "vocab"],
    do_not_specialize_on_alignment=["target", "order", "offsets"],
)
def settle_kernel(
    sums, target, order, offsets, temperatures, inputs, bases, factors, numbers,
    found, best_out, rows, by_segment, N, all_rows, first_row, first_group, groups, vocab,
    FN: tl.constexpr, SUMS: tl.constexpr, WIDE: tl.constexpr, VALUES: tl.constexpr, WHOLE: tl.constexpr,
    USED: tl.constexpr, THERE: tl.constexpr, OF_SEGMENTS: tl.constexpr, GRADIENT: tl.constexpr,
    TARGET: tl.constexpr, TOTAL: tl.constexpr, BEST: tl.constexpr, WANT_X: tl.constexpr, WANT_Q: tl.constexpr,
    LOOKS: tl.constexpr, PER_ROW: tl.constexpr, INPUTS: tl.constexpr, BASES: tl.constexpr, FACTORS: tl.constexpr,
    MEANS: tl.constexpr, ORDERED: tl.constexpr, IGNORE: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    group = first_group + tl.program_id(0)
    inside = group > 0
    begin, end = tl.load(offsets + group), tl.load(offsets + group + 1)
    step, wide, across = N.to(tl.int64), all_rows.to(tl.int64), groups.to(tl.int64)
    columns = vocab.to(tl.float32)
    known, literals = (), ()
    for i in tl.static_range(len(numbers)):
        literals = literals + (number(numbers[i], 0, False, False).to(tl.float32),)

    count = (end - begin).to(tl.float64)
    if IGNORE:
        counted = tl.zeros([B], tl.int32)
        for at in range(begin, end, B):
            row, here, live = block_of(at, end, target, order, ORDERED, IGNORE, B)
            counted += live.to(tl.int32)
        count = tl.sum(counted, 0).to(tl.float64)

    for walk in tl.static_range(len(SUMS)):
        partial = zeros(len(known), SUMS[walk], WIDE, B)
        for at in range(begin, end, B):
            row, here, live, facts, top, log_sums, given, weights, seeds, y = read(
                at, end, group, count, sums, target, order, temperatures, inputs, bases, factors, step, first_row,
                columns, VALUES, TARGET, TOTAL, BEST, WANT_X, WANT_Q, LOOKS, PER_ROW, INPUTS, BASES, FACTORS,
                MEANS, ORDERED, IGNORE, B,
            )  # fmt: skip
            parts = FN(walk, facts, given, y, literals, seeds, columns, known, count, inside)
            partial = added(partial, parts, live)
        for i in tl.static_range(len(partial)):
            known = known + (tl.sum(partial[i], 0),)

    LAST: tl.constexpr = len(SUMS)
    totals = ()
    for _i in tl.static_range(len(OF_SEGMENTS)):
        totals = totals + (tl.zeros([B], tl.float32),)
    for at in range(begin, end, B):
        row, here, live, facts, top, log_sums, given, weights, seeds, y = read(
            at, end, group, count, sums, target, order, temperatures, inputs, bases, factors, step, first_row,
            columns, VALUES, TARGET, TOTAL, BEST, WANT_X, WANT_Q, LOOKS, PER_ROW, INPUTS, BASES, FACTORS,
            MEANS, ORDERED, IGNORE, B,
        )  # fmt: skip
        values, metrics, by_fact, by_input, pulls = FN(
            LAST, facts, given, y, literals, seeds, columns, known, count, inside
        )
        weighted = ()
        for i in tl.static_range(len(values)):
            weighted = weighted + (values[i] * weights[i],)
        totals = added(totals, weighted, live)

        tl.store(found + row, top, mask=here)
        slot = 1
        for i in tl.static_range(len(log_sums)):
            tl.store(found + row + slot * wide, log_sums[i], mask=here)
            slot += 1
        for i in tl.static_range(len(WHOLE)):
            if WHOLE[i]:
                tl.store(best_out + row, facts[i], mask=here)
            else:
                tl.store(found + row + slot * wide, facts[i], mask=here)
                slot += 1
        rest = metrics + by_fact + by_input
        for i in tl.static_range(len(rest)):
            tl.store(found + row + slot * wide, tl.where(live, rest[i], 0.0), mask=here)
            slot += 1
        if GRADIENT:
            into = rows + (row - first_row)
            tl.store(into, top, mask=here)
            place = 1
            for i in tl.static_range(len(USED)):
                tl.store(into + place * step, log_sums[USED[i]], mask=here)
                place += 1
                for k in tl.static_range(5):
                    if THERE[5 * USED[i] + k]:
                        tl.store(into + place * step, tl.where(live, pulls[5 * USED[i] + k], 0.0), mask=here)
                        place += 1

    # what belongs to the segment: of one without rows nothing counts
    counts = inside & (count > 0)
    given = inputs_of(inputs, 0, group, counts, INPUTS)
    weights, seeds = weights_of(bases, factors, 0, count, BASES, FACTORS, MEANS)
    values, metrics = FN(LAST + 1, (), given, 0, literals, seeds, columns, known, count, inside)
    by_segment += group
    for i in tl.static_range(len(OF_SEGMENTS)):
        if OF_SEGMENTS[i]:
            tl.store(by_segment + i * across, tl.where(counts, values[i] * weights[i], 0.0))
        else:
            tl.store(by_segment + i * across, tl.sum(totals[i], 0))
    tl.store(by_segment + len(OF_SEGMENTS) * across, tl.where(inside, count, 0.0).to(tl.float32))
    for i in tl.static_range(len(metrics)):
        tl.store(by_segment + (len(OF_SEGMENTS) + 1 + i) * across, metrics[i])
