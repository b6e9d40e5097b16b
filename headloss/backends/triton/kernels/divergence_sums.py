# mypy: ignore-errors
"""The second read of rows: the sums of divergences that need both softmaxes first.  See `pull.py` for ELEMENT."""

import triton
import triton.language as tl

from headloss.backends.triton.kernels.logits import boundary, edges, logits, temperature
from headloss.backends.triton.kernels.pull import exponentials, log_pair
from headloss.backends.triton.kernels.sums import fetch


@triton.jit
def add_divergences(
    x, y, sums, good, tops, pairs, numbers, how, MASKED: tl.constexpr, ELEMENT: tl.constexpr, F: tl.constexpr
):
    """Add a load (L, J) of both rows to the lanes' sums; MASKED: only its `good` columns."""
    z = logits(x, how[0], how[1], F.SCALED, F.CAPPED)
    log_p, log_q = log_pair(z, logits(y, how[2], how[3], F.TEACHER_SCALED, F.TEACHER_CAPPED), tops, pairs, 0)
    if MASKED:
        log_p, log_q = tl.where(good, log_p, 0.0), tl.where(good, log_q, 0.0)
    else:
        good = tl.full(z.shape, True, tl.int1)
    found = ELEMENT(log_p, log_q, *exponentials((log_p, log_q)), *numbers)
    more = ()
    for i in tl.static_range(len(sums)):
        more = more + (sums[i] + tl.sum(tl.where(good, found[i], 0.0), axis=1),)
    return more


@triton.jit(
    do_not_specialize=["N", "V", "parts", "width", "stride", "lead", "teacher_stride", "teacher_lead"],
)
def divergence_kernel(
    at, temperatures, numbers, N, V, parts, width, stride, lead, teacher_stride, teacher_lead, how,
    ELEMENT: tl.constexpr, F: tl.constexpr,
):  # fmt: skip
    """The sums of ELEMENT's results, DIVERGENCE_SUMS of them, over the columns that both have: (DIVERGENCE_SUMS, P, N).

    `rows` (4, N): the student's maximum and log_S, then the teacher's; `temperatures`: the student's and the teacher's.
    """
    K: tl.constexpr = F.K
    L: tl.constexpr = F.L
    J: tl.constexpr = F.J
    TEACHER_VEC: tl.constexpr = F.TEACHER_VEC
    DIVERGENCE_SUMS: tl.constexpr = F.DIVERGENCE_SUMS
    BLOCK: tl.constexpr = K * L * J
    row = tl.program_id(0) // parts
    part = tl.program_id(0) % parts
    begin, skew = boundary(row, stride, lead, F.LINE)
    raw = at.raw + begin
    teacher = at.teacher + tl.multiple_of(row.to(tl.int64) * teacher_stride + teacher_lead - skew, TEACHER_VEC)
    low = part * width
    high = tl.minimum(low + width, skew + V)
    inverse = tl.div_rn(1.0, temperature(temperatures[0], row, F.PER_ROW[0]))
    inverse_t = tl.div_rn(1.0, temperature(temperatures[1], row, F.TEACHER_PER_ROW[0]))
    rows = at.rows + row
    m, log_S = tl.load(rows), tl.load(rows + N)
    mt, log_St = tl.load(rows + 2 * N), tl.load(rows + 3 * N)
    tops, pairs = (m, mt), (inverse, log_S, inverse_t, log_St)
    sums = ()
    for _ in tl.static_range(DIVERGENCE_SUMS):
        sums = sums + (tl.zeros([L], tl.float32),)
    j = tl.arange(0, L)[:, None] * J + tl.arange(0, J)[None, :]
    head = (low < skew).to(tl.int32)
    first = low // BLOCK + head
    last = tl.maximum(high // BLOCK, first)
    for block in range(first, last):
        x = fetch(raw, block * BLOCK + j, 0, 0, False, K, "evict_first")
        y = fetch(teacher, block * BLOCK + j, 0, 0, False, K, "evict_first")
        for n in tl.static_range(K):
            sums = add_divergences(x[n], y[n], sums, 0, tops, pairs, numbers, how, False, ELEMENT, F)
    go, stop = edges(skew, high, F.VEC)
    got, stopt = edges(skew, high, TEACHER_VEC)
    for edge in range(1 - head, 1 + (high > last * BLOCK).to(tl.int32)):
        block = tl.where(edge == 0, 0, last)
        x = fetch(raw, block * BLOCK + j, go, stop, True, K, "evict_first")
        y = fetch(teacher, block * BLOCK + j, got, stopt, True, K, "evict_first")
        for n in tl.static_range(K):
            column = block * BLOCK + n * (L * J) + j
            good = (column >= skew) & (column < high)
            sums = add_divergences(x[n], y[n], sums, good, tops, pairs, numbers, how, True, ELEMENT, F)
    out = at.out + (part.to(tl.int64) * N + row)
    for i in tl.static_range(DIVERGENCE_SUMS):
        tl.store(out + i * N.to(tl.int64) * parts, tl.sum(sums[i], axis=0))
