# mypy: ignore-errors
"""The visit's kernel: a program computes a row's facts, losses and gradient while the row is in the cache.

Dimension key:  K loads in flight   L lanes (threads)   J columns of a lane in each load   F numbers per row   N rows

A program owns a row, or a part of one (shared_rows.py).  It sweeps the row once for the sums behind the facts, with a
partial per lane (row_loops.py), calls two printed functions, `VALUES` (sums to facts) and `FN` (facts to losses and
coefficients), and sweeps the row again, backwards, while its end is still in the cache, to write the gradient.  With a
dense teacher both rows are swept together (pair_loops.py), and once more for divergences that need both softmaxes
first.  The ids of a sparse teacher are read first; if the rest of the row is needed by itself (TAIL), the sweep covers
that alone, and the ids are added at the end; the gradient of the tail is then written to all columns, and that of the
ids over it.

`found` (F, N) receives the results per row: its maximum and log_sums; for a dense teacher its maximum, its log_sums and
the sum of each divergence's slopes, for a sparse one the tail's maximum and log_sums; then facts, the terms' values,
metrics and cotangents.  Results with a value per id go to `wide` (F, N, count).  Ignored rows are not read; all their
results, and their gradient, are set to 0.
"""

import triton
import triton.language as tl

from headloss.backends.triton.kernels.lanes import NOWHERE, column_or_start, origin_of, sweep_pair, sweep_row, with_ids
from headloss.backends.triton.kernels.logits import LN2, LOG2E, boundary, logits, temperature
from headloss.backends.triton.kernels.packed_bf16 import finite
from headloss.backends.triton.kernels.pair_loops import divergence_pair, write_pair
from headloss.backends.triton.kernels.printed_arguments import arguments
from headloss.backends.triton.kernels.pull import slopes
from headloss.backends.triton.kernels.row_loops import LOWEST, gradient, write, zeros
from headloss.backends.triton.kernels.row_outputs import AT_IDS, skip_row, store_row
from headloss.backends.triton.kernels.running_sums import BITS, NATS
from headloss.backends.triton.kernels.shared_rows import exchange, sum_of_parts


@triton.jit(
    do_not_specialize=[
        "V", "stride", "lead", "out_stride", "out_lead", "target_stride", "start", "teacher_stride", "teacher_lead",
        "count",
    ],
)  # fmt: skip
def visit_kernel(
    at, given, V, stride, lead, out_stride, out_lead, target_stride, start, teacher_stride, teacher_lead, count,
    FN: tl.constexpr, VALUES: tl.constexpr, DIVERGENCE: tl.constexpr, F: tl.constexpr,
):  # fmt: skip
    POLICY: tl.constexpr = "evict_last" if F.GRADIENT else "evict_first"
    IDS: tl.constexpr = F.IDS
    DIVERGENCE_SUMS: tl.constexpr = F.DIVERGENCE_SUMS
    RAW_VEC: tl.constexpr = F.RAW_VEC
    TEACHER_VEC: tl.constexpr = F.TEACHER_VEC
    OUT_TEACHER_VEC: tl.constexpr = F.OUT_TEACHER_VEC
    row = tl.program_id(0).to(tl.int64)
    step = tl.num_programs(0).to(tl.int64)
    part = 0
    if F.PARTS:
        part = (row % F.PARTS).to(tl.int32)
        row = row // F.PARTS
        step = step // F.PARTS
    scratch = at.scratch
    if F.PARTS:
        scratch += row * F.EXCHANGED
    begin, skew = boundary(row, stride, lead, F.LINE)
    out_skew = 0
    out = at.out
    if F.GRADIENT:
        out_begin, out_skew = boundary(row, out_stride, out_lead, F.OUT_LINE)
        out += out_begin

    live = tl.full([], 1, tl.int1)
    wanted = tl.zeros([], tl.int64)
    if F.TARGET:
        wanted = tl.load(at.target + row * target_stride).to(tl.int64)
    if F.IGNORE:
        live = live & (wanted != -100)
    k = 0
    if IDS:
        k = tl.arange(0, IDS)

    if live:
        # load everything else that a row needs before the sweep
        inputs, weights, seeds, literals = arguments(given, row, count, k, F)
        how = (given.scale, given.cap, given.teacher_scale, given.teacher_cap)
        T, c, ct = (), (), ()
        for i in tl.static_range(len(F.A)):
            T = T + (temperature(given.temperatures[i], row, F.PER_ROW[i]),)
            c = c + (tl.div_rn(LOG2E, T[i]),)
            if F.DENSE:
                ct = ct + (tl.div_rn(LOG2E, temperature(given.teacher_temperatures[i], row, F.TEACHER_PER_ROW[i])),)
        raw_row = at.raw + (row * stride + lead)
        column = (wanted - start).to(tl.int32)
        here = (column >= 0) & (column < V)
        picked = tl.zeros([], at.raw.dtype.element_ty)
        picked_t = 0.0
        has_target = here
        if F.PARTS:
            has_target = here & (column // (F.K * F.L * F.J * F.SPAN) == part)
        if F.PICK:
            picked = tl.load(raw_row + column, mask=has_target, other=0.0)
            if F.DENSE:
                at_t = row * teacher_stride + teacher_lead + column
                picked_t = tl.load(at.teacher + at_t, mask=has_target, other=0.0)
        is_id = tl.full([], 1, tl.int1)
        is_column, at_k, raw_k, z_k = is_id, 0, 0.0, 0.0
        if IDS:
            is_id = k < count
            id_k = tl.load(at.ids + row * count + k, mask=is_id, other=-1)
            at_k = (id_k - start).to(tl.int32)
            is_column = (id_k >= 0) & (at_k >= 0) & (at_k < V)
            raw_k = tl.load(raw_row + at_k, mask=is_column, other=0.0)  # decoded later, so that the sweep does not wait

        topt, bestt, teacher_sums, tail = tl.full([], LOWEST, tl.float32), tl.full([], NOWHERE, tl.int32), (), ()
        teacher = at.teacher
        if F.DENSE:
            teacher += tl.multiple_of(row * teacher_stride + teacher_lead - skew, TEACHER_VEC)
            top, best, own, total, topt, bestt, teacher_sums, picked = sweep_pair(
                at.raw + begin, teacher, skew, skew + V, part, picked, c, ct, how, scratch, POLICY, F
            )
        else:
            ids = (at.sorted_ids + row * count, count, skew.to(tl.int64) - start)
            if F.TAIL:
                scratch += row * (tl.cdiv(V + F.LINE, 32 * F.L * F.J) * F.L)
            top, best, own, total, picked, tail, around = sweep_row(
                at.raw + begin, skew, skew + V, part, picked, c, how, scratch, ids, POLICY, F
            )
            if F.TAIL:
                left = tl.where(around[1], logits(around[0], how[0], how[1], F.SCALED, F.CAPPED), -float("inf"))
                above = tl.maximum(top, tl.max(left, axis=0))
                own = with_ids(own, top, above, left, c, F)
                total += V.to(tl.float32) * (origin_of(top) - origin_of(above))
                if F.BEST:
                    best = tl.where(top == above, best, NOWHERE)
                    best = tl.minimum(best, tl.min(tl.where(left == above, around[2], NOWHERE), axis=0))
                top = above

        if IDS:
            z_k = tl.where(is_column, logits(raw_k, how[0], how[1], F.SCALED, F.CAPPED), -float("inf"))
        swept = top
        tails = ()
        tail_most = -float("inf")
        other = origin_of(topt)  # the origin of the teacher, or of the tail
        if F.TAIL:
            for i in tl.static_range(len(c)):
                tails = tails + (own[3 * i],)
            top = tl.maximum(swept, tl.max(z_k, axis=0))
            own = with_ids(own, swept, top, z_k, c, F)
            other = origin_of(swept)
            tail_most = tl.where(swept > LOWEST, swept, -float("inf"))
            if F.BEST:  # equal values among the ids and in the tail: the lowest column
                best = tl.where(swept == top, best, NOWHERE)
                best = tl.minimum(best, tl.min(tl.where(is_column & (z_k == top), at_k, NOWHERE), axis=0))
        origin = origin_of(top)
        most = tl.where(top > LOWEST, top, -float("inf"))
        away = -float("inf")
        if F.PICK:
            away = tl.where(here, logits(picked, how[0], how[1], F.SCALED, F.CAPPED) - origin, -float("inf"))
        total += V.to(tl.float32) * (origin_of(swept) - origin)
        sums, spreads, squares, sums_t, ys, fs, gs, teacher_tails = (), (), (), (), (), (), (), ()
        for i in tl.static_range(len(c)):
            if F.WHOLE:
                lse = 0.0
                if F.COMPARED[i]:
                    Tt = temperature(given.teacher_temperatures[i], row, F.TEACHER_PER_ROW[i])
                    lse = tl.load(given.teacher_tails[i] + row) - tl.div_rn(other, Tt)
                teacher_tails = teacher_tails + (lse,)
            sums = sums + (own[3 * i],)
            spreads = spreads + (own[3 * i + 1],)
            squares = squares + (own[3 * i + 2],)
            if F.DENSE:
                sums_t = sums_t + (teacher_sums[6 * i],)
                ys = ys + (teacher_sums[6 * i + 1],)
                fs = fs + (teacher_sums[6 * i + 2] + teacher_sums[6 * i + 3] * NATS,)
                gs = gs + (teacher_sums[6 * i + 4] + teacher_sums[6 * i + 5] * NATS,)
        argmax = column_or_start(best, top, start)
        log_t = ()
        if F.DENSE or IDS:
            values, log_sums, log_t = VALUES(
                most, away, total, argmax, T, sums, spreads, squares, given.vocab,
                column_or_start(bestt, topt, start), sums_t, ys, fs, gs, z_k - origin, tail_most, tails, teacher_tails,
            )  # fmt: skip
        else:
            values, log_sums = VALUES(most, away, total, argmax, T, sums, spreads, squares, given.vocab)

        # for the second read and for the gradient: p = 2^t / s, with t relative to an integer, so that 2^t needs no
        # further constant; `n_` is log2 s
        origins, n_, kept = (), (), ()
        for i in tl.static_range(len(c)):
            row_origin = tl.floor(top * c[i])
            log_s = log_sums[i] * LOG2E + tl.fma(top, c[i], -row_origin)
            origins = origins + (row_origin,)
            n_ = n_ + (log_s,)
            if F.DENSE:
                if F.COMPARED[i]:
                    origin_t = tl.floor(topt * ct[i])
                    off_t = tl.fma(topt, ct[i], -origin_t)
                    log_st = log_t[i] * LOG2E + off_t
                    kept = kept + (
                        c[i], -row_origin, ct[i], -origin_t, BITS + off_t,
                        log_s * LN2, NATS - log_sums[i], log_st * LN2, NATS - log_t[i],
                        tl.exp2(-log_s), tl.exp2(-log_st),
                    )  # fmt: skip
                else:
                    kept = kept + (c[i], -row_origin, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
        divergences = ()
        if DIVERGENCE_SUMS:
            divergences = divergence_pair(
                at.raw + begin,
                teacher,
                skew,
                skew + V,
                part,
                kept,
                given.divergence_numbers,
                how,
                POLICY,
                DIVERGENCE,
                F,
            )
            if F.PARTS:
                scratch += F.EXCHANGED - DIVERGENCE_SUMS * F.PARTS
                divergences = sum_of_parts(exchange(scratch, part, divergences, F))
        facts = ()
        for i in tl.static_range(len(F.KINDS)):
            if F.DIVERGENCE_OF[i] >= 0:
                facts = facts + (divergences[2 * F.DIVERGENCE_OF[i]],)
            elif F.KINDS[i] == AT_IDS:
                facts = facts + (tl.where(is_id, values[i], 0.0),)  # -inf at an id that names no column
            else:
                facts = facts + (values[i],)

        if F.GRADIENT:
            if F.DENSE or IDS:
                results = FN(facts, inputs, wanted, literals, seeds, given.vocab, is_id, is_column)
            else:
                results = FN(facts, inputs, wanted, literals, seeds, given.vocab)
            pulls = results[4]
            f = 1.0
            if F.SCALED:
                f = how[0] + 0.0
            moves = tl.full([], 0, tl.int1)
            at_target = 0.0
            at_ids = 0.0
            origin_w, kw, ki, kl = (), (), (), ()
            for q in tl.static_range(len(F.PULLED)):
                pulled = results[5][4 * len(F.COMPARED_AT) + q] * tl.div_rn(f, T[F.PULLED_AT[q]])
                moves = moves | (pulled != 0)
                kl = kl + (pulled,)
            for i in tl.static_range(len(c)):
                over = tl.div_rn(f, T[i])
                n = n_[i]
                r = tl.exp2(-n)
                a, b, e, const, at_q, d, a_tail = 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0
                if F.A[i]:
                    a = pulls[5 * i] * over
                if F.B[i]:
                    b = pulls[5 * i + 1] * over * LN2
                if F.E[i]:
                    e = pulls[5 * i + 2] * over
                    moves = moves | (e != 0)
                if F.C[i]:
                    const = pulls[5 * i + 3] * over
                    moves = moves | (const != 0)
                if F.Y[i]:
                    at_y = pulls[5 * i + 4] * over
                    moves = moves | (at_y != 0)
                    at_target += at_y
                if F.DENSE and F.COMPARISON[i] >= 0:
                    teacher_pulls = results[5]
                    a += teacher_pulls[4 * F.COMPARISON[i]] * over
                    b += teacher_pulls[4 * F.COMPARISON[i] + 1] * over * LN2
                    log_st = kept[11 * i + 7] * LOG2E
                    if F.TC[i]:
                        at_q = teacher_pulls[4 * F.COMPARISON[i] + 2] * over * LN2
                        moves = moves | (at_q != 0)
                    if F.TD[i]:
                        d = teacher_pulls[4 * F.COMPARISON[i] + 3] * over
                        moves = moves | (d != 0)
                        d = d * kept[11 * i + 10]
                    a -= at_q * log_st
                if IDS and F.COMPARISON[i] >= 0:
                    teacher_pulls = results[5]
                    if F.PULL_IDS[F.COMPARISON[i]]:
                        at_ids = at_ids + teacher_pulls[2 * F.COMPARISON[i]] * over
                    if F.PULL_TAIL[F.COMPARISON[i]]:
                        a_tail = teacher_pulls[2 * F.COMPARISON[i] + 1] * over
                        moves = moves | (a_tail != 0)
                if F.A[i]:
                    moves = moves | (a != 0)
                if F.B[i]:
                    moves = moves | (b != 0)
                    a = a - b * n
                if F.DENSE:
                    for q in tl.static_range(len(F.PULLED)):
                        if F.PULLED_AT[q] == i:
                            a -= kl[q] * divergences[2 * F.PULLED[q] + 1]
                    kw = kw + (a * r, b * r, e * r * r, const, at_q * r, d)
                elif F.TAIL:  # columns that are not ids are relative to the tail's own origin, where nothing underflows
                    ki = ki + (a * r, b * r, e * r * r, const)
                    tail_origin = tl.floor(swept * c[i])
                    apart = n + (origins[i] - tail_origin)
                    r = tl.exp2(-apart)
                    if F.B[i]:
                        a = a + b * n - b * apart
                    a = a * r
                    if IDS and F.COMPARISON[i] >= 0:
                        a += a_tail * tl.exp2(-(log_t[i] * LOG2E + tl.fma(swept, c[i], -tail_origin)))
                    origin_w = origin_w + (tail_origin,)
                    kw = kw + (a, b * r, e * r * r, const)
                else:
                    origin_w = origin_w + (origins[i],)
                    kw = kw + (a * r, b * r, e * r * r, const)
            if IDS:
                if not F.TAIL:
                    ki = kw
                at_ids = at_ids + tl.zeros_like(z_k)
                moves = moves | (tl.sum((at_ids != 0).to(tl.int32), axis=0) > 0)
            if moves:
                raw_out = at.raw + tl.multiple_of(row * stride + lead - out_skew, RAW_VEC)
                spot = column + out_skew
                if F.DENSE:
                    teacher_out = at.teacher + tl.multiple_of(
                        row * teacher_stride + teacher_lead - out_skew, OUT_TEACHER_VEC
                    )
                    write_pair(
                        raw_out, teacher_out, out, out_skew, out_skew + V, part, kept, kw + kl,
                        given.divergence_numbers, at_target, (picked, picked_t, has_target), spot, how, DIVERGENCE, F,
                    )  # fmt: skip
                else:
                    write(
                        raw_out, out, out_skew, out_skew + V, part, tail, origin_w, c, kw,
                        at_target, picked, spot, has_target, how, F,
                    )  # fmt: skip
                if IDS:
                    z = tl.where(is_column, finite(z_k), 0.0)
                    if F.PICK:
                        at_ids += tl.where(at_k == column, at_target, 0.0)
                    g_k = gradient(z, origins, c, ki, how[1], F) + slopes(at_ids, z, how[1], F.CAPPED)
                    tl.debug_barrier()
                    tl.store(out + (at_k + out_skew), g_k.to(out.dtype.element_ty), mask=is_column)
            else:
                zeros(out, out_skew, out_skew + V, part, F.OUT_VEC, F)

        # after the sweep, so that nothing in it waits for a metric
        if F.DENSE or IDS:
            results = FN(facts, inputs, wanted, literals, seeds, given.vocab, is_id, is_column)
        else:
            results = FN(facts, inputs, wanted, literals, seeds, given.vocab)
        numbers = (origin,) + log_sums
        if F.DENSE or F.TAIL:
            numbers = numbers + (other,)
            for i in tl.static_range(len(F.COMPARED_AT)):
                numbers = numbers + (log_t[F.COMPARED_AT[i]],)
            for i in tl.static_range(DIVERGENCE_SUMS // 2):
                numbers = numbers + (divergences[2 * i + 1],)
        rest = ()
        for i in tl.static_range(len(weights)):
            rest = rest + (results[0][i] * weights[i],)
        if part == 0:
            store_row(at, row, step, numbers, facts, rest + results[1] + results[2] + results[3], count, k, F)
    else:
        skip_row(at, row, step, count, k, F)
        if F.GRADIENT:
            zeros(out, out_skew, out_skew + V, part, F.OUT_VEC, F)
