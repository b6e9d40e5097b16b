# mypy: ignore-errors
"""The parts of a sweep with a dense teacher (`dense.py`), made one.  See `teachers.merge_teacher`.

Dimension key:  P parts   R rows of a program   N rows
"""

import triton
import triton.language as tl

from headloss.backends.triton.kernels.dense import NATS, rebase
from headloss.backends.triton.kernels.logits import LOG2E, logits
from headloss.backends.triton.kernels.sums import row_temperature


@triton.jit
def moved(m):
    """How far each part's maximum (P, R) is from that of all; a part without columns never moves the sums."""
    top = tl.max(m, axis=0)
    return top, tl.where(m == -float("inf"), -float("inf"), m - top[None, :])


@triton.jit
def settle(x, k, good, out):
    tl.store(out, tl.sum(k * x, axis=0), mask=good)


@triton.jit(
    do_not_specialize=["N", "V", "parts", "stride", "lead", "target_stride", "start"],
    do_not_specialize_on_alignment=["raw", "target"],
)
def dense_merge_kernel(
    raw, target, partial, out, temperatures, teacher_temperatures,
    N, V, parts, stride, lead, target_stride, start, how, F: tl.constexpr,
):  # fmt: skip
    """(F, P, N) -> (F, N): the same numbers without D and E, and the target's logit after the maximum."""
    PADDED: tl.constexpr = F.PADDED
    ROWS: tl.constexpr = F.ROWS
    part = tl.arange(0, PADDED)[:, None]
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    good = row < N
    here = (part < parts) & good[None, :]
    partial += part * N + row[None, :]
    out += row
    step = N.to(tl.int64) * parts
    if F.TARGET:
        column = tl.load(target + row * target_stride, mask=good, other=-1) - start
        held = (column >= 0) & (column < V) & good
        x = tl.load(raw + row * stride + lead + column, mask=held, other=0.0)
        z = logits(x, how[0], how[1], F.SCALED, F.CAPPED)
    if F.CHAINED:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    m = tl.load(partial, mask=here, other=-float("inf"))
    top, shift = moved(m)
    tl.store(out, top, mask=good)
    partial += step
    out += N
    if F.TARGET:
        origin = tl.where(top == -float("inf"), 0.0, top)
        tl.store(out, tl.where(held, z - origin, -float("inf")), mask=good)
        out += N
    if F.TOTAL:
        total = tl.load(partial, mask=here, other=0.0)
        count = tl.load(partial + step, mask=here, other=0.0)
        tl.store(out, tl.sum(tl.where(count > 0, total + count * shift, 0.0), axis=0), mask=good)
        tl.store(out + N, tl.sum(count, axis=0), mask=good)
        partial += 2 * step
        out += 2 * N
    if F.BEST:
        best = tl.load(partial, mask=here, other=float("inf"))
        tl.store(out, tl.min(tl.where(m == top[None, :], best, float("inf")), axis=0), mask=good)
        partial += step
        out += N
    mt = tl.load(partial, mask=here, other=-float("inf"))
    topt, shiftt = moved(mt)
    tl.store(out, topt, mask=good)
    partial += step
    out += N
    if F.TEACHER_BEST:
        best = tl.load(partial, mask=here, other=float("inf"))
        tl.store(out, tl.min(tl.where(mt == topt[None, :], best, float("inf")), axis=0), mask=good)
        partial += step
        out += N
    for i in tl.static_range(len(temperatures)):
        T = row_temperature(temperatures[i], row, good, F.PER_ROW[i])
        Tt = row_temperature(teacher_temperatures[i], row, good, F.TEACHER_PER_ROW[i])
        d, dt = tl.maximum(shift / T, NATS), tl.maximum(shiftt / Tt, NATS)
        k, kt = tl.exp2(d * LOG2E), tl.exp2(dt * LOG2E)
        S = tl.load(partial, mask=here, other=0.0)
        settle(S, k, good, out)
        partial += step
        out += N
        if F.WANT_X[i]:
            settle(tl.load(partial, mask=here, other=0.0) + d * S, k, good, out)
            partial += step
            out += N
        if F.WANT_Q[i]:
            settle(tl.load(partial, mask=here, other=0.0), k * k, good, out)
            partial += step
            out += N
        if F.MET[i]:
            St = tl.load(partial, mask=here, other=0.0)
            settle(St, kt, good, out)
            partial += step
            out += N
        if F.WANT_Y[i]:
            settle(tl.load(partial, mask=here, other=0.0) + dt * St, kt, good, out)
            partial += step
            out += N
        if F.WANT_F[i]:
            f, lost = tl.load(partial, mask=here, other=0.0), tl.load(partial + step, mask=here, other=0.0)
            f, lost = rebase(f, lost, St, shift / T, NATS)
            settle(f + lost * NATS, kt, good, out)
            partial += 2 * step
            out += N
        if F.WANT_G[i]:
            g, lost = tl.load(partial, mask=here, other=0.0), tl.load(partial + step, mask=here, other=0.0)
            g, lost = rebase(g, lost, S, shiftt / Tt, NATS)
            settle(g + lost * NATS, k, good, out)
            partial += 2 * step
            out += N
