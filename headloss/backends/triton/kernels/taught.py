# mypy: ignore-errors
"""One launch beside a teacher: as visit.py, with what dense.py, sparse.py and guided.py know of teachers.

Dimension key:  K loads in flight   L lanes (threads)   J columns of a lane in each load   F numbers per row   N rows

A program owns a row.  Beside a dense teacher it sweeps both rows for their sums, once more for divergences that need
both softmaxes first, runs the printed functions, and sweeps both again, backwards, to write the gradient.

The ids of a sparse teacher are read first.  If the rest of the row is wanted by itself, the sweep is over that alone,
and the ids join it at the end: the row's sums are the tail's and the ids'.  The tail's pull is written everywhere, and
the few columns that are ids are written last.

`found` (F, N) takes the student's maximum and log_sums; of a dense teacher its maximum, its log_sums and the slopes of
each divergence, of a sparse one the tail's maximum and log_sums; then facts, values, metrics and cotangents.  What has
a value an id goes to `wide` (F, N, count).  Ignored rows are not read; their numbers and their gradient are 0.
"""

import triton
import triton.language as tl

from headloss.backends.triton.kernels.compared import row_sums, teacher_sums
from headloss.backends.triton.kernels.dense import column_of, edges, read_both
from headloss.backends.triton.kernels.guided import gradient, look_both, write_both
from headloss.backends.triton.kernels.logits import LN2, LOG2E, LOWEST, boundary, logits, temperature
from headloss.backends.triton.kernels.pull import slopes
from headloss.backends.triton.kernels.row_loops import inner, zeros
from headloss.backends.triton.kernels.sparse import read_without
from headloss.backends.triton.kernels.visit import arguments

COLUMN = tl.constexpr(
    1
)  # the kinds of facts: a column of the student's, of the teacher's, a value per id; 0: one value
TEACHER_COLUMN = tl.constexpr(2)
AT_IDS = tl.constexpr(3)


@triton.jit(
    do_not_specialize=[
        "N", "V", "stride", "lead", "out_stride", "out_lead", "teacher_stride", "teacher_lead", "target_stride",
        "start", "vocab", "count",
    ],
    do_not_specialize_on_alignment=["target", "ids", "sorted_ids"],
)  # fmt: skip
def taught_kernel(
    raw, out, target, teacher, ids, sorted_ids, found, wide, best_out, teacher_best_out,
    temperatures, teacher_temperatures, inputs, bases, factors, numbers, look_numbers, pull_numbers,
    N, V, stride, lead, out_stride, out_lead, teacher_stride, teacher_lead, target_stride, start, vocab, count,
    scale, cap, teacher_scale, teacher_cap,
    FN: tl.constexpr, VALUES: tl.constexpr, KINDS: tl.constexpr, MEETS: tl.constexpr, LOOK_OF: tl.constexpr,
    USED: tl.constexpr, SLOTS: tl.constexpr, WIDE_SLOTS: tl.constexpr, WIDE_FACTS: tl.constexpr,
    TARGET: tl.constexpr, IGNORE: tl.constexpr, GRADIENT: tl.constexpr, PICK: tl.constexpr, TOTAL: tl.constexpr,
    BEST: tl.constexpr, TEACHER_BEST: tl.constexpr, MET: tl.constexpr, WANT_X: tl.constexpr, WANT_Q: tl.constexpr,
    WANT_Y: tl.constexpr, WANT_F: tl.constexpr, WANT_G: tl.constexpr,
    A: tl.constexpr, B: tl.constexpr, E: tl.constexpr, C: tl.constexpr, Y: tl.constexpr,
    ALL_A: tl.constexpr, ALL_B: tl.constexpr, ALL_E: tl.constexpr, ALL_C: tl.constexpr,
    DENSE: tl.constexpr, TA: tl.constexpr, TB: tl.constexpr, TC: tl.constexpr, TD: tl.constexpr,
    LOOK: tl.constexpr, LOOK_SUMS: tl.constexpr, PULL_LOOK: tl.constexpr, PULLED: tl.constexpr, PULLED_AT: tl.constexpr,
    IDS: tl.constexpr, TAIL: tl.constexpr, PULL_IDS: tl.constexpr, PULL_TAIL: tl.constexpr,
    PER_ROW: tl.constexpr, TEACHER_PER_ROW: tl.constexpr,
    SCALED: tl.constexpr, CAPPED: tl.constexpr, TEACHER_SCALED: tl.constexpr, TEACHER_CAPPED: tl.constexpr,
    INPUT_ROWS: tl.constexpr, BASE_KINDS: tl.constexpr, FACTOR_KINDS: tl.constexpr,
    LINE: tl.constexpr, VEC: tl.constexpr, TEACHER_VEC: tl.constexpr,
    OUT_LINE: tl.constexpr, OUT_VEC: tl.constexpr, OUT_RAW_VEC: tl.constexpr, OUT_TEACHER_VEC: tl.constexpr,
    K: tl.constexpr, L: tl.constexpr, J: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    POLICY: tl.constexpr = "evict_last" if GRADIENT else "evict_first"
    begin, skew = boundary(row, stride, lead, LINE)
    end = skew + V
    out_skew = 0
    if GRADIENT:
        out_begin, out_skew = boundary(row, out_stride, out_lead, OUT_LINE)
        out += out_begin
    found += row
    step = N.to(tl.int64)
    rows = vocab.to(tl.float32)

    live = tl.full([], 1, tl.int1)
    wanted = tl.zeros([], tl.int64)
    if TARGET:
        wanted = tl.load(target + row * target_stride).to(tl.int64)
    if IGNORE:
        live = live & (wanted != -100)

    k = 0
    if IDS:
        k = tl.arange(0, IDS)
        if WIDE_SLOTS:
            wide += row * count + k
    if live:
        # what the row needs, before the sweep
        given, weights, seeds, known = arguments(
            inputs, bases, factors, numbers, row, count, k, INPUT_ROWS, BASE_KINDS, FACTOR_KINDS
        )
        T, c, Tt, ct = (), (), (), ()
        for i in tl.static_range(len(temperatures)):
            T = T + (temperature(temperatures[i], row, PER_ROW[i]),)
            c = c + (tl.div_rn(LOG2E, T[i]),)
            if DENSE:
                Tt = Tt + (temperature(teacher_temperatures[i], row, TEACHER_PER_ROW[i]),)
                ct = ct + (tl.div_rn(LOG2E, Tt[i]),)
        column = (wanted - start).to(tl.int32)
        here = (column >= 0) & (column < V)
        picked = tl.zeros([], raw.dtype.element_ty)
        said = 0.0
        if PICK:
            picked = tl.load(raw + (row * stride + lead + column), mask=here, other=0.0)
            if DENSE:
                said = tl.load(teacher + (row * teacher_stride + teacher_lead + column), mask=here, other=0.0)
        there = tl.full([], 1, tl.int1)
        named, at_k, raw_k, z_k = there, 0, 0.0, 0.0
        if IDS:
            there = k < count
            id_k = tl.load(ids + row * count + k, mask=there, other=-1)
            at_k = (id_k - start).to(tl.int32)
            named = (id_k >= 0) & (at_k >= 0) & (at_k < V)
            raw_k = tl.load(raw + (row * stride + lead + at_k), mask=named, other=0.0)
            z_k = tl.where(named, logits(raw_k, scale, cap, SCALED, CAPPED), -float("inf"))

        j = tl.arange(0, L)[:, None] * J + tl.arange(0, J)[None, :]
        theirs = teacher
        if DENSE:
            theirs = teacher + tl.multiple_of(row * teacher_stride + teacher_lead - skew, TEACHER_VEC)
            m, mt, best, bestt, S, X, Q, St, YY, F, D, G, EE, total, centre = read_both(
                raw + begin, theirs, skew, 0, end, c, ct, scale, cap, teacher_scale, teacher_cap,
                TOTAL, BEST, TEACHER_BEST, MET, WANT_X, WANT_Q, WANT_Y, WANT_F, WANT_G,
                SCALED, CAPPED, TEACHER_SCALED, TEACHER_CAPPED, VEC, TEACHER_VEC, POLICY, K, L, J,
            )  # fmt: skip
        else:
            m, best, S, X, Q, total, centre = read_without(
                raw + begin, sorted_ids + row * count, count, skew.to(tl.int64) - start, skew, 0, end, c, scale, cap,
                TAIL, TOTAL, BEST, WANT_X, WANT_Q, SCALED, CAPPED, VEC, IDS, POLICY, K, L, J,
            )  # fmt: skip

        # merge the lanes, and the ids with the tail
        swept = tl.max(m, axis=0)
        top = swept
        if TAIL:
            top = tl.maximum(swept, tl.max(z_k, axis=0))
        some = top > LOWEST  # else every logit is -inf
        origin = tl.where(some, top, 0.0)
        sums, spreads, squares, tail_sums = row_sums(m, swept, top, z_k, S, X, Q, c, TAIL, WANT_X, WANT_Q)
        argmax = tl.zeros([], tl.int64)
        if BEST:
            go, stop = edges(skew, end, VEC)
            seen = column_of(m, best, raw + begin, j, skew, end, go, stop, scale, cap, SCALED, CAPPED) - skew
            if TAIL:  # equal values among the ids and in the tail: the lowest column
                seen = tl.where(swept == top, seen, 2147483647)
                seen = tl.minimum(seen, tl.min(tl.where(named & (z_k == top), at_k, 2147483647), axis=0))
            argmax = (tl.where(some, seen, 0) + start).to(tl.int64)
        away = -float("inf")
        if PICK:
            away = tl.where(here, logits(picked, scale, cap, SCALED, CAPPED) - origin, -float("inf"))
        total = total + V.to(tl.float32) * (centre - origin)

        teacher_argmax = tl.zeros([], tl.int64)
        other = 0.0  # the maximum of the teacher, or of the tail
        tail_most = -float("inf")
        sums_t, ys, fs, gs, meet, looks = (), (), (), (), (), ()
        if DENSE:
            top_t = tl.max(mt, axis=0)
            other = tl.where(top_t > LOWEST, top_t, 0.0)
            if TEACHER_BEST:
                go, stop = edges(skew, end, TEACHER_VEC)
                seen = column_of(
                    mt, bestt, theirs, j, skew, end, go, stop,
                    teacher_scale, teacher_cap, TEACHER_SCALED, TEACHER_CAPPED,
                )  # fmt: skip
                teacher_argmax = (tl.where(top_t > LOWEST, seen - skew, 0) + start).to(tl.int64)
            sums_t, ys, fs, gs = teacher_sums(
                m, mt, top, top_t, S, St, YY, F, D, G, EE, c, ct, MET, WANT_Y, WANT_F, WANT_G
            )
        elif TAIL:
            other = tl.where(swept > LOWEST, swept, 0.0)
            tail_most = tl.where(swept > LOWEST, swept, -float("inf"))

        most = tl.where(some, top, -float("inf"))
        settled, log_sums, log_t = VALUES(
            most, away, total, argmax, T, sums, spreads, squares, rows,
            teacher_argmax, sums_t, ys, fs, gs, z_k - origin, tail_most, tail_sums,
        )  # fmt: skip
        if DENSE:
            for n in tl.static_range(len(MEETS)):
                own, told = tl.div_rn(1.0, T[MEETS[n]]), tl.div_rn(1.0, Tt[MEETS[n]])
                meet = meet + (own, log_sums[MEETS[n]], told, log_t[MEETS[n]])
            if LOOK_SUMS:
                looks = look_both(
                    raw + begin, theirs, skew, 0, end, origin, other, meet, look_numbers,
                    scale, cap, teacher_scale, teacher_cap, LOOK, LOOK_SUMS,
                    SCALED, CAPPED, TEACHER_SCALED, TEACHER_CAPPED, VEC, TEACHER_VEC, POLICY, K, L, J,
                )  # fmt: skip
        facts = ()
        for i in tl.static_range(len(KINDS)):
            if LOOK_OF[i] >= 0:
                facts = facts + (looks[2 * LOOK_OF[i]],)
            elif KINDS[i] == AT_IDS:
                facts = facts + (tl.where(named, settled[i], 0.0),)  # an id that names no column counts as 0
            else:
                facts = facts + (settled[i],)

        if GRADIENT:
            results = FN(facts, given, wanted, known, seeds, rows, there, named)
            pulls, guided = results[4], results[5]
            f = 1.0
            if SCALED:
                f = scale + 0.0
            moves = tl.full([], 0, tl.int1)
            at_target = 0.0
            m_, log_, c_, k_ = (), (), (), ()
            for i in tl.static_range(len(USED)):
                over = tl.div_rn(f, T[USED[i]])
                a, b, e, const = 0.0, 0.0, 0.0, 0.0
                if A[i]:
                    a = pulls[5 * USED[i]] * over
                    moves = moves | (a != 0)
                if B[i]:
                    b = pulls[5 * USED[i] + 1] * over * LN2
                    moves = moves | (b != 0)
                if E[i]:
                    e = pulls[5 * USED[i] + 2] * over
                    moves = moves | (e != 0)
                if C[i]:
                    const = pulls[5 * USED[i] + 3] * over
                    moves = moves | (const != 0)
                if Y[i]:
                    at_y = pulls[5 * USED[i] + 4] * over
                    moves = moves | (at_y != 0)
                    at_target += at_y
                m_ = m_ + (origin,)
                log_ = log_ + (log_sums[USED[i]] * LOG2E,)
                c_ = c_ + (c[USED[i]],)
                k_ = k_ + (a, b, e, const)
            all_m, all_log, all_c, all_k = m_, log_, c_, k_
            at_ids = 0.0
            mt_, kt, kl = (), (), ()
            if DENSE:
                mt_ = (origin, other)
                for n in tl.static_range(len(MEETS)):
                    over = tl.div_rn(f, T[MEETS[n]])
                    a, b, at_q, d = 0.0, 0.0, 0.0, 0.0
                    if TA[n]:
                        a = guided[4 * n] * over
                        moves = moves | (a != 0)
                    if TB[n]:
                        b = guided[4 * n + 1] * over
                        moves = moves | (b != 0)
                    if TC[n]:
                        at_q = guided[4 * n + 2] * over
                        moves = moves | (at_q != 0)
                    if TD[n]:
                        d = guided[4 * n + 3] * over
                        moves = moves | (d != 0)
                    kt = kt + (a, b, at_q, d)
                for n in tl.static_range(len(PULLED)):
                    pulled = guided[4 * len(MEETS) + n] * tl.div_rn(f, T[MEETS[PULLED[n]]])
                    moves = moves | (pulled != 0)
                    kl = kl + (pulled, looks[2 * PULLED_AT[n] + 1])
            else:
                for n in tl.static_range(len(MEETS)):
                    over = tl.div_rn(f, T[MEETS[n]])
                    if PULL_IDS[n]:
                        at_ids = at_ids + guided[2 * n] * over
                    if PULL_TAIL[n]:
                        a = guided[2 * n + 1] * over
                        moves = moves | (a != 0)
                        all_m = all_m + (other,)
                        all_log = all_log + (log_t[MEETS[n]] * LOG2E,)
                        all_c = all_c + (c[MEETS[n]],)
                        all_k = all_k + (a, 0.0, 0.0, 0.0)
                at_ids = at_ids + tl.zeros_like(z_k)
                moves = moves | (tl.sum((at_ids != 0).to(tl.int32), axis=0) > 0)
            if moves:
                whole_low, whole_high = inner(out_skew, out_skew + V, OUT_VEC)
                raw_row = raw + tl.multiple_of(row * stride + lead - out_skew, OUT_RAW_VEC)
                their_row = raw_row
                if DENSE:
                    their_row = teacher + tl.multiple_of(
                        row * teacher_stride + teacher_lead - out_skew, OUT_TEACHER_VEC
                    )
                tl.debug_barrier()  # every warp has seen what it needs of the row before any may overwrite it
                write_both(
                    raw_row, their_row, out, out_skew, 0, out_skew + V, whole_low, whole_high,
                    column + out_skew, here, picked, said, at_target,
                    all_m, all_log, all_c, all_k, mt_, meet, kt, kl, pull_numbers,
                    scale, cap, teacher_scale, teacher_cap,
                    ALL_A, ALL_B, ALL_E, ALL_C, PICK, DENSE, PULL_LOOK, TA, TB, TC, TD, PULLED,
                    SCALED, CAPPED, TEACHER_SCALED, TEACHER_CAPPED, OUT_VEC, BLOCK, False, True,
                )  # fmt: skip
                if IDS:
                    g_k, _ = gradient(
                        raw_k, raw_k, m_, log_, c_, k_, mt_, meet, kt, kl, pull_numbers,
                        scale, cap, teacher_scale, teacher_cap,
                        A, B, E, C, False, None, TA, TB, TC, TD, PULLED,
                        SCALED, CAPPED, TEACHER_SCALED, TEACHER_CAPPED,
                    )  # fmt: skip
                    if PICK:
                        at_ids += tl.where(at_k == column, at_target, 0.0)
                    g_k += slopes(at_ids, tl.where(named, z_k, 0.0), scale, cap, SCALED, CAPPED)
                    tl.debug_barrier()
                    tl.store(out + (at_k + out_skew), g_k.to(out.dtype.element_ty), mask=named)
            else:
                zeros(out, out_skew, out_skew + V, OUT_VEC, K * L * J)

        # what is known of the row; after the sweep, so that nothing in it waits for a metric
        results = FN(facts, given, wanted, known, seeds, rows, there, named)
        values, metrics, by_fact, by_input = results[0], results[1], results[2], results[3]
        tl.store(found, origin)
        slot = 1
        for i in tl.static_range(len(log_sums)):
            tl.store(found + slot * step, log_sums[i])
            slot += 1
        if DENSE or TAIL:
            tl.store(found + slot * step, other)
            slot += 1
            for n in tl.static_range(len(MEETS)):
                tl.store(found + slot * step, log_t[MEETS[n]])
                slot += 1
        for n in tl.static_range(LOOK_SUMS // 2):
            tl.store(found + slot * step, looks[2 * n + 1])
            slot += 1
        wide_slot = 0
        for i in tl.static_range(len(KINDS)):
            if KINDS[i] == COLUMN:
                tl.store(best_out + row, facts[i])
            elif KINDS[i] == TEACHER_COLUMN:
                tl.store(teacher_best_out + row, facts[i])
            elif KINDS[i] == AT_IDS:
                tl.store(wide + wide_slot * (step * count), facts[i], mask=k < count)
                wide_slot += 1
            else:
                tl.store(found + slot * step, facts[i])
                slot += 1
        for i in tl.static_range(len(values)):
            tl.store(found + slot * step, values[i] * weights[i])
            slot += 1
        rest = metrics + by_fact + by_input
        for i in tl.static_range(len(rest)):
            if i >= len(metrics) and i < len(metrics) + len(by_fact) and WIDE_FACTS[i - len(metrics)]:
                tl.store(wide + wide_slot * (step * count), rest[i] + tl.zeros_like(z_k), mask=k < count)
                wide_slot += 1
            else:
                tl.store(found + slot * step, rest[i])
                slot += 1
    else:
        for i in tl.static_range(SLOTS):
            tl.store(found + i * step, 0.0)
        for i in tl.static_range(WIDE_SLOTS):
            tl.store(wide + i * (step * count), tl.zeros([IDS], tl.float32), mask=k < count)
        if BEST:
            tl.store(best_out + row, tl.zeros([], tl.int64))
        if TEACHER_BEST:
            tl.store(teacher_best_out + row, tl.zeros([], tl.int64))
        if GRADIENT:
            zeros(out, out_skew, out_skew + V, OUT_VEC, K * L * J)
