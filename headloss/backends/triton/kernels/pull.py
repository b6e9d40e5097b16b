# mypy: ignore-errors
"""The pull: d(loss)/d(raw) from a handful of numbers per row.

    d(loss)/d(s_j) = p_j (a + b log p_j + e p_j) + c + y 1[j=y]        the student's own, summed over temperatures
                   + t e^(s_j - tail lse)                              a sparse teacher's tail: an entry with its own
                                                                       maximum; at the ids it is overwritten later
                   + p_j (a + b log p_j + c log q_j) + d q_j           each dense teacher's, where p and q are the
                   + g (f'_j - p_j sum f')                             softmaxes over the columns that both have

with s = z / T.  `ELEMENT` is a printed function: from (log p, log q) at each temperature, and from numbers, it returns
f and f' = df/d(log p) of each divergence; DIVERGENCES says at which temperature each is.

A program writes WIDTH columns of one row; `rows` (F, N) has the numbers of a row, in the order in which they are loaded
below.  Columns are counted from the boundary below the output's first element.  Vectors that lie entirely inside the
row are stored whole; the row's ragged ends, fewer than VEC columns each, are stored separately, because the rest of
their vectors belongs to other rows.
"""

import triton
import triton.language as tl

from headloss.backends.triton.kernels.logits import FLOOR, LN2, LOG2E, boundary, inner, logits, rim, temperature
from headloss.backends.triton.kernels.running_sums import NATS


@triton.jit
def slopes(g, z, cap, CAPPED: tl.constexpr):
    """From d/dz to d/d raw; the scale is in the coefficients already."""
    if CAPPED:
        ratio = z / cap
        g = g * (1.0 - ratio * ratio)
    return g


@triton.jit
def log_pair(z, u, tops, pairs, AT: tl.constexpr):
    """log p and log q, never below the floor, from both maxima and four numbers of `pairs`, from index AT on: 1 / T,
    log_S, 1 / the teacher's T, log_St."""
    log_p = tl.maximum((z - tops[0]) * pairs[AT], NATS) - pairs[AT + 1]
    return log_p, tl.maximum((u - tops[1]) * pairs[AT + 2], NATS) - pairs[AT + 3]


@triton.jit
def exponentials(logs):
    each = ()
    for i in tl.static_range(len(logs)):
        each = each + (tl.exp2(logs[i] * LOG2E),)
    return each


@triton.jit
def gradient(raw, others, own, tops, pairs, divergences, given, ELEMENT: tl.constexpr, F: tl.constexpr):
    """The gradient, but for what the target adds; and z.

    `own` has seven numbers per entry: maximum, log2(e) / T, log_sum; a, b, e, c over T, b in base 2.  `others` are the
    teachers' logits, `tops` all maxima, the student's first; `pairs` has eight numbers per teacher and temperature: the
    four of `log_pair`; a, b, c, d over T.  `divergences` has two per divergence: g over T, sum f'.
    """
    z = logits(raw, given.scale, given.cap, F.SCALED, F.CAPPED)
    g = tl.zeros_like(z)
    for i in tl.static_range(len(F.A)):
        if F.A[i] or F.B[i] or F.E[i]:
            x = (z - own[7 * i]) * own[7 * i + 1] - own[7 * i + 2]
            p = tl.exp2(x)
            slope = own[7 * i + 3] + 0.0
            if F.B[i]:
                slope = slope + own[7 * i + 4] * tl.maximum(x, FLOOR)
            if F.E[i]:
                slope = slope + own[7 * i + 5] * p
            g += p * slope
        if F.C[i]:
            g += own[7 * i + 6]
    if len(F.TA) > 0:
        u = ()
        for t in tl.static_range(len(others)):
            scale, cap = given.teacher_scales[t], given.teacher_caps[t]
            u = u + (logits(others[t], scale, cap, F.TEACHER_SCALED[t], F.TEACHER_CAPPED[t]),)
        logs = ()
        for i in tl.static_range(len(F.TA)):
            log_p, log_q = log_pair(z, u[F.TEACHER_OF[i]], (tops[0], tops[1 + F.TEACHER_OF[i]]), pairs, 8 * i)
            logs = logs + (log_p, log_q)
            if F.TA[i] or F.TB[i] or F.TC[i]:
                slope = pairs[8 * i + 4] + 0.0
                if F.TB[i]:
                    slope = slope + pairs[8 * i + 5] * log_p
                if F.TC[i]:
                    slope = slope + pairs[8 * i + 6] * log_q
                g += tl.exp2(log_p * LOG2E) * slope
            if F.TD[i]:
                g += pairs[8 * i + 7] * tl.exp2(log_q * LOG2E)
        if ELEMENT is not None:
            found = ELEMENT(*logs, *exponentials(logs), *given.numbers)
            for n in tl.static_range(len(F.DIVERGENCES)):
                p = tl.exp2(logs[2 * F.DIVERGENCES[n]] * LOG2E)
                g += divergences[2 * n] * (found[2 * n + 1] - p * divergences[2 * n + 1])
    return slopes(g, z, given.cap, F.CAPPED), z


@triton.jit
def coefficient(rows, N, over, live, PRESENT: tl.constexpr):
    """The next coefficient times `over`, or 0 if not PRESENT; whether any so far is not 0; the pointer to the next."""
    k = 0.0
    if PRESENT:
        k = tl.load(rows) * over
        live = live | (k != 0)
        rows += N
    return k, live, rows


@triton.jit
def row_of(x, row, stride, lead, skew, VEC: tl.constexpr):
    """The pointer to a row's columns, counted as those of the output are."""
    return x + tl.multiple_of(row.to(tl.int64) * stride + lead - skew, VEC)


@triton.jit
def loaded(teachers, place, here):
    """Each teacher's logits at these places."""
    found = ()
    for t in tl.static_range(len(teachers)):
        found = found + (tl.load(teachers[t] + place, mask=here, other=0.0),)
    return found


@triton.jit(
    do_not_specialize=[
        "N", "V", "parts", "stride", "lead", "out_stride", "out_lead", "target_stride", "start",
    ],
    do_not_specialize_on_alignment=["target"],
)  # fmt: skip
def pull_kernel(
    at, target, given, N, V, parts, stride, lead, out_stride, out_lead, target_stride, start,
    ELEMENT: tl.constexpr, F: tl.constexpr,
):  # fmt: skip
    VEC: tl.constexpr = F.VEC
    TEACHERS: tl.constexpr = len(F.TEACHER_VEC) > 0
    BLOCK: tl.constexpr = F.BLOCK
    STAGES: tl.constexpr = F.STAGES
    row = tl.program_id(0) // parts
    part = tl.program_id(0) % parts
    begin, skew = boundary(row, out_stride, out_lead, F.LINE)
    out = at.out + begin
    raw = row_of(at.raw, row, stride, lead, skew, F.RAW_VEC)
    teachers = ()
    for t in tl.static_range(len(F.TEACHER_VEC)):
        strides, leads = given.teacher_strides, given.teacher_leads
        teachers = teachers + (row_of(at.teacher[t], row, strides[t], leads[t], skew, F.TEACHER_VEC[t]),)
    low = part * F.WIDTH
    high = tl.minimum(low + F.WIDTH, skew + V)
    low_here = tl.maximum(low, skew)
    whole_low, whole_high = inner(low_here, high, VEC)

    rows = at.rows + row
    if F.TARGET:
        wanted = tl.load(target + row.to(tl.int64) * target_stride)
    f = 1.0
    if F.SCALED:
        f = given.scale + 0.0
    live = tl.full([], 0, tl.int1)
    at_target = 0.0
    own, tops, pairs, overs, divergences = (), (), (), (), ()
    m = 0.0
    for i in tl.static_range(len(F.A)):
        T = temperature(given.temperatures[i], row, F.PER_ROW[i])
        over = tl.div_rn(f, T)
        if i == 0 or F.MAXIMA:
            m = tl.load(rows)
            rows += N
        log_sum = tl.load(rows) * LOG2E
        rows += N
        a, live, rows = coefficient(rows, N, over, live, F.A[i])
        b, live, rows = coefficient(rows, N, over, live, F.B[i])
        e, live, rows = coefficient(rows, N, over, live, F.E[i])
        const, live, rows = coefficient(rows, N, over, live, F.C[i])
        y, live, rows = coefficient(rows, N, over, live, F.Y[i])
        at_target += y
        own = own + (m, tl.div_rn(LOG2E, T), log_sum, a, b * LN2, e, const)
    if TEACHERS:
        tops = (tl.load(rows),)
        rows += N
    for _t in tl.static_range(len(F.TEACHER_VEC)):
        tops = tops + (tl.load(rows),)
        rows += N
    for i in tl.static_range(len(F.TA)):
        T = temperature(given.compared_temperatures[i], row, F.COMPARED_PER_ROW[i])
        over = tl.div_rn(f, T)
        inverse_t = tl.div_rn(1.0, temperature(given.teacher_temperatures[i], row, F.TEACHER_PER_ROW[i]))
        pairs = pairs + (tl.div_rn(1.0, T), tl.load(rows), inverse_t, tl.load(rows + N))
        rows += 2 * N
        a, live, rows = coefficient(rows, N, over, live, F.TA[i])
        b, live, rows = coefficient(rows, N, over, live, F.TB[i])
        at_q, live, rows = coefficient(rows, N, over, live, F.TC[i])
        d, live, rows = coefficient(rows, N, over, live, F.TD[i])
        pairs = pairs + (a, b, at_q, d)
        overs = overs + (over,)
    for n in tl.static_range(len(F.DIVERGENCES)):
        pulled, live, rows = coefficient(rows, N, overs[F.DIVERGENCES[n]], live, True)
        divergences = divergences + (pulled, tl.load(rows))
        rows += N

    kind = out.dtype.element_ty
    j = tl.arange(0, BLOCK)
    head = (low < whole_low).to(tl.int32)
    first = low // BLOCK + head
    last = tl.maximum(whole_high // BLOCK, first)
    ragged, ends = rim(low_here, high, whole_low, whole_high, VEC)
    cut = (whole_low > low_here) | (whole_high < high)
    if live:
        picked_t = ()
        if F.TARGET:
            column = (wanted - start + skew).to(tl.int32)
            here = (column >= low_here) & (column < high)
            picked = tl.zeros([], raw.dtype.element_ty)
            picked_t = loaded(teachers, column, here)
            if here:
                picked = tl.load(raw + column)
                tl.debug_barrier()  # every warp has read the target's logit before any may overwrite it
        if not TEACHERS:  # early, to hide its latency behind the blocks; with teachers there are too few registers
            x_ends = tl.load(raw + ragged, mask=ends, other=0.0)
        for block in tl.range(first, last, num_stages=STAGES):
            x = tl.load(raw + block * BLOCK + j, eviction_policy="evict_first")
            u = ()
            for t in tl.static_range(len(F.TEACHER_VEC)):
                u = u + (tl.load(teachers[t] + block * BLOCK + j, eviction_policy="evict_first"),)
            g, _ = gradient(x, u, own, tops, pairs, divergences, given, ELEMENT, F)
            tl.store(out + block * BLOCK + j, g.to(kind), eviction_policy="evict_first")
        for edge in range(1 - head, 1 + (whole_high > last * BLOCK).to(tl.int32)):
            to = tl.where(edge == 0, low // BLOCK, last) * BLOCK + j
            whole = (to >= whole_low) & (to < whole_high)
            x = tl.load(raw + to, mask=whole, other=0.0)
            g, _ = gradient(x, loaded(teachers, to, whole), own, tops, pairs, divergences, given, ELEMENT, F)
            tl.store(out + to, g.to(kind), mask=whole)
        if cut:
            if TEACHERS:
                x_ends = tl.load(raw + ragged, mask=ends, other=0.0)
            g, _ = gradient(x_ends, loaded(teachers, ragged, ends), own, tops, pairs, divergences, given, ELEMENT, F)
            tl.store(out + ragged, g.to(kind), mask=ends)
        if F.TARGET:  # noqa: SIM102, known before the kernel runs
            if here:  # one store instead of a comparison for every column
                g, z = gradient(picked, picked_t, own, tops, pairs, divergences, given, ELEMENT, F)
                g += slopes(at_target, z, given.cap, F.CAPPED)
                tl.debug_barrier()
                tl.store(out + column, g.to(kind))
    else:
        zeros = tl.zeros([BLOCK], kind)
        for block in range(low // BLOCK, tl.cdiv(high, BLOCK)):
            to = block * BLOCK + j
            tl.store(out + to, zeros, mask=(to >= whole_low) & (to < whole_high))
        if cut:
            tl.store(out + ragged, tl.zeros([2 * VEC], kind), mask=ends)
