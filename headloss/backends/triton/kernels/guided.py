# mypy: ignore-errors
"""The pull with teachers, and the second look that some divergences need first.

    d(loss)/d(s_j) = p_j (a + b log p_j + e p_j) + c + y 1[j=y]        the student's own: one entry a temperature
                   + t e^(s_j - tail lse)                              a sparse teacher's tail: an entry with a maximum
                                                                       of its own; what it leaves at the ids is junk
                   + p_j (a + b log p_j + c log q_j) + d q_j           a dense teacher's, where p and q are the
                   + g (f'_j - p_j sum f')                             softmaxes over the columns that both have

`ELEMENT` is a printed function: of (log p, log q) at each temperature and of numbers, it gives for each divergence f
and f' = df/d(log p); LOOKS says at which temperature each stands.  `rows` (F, N) holds what a row needs, in the order
in which it is loaded below.
"""

import triton
import triton.language as tl

from headloss.backends.triton.kernels.dense import NATS
from headloss.backends.triton.kernels.logits import FLOOR, LN2, LOG2E, boundary, edges, logits, temperature
from headloss.backends.triton.kernels.pull import slopes
from headloss.backends.triton.kernels.sums import fetch


@triton.jit
def exponentials(logs):
    each = ()
    for i in tl.static_range(len(logs)):
        each = each + (tl.exp2(logs[i] * LOG2E),)
    return each


@triton.jit
def gradient(
    raw, other, m, log_sum, c, k, mt, meet, kt, kl, numbers, scale, cap, teacher_scale, teacher_cap,
    A: tl.constexpr, B: tl.constexpr, E: tl.constexpr, C: tl.constexpr, TEACHER: tl.constexpr, ELEMENT: tl.constexpr,
    TA: tl.constexpr, TB: tl.constexpr, TC: tl.constexpr, TD: tl.constexpr, LOOKS: tl.constexpr,
    SCALED: tl.constexpr, CAPPED: tl.constexpr, TEACHER_SCALED: tl.constexpr, TEACHER_CAPPED: tl.constexpr,
):  # fmt: skip
    """The dense part, and z.

    k has four numbers for each entry: a, b, e, c over T, b in base 2; kt four for each meeting: a, b, c, d over T;
    `meet` four: 1 / T, log_S, 1 / teacher's T, log_St; kl two for each divergence: g over T, sum f'.
    """
    z = logits(raw, scale, cap, SCALED, CAPPED)
    g = tl.zeros_like(z)
    for i in tl.static_range(len(c)):
        if A[i] or B[i] or E[i]:
            x = (z - m[i]) * c[i] - log_sum[i]
            p = tl.exp2(x)
            slope = k[4 * i] + 0.0
            if B[i]:
                slope = slope + k[4 * i + 1] * tl.maximum(x, FLOOR)
            if E[i]:
                slope = slope + k[4 * i + 2] * p
            g += p * slope
        if C[i]:
            g += k[4 * i + 3]
    if TEACHER:
        u = logits(other, teacher_scale, teacher_cap, TEACHER_SCALED, TEACHER_CAPPED)
        logs = ()
        for i in tl.static_range(len(TA)):
            logp = tl.maximum((z - mt[0]) * meet[4 * i], NATS) - meet[4 * i + 1]
            logq = tl.maximum((u - mt[1]) * meet[4 * i + 2], NATS) - meet[4 * i + 3]
            logs = logs + (logp, logq)
            if TA[i] or TB[i] or TC[i]:
                slope = kt[4 * i] + 0.0
                if TB[i]:
                    slope = slope + kt[4 * i + 1] * logp
                if TC[i]:
                    slope = slope + kt[4 * i + 2] * logq
                g += tl.exp2(logp * LOG2E) * slope
            if TD[i]:
                g += kt[4 * i + 3] * tl.exp2(logq * LOG2E)
        if ELEMENT is not None:
            found = ELEMENT(*logs, *exponentials(logs), *numbers)
            for n in tl.static_range(len(LOOKS)):
                p = tl.exp2(logs[2 * LOOKS[n]] * LOG2E)
                g += kl[2 * n] * (found[2 * n + 1] - p * kl[2 * n + 1])
    return slopes(g, z, scale, cap, SCALED, CAPPED), z


@triton.jit
def write_both(
    raw, teacher, out, skew, low, high, whole_low, whole_high, column, here, picked, said, at_target,
    m, log_sum, c, k, mt, meet, kt, kl, numbers, scale, cap, teacher_scale, teacher_cap,
    A: tl.constexpr, B: tl.constexpr, E: tl.constexpr, C: tl.constexpr, TARGET: tl.constexpr, TEACHER: tl.constexpr,
    ELEMENT: tl.constexpr, TA: tl.constexpr, TB: tl.constexpr, TC: tl.constexpr, TD: tl.constexpr, LOOKS: tl.constexpr,
    SCALED: tl.constexpr, CAPPED: tl.constexpr, TEACHER_SCALED: tl.constexpr, TEACHER_CAPPED: tl.constexpr,
    VEC: tl.constexpr, BLOCK: tl.constexpr, ADD: tl.constexpr, BACK: tl.constexpr,
):  # fmt: skip
    """The gradient of the columns from `low` to `high`; BACK: from their end, which is in the cache, to the beginning.

    `picked` and `said` are what stood at the target's column before anything was written.
    """
    kind = out.dtype.element_ty
    j = tl.arange(0, BLOCK)
    head = (low < whole_low).to(tl.int32)
    first = low // BLOCK + head
    last = tl.maximum(whole_high // BLOCK, first)
    ragged, ends, cut = ragged_ends(skew, low, high, whole_low, whole_high, VEC)
    for step in range(first, last):
        block = step
        if BACK:
            block = last - 1 + first - step
        x = tl.load(raw + block * BLOCK + j, eviction_policy="evict_first")
        u = x
        if TEACHER:
            u = tl.load(teacher + block * BLOCK + j, eviction_policy="evict_first")
        g, _ = gradient(
            x, u, m, log_sum, c, k, mt, meet, kt, kl, numbers, scale, cap, teacher_scale, teacher_cap,
            A, B, E, C, TEACHER, ELEMENT, TA, TB, TC, TD, LOOKS, SCALED, CAPPED, TEACHER_SCALED, TEACHER_CAPPED,
        )  # fmt: skip
        if ADD:
            g += tl.load(out + block * BLOCK + j)
        tl.store(out + block * BLOCK + j, g.to(kind), eviction_policy="evict_first")
    for edge in range(1 - head, 1 + (whole_high > last * BLOCK).to(tl.int32)):
        at = tl.where(edge == 0, low // BLOCK, last) * BLOCK + j
        whole = (at >= whole_low) & (at < whole_high)
        x = tl.load(raw + at, mask=whole, other=0.0)
        u = x
        if TEACHER:
            u = tl.load(teacher + at, mask=whole, other=0.0)
        g, _ = gradient(
            x, u, m, log_sum, c, k, mt, meet, kt, kl, numbers, scale, cap, teacher_scale, teacher_cap,
            A, B, E, C, TEACHER, ELEMENT, TA, TB, TC, TD, LOOKS, SCALED, CAPPED, TEACHER_SCALED, TEACHER_CAPPED,
        )  # fmt: skip
        if ADD:
            g += tl.load(out + at, mask=whole, other=0.0)
        tl.store(out + at, g.to(kind), mask=whole)
    if cut:
        x = tl.load(raw + ragged, mask=ends, other=0.0)
        u = x
        if TEACHER:
            u = tl.load(teacher + ragged, mask=ends, other=0.0)
        g, _ = gradient(
            x, u, m, log_sum, c, k, mt, meet, kt, kl, numbers, scale, cap, teacher_scale, teacher_cap,
            A, B, E, C, TEACHER, ELEMENT, TA, TB, TC, TD, LOOKS, SCALED, CAPPED, TEACHER_SCALED, TEACHER_CAPPED,
        )  # fmt: skip
        if ADD:
            g += tl.load(out + ragged, mask=ends, other=0.0)
        tl.store(out + ragged, g.to(kind), mask=ends)
    if TARGET:  # noqa: SIM102, known before the kernel runs
        if here:  # one store instead of a comparison for every column
            g, z = gradient(
                picked, said, m, log_sum, c, k, mt, meet, kt, kl, numbers, scale, cap, teacher_scale, teacher_cap,
                A, B, E, C, TEACHER, ELEMENT, TA, TB, TC, TD, LOOKS, SCALED, CAPPED, TEACHER_SCALED, TEACHER_CAPPED,
            )  # fmt: skip
            g += slopes(at_target, z, scale, cap, SCALED, CAPPED)
            tl.debug_barrier()
            tl.store(out + column, g.to(kind))


@triton.jit
def ragged_ends(skew, low, high, whole_low, whole_high, VEC: tl.constexpr):
    """The columns before the first whole vector and after the last, which of them there are, and whether any."""
    q = tl.arange(0, 2 * VEC)
    ragged = tl.where(q < VEC, whole_low, whole_high) + q - VEC
    at_low = (ragged >= tl.maximum(low, skew)) & (ragged < high)
    at_high = (ragged >= tl.maximum(whole_high, whole_low)) & (ragged < high)
    cut = (whole_low > tl.maximum(low, skew)) | (whole_high < high)
    return ragged, tl.where(q < VEC, at_low, at_high), cut


@triton.jit(
    do_not_specialize=[
        "N", "V", "parts", "stride", "lead", "teacher_stride", "teacher_lead", "out_stride", "out_lead",
        "target_stride", "start",
    ],
    do_not_specialize_on_alignment=["target"],
)  # fmt: skip
def guided_kernel(
    raw, target, teacher, rows, out, temperatures, met_temperatures, teacher_temperatures, numbers,
    N, V, parts, stride, lead, teacher_stride, teacher_lead, out_stride, out_lead, target_stride, start,
    scale, cap, teacher_scale, teacher_cap,
    A: tl.constexpr, B: tl.constexpr, E: tl.constexpr, C: tl.constexpr, Y: tl.constexpr, TARGET: tl.constexpr,
    TEACHER: tl.constexpr, ELEMENT: tl.constexpr,
    TA: tl.constexpr, TB: tl.constexpr, TC: tl.constexpr, TD: tl.constexpr, LOOKS: tl.constexpr,
    PER_ROW: tl.constexpr, MET_PER_ROW: tl.constexpr, TEACHER_PER_ROW: tl.constexpr,
    SCALED: tl.constexpr, CAPPED: tl.constexpr, TEACHER_SCALED: tl.constexpr, TEACHER_CAPPED: tl.constexpr,
    WIDTH: tl.constexpr, LINE: tl.constexpr, VEC: tl.constexpr, RAW_VEC: tl.constexpr, TEACHER_VEC: tl.constexpr,
    BLOCK: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    """As `pull_kernel`; with ADD, which has no TARGET, it adds to what stands in `out`, a float32 matrix then."""
    row = tl.program_id(0) // parts
    part = tl.program_id(0) % parts
    begin, skew = boundary(row, out_stride, out_lead, LINE)
    out += begin
    raw += tl.multiple_of(row.to(tl.int64) * stride + lead - skew, RAW_VEC)
    if TEACHER:
        teacher += tl.multiple_of(row.to(tl.int64) * teacher_stride + teacher_lead - skew, TEACHER_VEC)
    low = part * WIDTH
    high = tl.minimum(low + WIDTH, skew + V)
    whole_low = tl.multiple_of((tl.maximum(low, skew) + VEC - 1) // VEC * VEC, VEC)
    whole_high = tl.multiple_of(high // VEC * VEC, VEC)

    rows += row
    if TARGET:
        wanted = tl.load(target + row.to(tl.int64) * target_stride)
    f = 1.0
    if SCALED:
        f = scale + 0.0
    m, c, log_sum, k = (), (), (), ()
    live = tl.full([], 0, tl.int1)
    at_target = 0.0
    for i in tl.static_range(len(temperatures)):
        T = temperature(temperatures[i], row, PER_ROW[i])
        over = tl.div_rn(f, T)
        c = c + (tl.div_rn(LOG2E, T),)
        m = m + (tl.load(rows),)
        log_sum = log_sum + (tl.load(rows + N) * LOG2E,)
        rows += 2 * N
        a, b, e, const = 0.0, 0.0, 0.0, 0.0
        if A[i]:
            a = tl.load(rows) * over
            live = live | (a != 0)
            rows += N
        if B[i]:
            b = tl.load(rows) * over * LN2
            live = live | (b != 0)
            rows += N
        if E[i]:
            e = tl.load(rows) * over
            live = live | (e != 0)
            rows += N
        if C[i]:
            const = tl.load(rows) * over
            live = live | (const != 0)
            rows += N
        if Y[i]:
            y = tl.load(rows) * over
            live = live | (y != 0)
            at_target += y
            rows += N
        k = k + (a, b, e, const)
    mt, meet, kt, kl, overs = (), (), (), (), ()
    if TEACHER:
        mt = (tl.load(rows), tl.load(rows + N))
        rows += 2 * N
    for i in tl.static_range(len(TA)):
        T = temperature(met_temperatures[i], row, MET_PER_ROW[i])
        over = tl.div_rn(f, T)
        inverse = tl.div_rn(1.0, T)
        theirs = tl.div_rn(1.0, temperature(teacher_temperatures[i], row, TEACHER_PER_ROW[i]))
        meet = meet + (inverse, tl.load(rows), theirs, tl.load(rows + N))
        rows += 2 * N
        a, b, at_q, d = 0.0, 0.0, 0.0, 0.0
        if TA[i]:
            a = tl.load(rows) * over
            live = live | (a != 0)
            rows += N
        if TB[i]:
            b = tl.load(rows) * over
            live = live | (b != 0)
            rows += N
        if TC[i]:
            at_q = tl.load(rows) * over
            live = live | (at_q != 0)
            rows += N
        if TD[i]:
            d = tl.load(rows) * over
            live = live | (d != 0)
            rows += N
        kt = kt + (a, b, at_q, d)
        overs = overs + (over,)
    for n in tl.static_range(len(LOOKS)):
        pulled = tl.load(rows) * overs[LOOKS[n]]
        live = live | (pulled != 0)
        kl = kl + (pulled, tl.load(rows + N))
        rows += 2 * N

    kind = out.dtype.element_ty
    if live:
        column, here = 0, False
        picked = tl.zeros([], raw.dtype.element_ty)
        said = 0.0
        if TARGET:
            column = (wanted - start + skew).to(tl.int32)
            here = (column >= tl.maximum(low, skew)) & (column < high)
            if TEACHER:
                said = tl.load(teacher + column, mask=here, other=0.0)
            if here:
                picked = tl.load(raw + column)
                tl.debug_barrier()  # every warp has seen the target's logit before any may overwrite it
        write_both(
            raw, teacher, out, skew, low, high, whole_low, whole_high, column, here, picked, said, at_target,
            m, log_sum, c, k, mt, meet, kt, kl, numbers, scale, cap, teacher_scale, teacher_cap,
            A, B, E, C, TARGET, TEACHER, ELEMENT, TA, TB, TC, TD, LOOKS,
            SCALED, CAPPED, TEACHER_SCALED, TEACHER_CAPPED, VEC, BLOCK, ADD, False,
        )  # fmt: skip
    else:
        if not ADD:
            j = tl.arange(0, BLOCK)
            zeros = tl.zeros([BLOCK], kind)
            for block in range(low // BLOCK, tl.cdiv(high, BLOCK)):
                at = block * BLOCK + j
                tl.store(out + at, zeros, mask=(at >= whole_low) & (at < whole_high))
            ragged, ends, cut = ragged_ends(skew, low, high, whole_low, whole_high, VEC)
            if cut:
                tl.store(out + ragged, tl.zeros([2 * VEC], kind), mask=ends)


@triton.jit
def look_both(
    raw, teacher, skew, low, high, m, mt, meet, numbers, scale, cap, teacher_scale, teacher_cap,
    ELEMENT: tl.constexpr, SUMS: tl.constexpr,
    SCALED: tl.constexpr, CAPPED: tl.constexpr, TEACHER_SCALED: tl.constexpr, TEACHER_CAPPED: tl.constexpr,
    VEC: tl.constexpr, TEACHER_VEC: tl.constexpr, POLICY: tl.constexpr,
    K: tl.constexpr, L: tl.constexpr, J: tl.constexpr,
):  # fmt: skip
    """The sums of ELEMENT's results, SUMS of them, over the columns from `low` to `high`; `meet` as in `gradient`."""
    BLOCK: tl.constexpr = K * L * J
    sums = ()
    for _ in tl.static_range(SUMS):
        sums = sums + (tl.zeros([L], tl.float32),)
    j = tl.arange(0, L)[:, None] * J + tl.arange(0, J)[None, :]
    head = (low < skew).to(tl.int32)
    first = low // BLOCK + head
    last = tl.maximum(high // BLOCK, first)
    for block in range(first, last):
        x = fetch(raw, block * BLOCK + j, 0, 0, False, K, POLICY)
        y = fetch(teacher, block * BLOCK + j, 0, 0, False, K, POLICY)
        for n in tl.static_range(K):
            z = logits(x[n], scale, cap, SCALED, CAPPED)
            u = logits(y[n], teacher_scale, teacher_cap, TEACHER_SCALED, TEACHER_CAPPED)
            logs = ()
            for i in tl.static_range(len(meet) // 4):
                logp = tl.maximum((z - m) * meet[4 * i], NATS) - meet[4 * i + 1]
                logq = tl.maximum((u - mt) * meet[4 * i + 2], NATS) - meet[4 * i + 3]
                logs = logs + (logp, logq)
            found = ELEMENT(*logs, *exponentials(logs), *numbers)
            more = ()
            for i in tl.static_range(SUMS):
                more = more + (sums[i] + tl.sum(found[i] + tl.zeros_like(z), axis=1),)
            sums = more
    go, stop = edges(skew, high, VEC)
    got, stopt = edges(skew, high, TEACHER_VEC)
    for edge in range(1 - head, 1 + (high > last * BLOCK).to(tl.int32)):
        block = tl.where(edge == 0, 0, last)
        x = fetch(raw, block * BLOCK + j, go, stop, True, K, "evict_first")
        y = fetch(teacher, block * BLOCK + j, got, stopt, True, K, "evict_first")
        for n in tl.static_range(K):
            at = block * BLOCK + n * (L * J) + j
            good = (at >= skew) & (at < high)
            z = logits(x[n], scale, cap, SCALED, CAPPED)
            u = logits(y[n], teacher_scale, teacher_cap, TEACHER_SCALED, TEACHER_CAPPED)
            logs = ()
            for i in tl.static_range(len(meet) // 4):
                logp = tl.maximum((z - m) * meet[4 * i], NATS) - meet[4 * i + 1]
                logq = tl.maximum((u - mt) * meet[4 * i + 2], NATS) - meet[4 * i + 3]
                logs = logs + (tl.where(good, logp, 0.0), tl.where(good, logq, 0.0))
            found = ELEMENT(*logs, *exponentials(logs), *numbers)
            more = ()
            for i in tl.static_range(SUMS):
                more = more + (sums[i] + tl.sum(tl.where(good, found[i], 0.0), axis=1),)
            sums = more
    whole = ()
    for i in tl.static_range(SUMS):
        whole = whole + (tl.sum(sums[i], axis=0),)
    return whole


@triton.jit(
    do_not_specialize=["N", "V", "parts", "width", "stride", "lead", "teacher_stride", "teacher_lead"],
)
def look_kernel(
    raw, teacher, rows, out, given, teacher_given, numbers,
    N, V, parts, width, stride, lead, teacher_stride, teacher_lead, scale, cap, teacher_scale, teacher_cap,
    ELEMENT: tl.constexpr, SUMS: tl.constexpr, PER_ROW: tl.constexpr, TEACHER_PER_ROW: tl.constexpr,
    SCALED: tl.constexpr, CAPPED: tl.constexpr, TEACHER_SCALED: tl.constexpr, TEACHER_CAPPED: tl.constexpr,
    LINE: tl.constexpr, VEC: tl.constexpr, TEACHER_VEC: tl.constexpr,
    K: tl.constexpr, L: tl.constexpr, J: tl.constexpr,
):  # fmt: skip
    """The sums of ELEMENT's results, SUMS of them, over the columns that both have: (SUMS, P, N)."""
    row = tl.program_id(0) // parts
    part = tl.program_id(0) % parts
    begin, skew = boundary(row, stride, lead, LINE)
    raw += begin
    teacher += tl.multiple_of(row.to(tl.int64) * teacher_stride + teacher_lead - skew, TEACHER_VEC)
    low = part * width
    high = tl.minimum(low + width, skew + V)
    inverse = tl.div_rn(1.0, temperature(given, row, PER_ROW))
    other = tl.div_rn(1.0, temperature(teacher_given, row, TEACHER_PER_ROW))
    rows += row
    m, log_S = tl.load(rows), tl.load(rows + N)
    mt, log_St = tl.load(rows + 2 * N), tl.load(rows + 3 * N)
    sums = look_both(
        raw, teacher, skew, low, high, m, mt, (inverse, log_S, other, log_St), numbers,
        scale, cap, teacher_scale, teacher_cap, ELEMENT, SUMS, SCALED, CAPPED, TEACHER_SCALED, TEACHER_CAPPED,
        VEC, TEACHER_VEC, "evict_first", K, L, J,
    )  # fmt: skip
    out += part.to(tl.int64) * N + row
    for i in tl.static_range(SUMS):
        tl.store(out + i * N.to(tl.int64) * parts, sums[i])
