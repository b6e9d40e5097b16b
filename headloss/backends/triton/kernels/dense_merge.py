# mypy: ignore-errors
"""Merges the parts of a sweep with a dense teacher (`dense.py`); the algebra is that of `teachers.merge_teacher`.

Dimension key:  P parts   R rows of a program   N rows
"""

import triton
import triton.language as tl

from headloss.backends.triton.kernels.logits import LOG2E, logits
from headloss.backends.triton.kernels.running_sums import NATS, rebase, rebase_teacher
from headloss.backends.triton.kernels.sums import moved, part_sums, put, rebased_total, row_temperature


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
        has_target = (column >= 0) & (column < V) & good
        x = tl.load(raw + row * stride + lead + column, mask=has_target, other=0.0)
        z = logits(x, how[0], how[1], F.SCALED, F.CAPPED)
    if F.CHAINED:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    m = tl.load(partial, mask=here, other=-float("inf"))
    top, shift = moved(m)
    out = put(top, out, N, True, good)
    partial += step
    if F.TARGET:
        origin = tl.where(top == -float("inf"), 0.0, top)
        out = put(tl.where(has_target, z - origin, -float("inf")), out, N, True, good)
    if F.TOTAL:
        total, partial = part_sums(partial, step, here, True)
        count, partial = part_sums(partial, step, here, True)
        out = put(tl.sum(rebased_total(shift, total, count), axis=0), out, N, True, good)
        out = put(tl.sum(count, axis=0), out, N, True, good)
    if F.BEST:
        best = tl.load(partial, mask=here, other=float("inf"))
        out = put(tl.min(tl.where(m == top[None, :], best, float("inf")), axis=0), out, N, True, good)
        partial += step
    mt = tl.load(partial, mask=here, other=-float("inf"))
    topt, shiftt = moved(mt)
    out = put(topt, out, N, True, good)
    partial += step
    if F.TEACHER_BEST:
        best = tl.load(partial, mask=here, other=float("inf"))
        out = put(tl.min(tl.where(mt == topt[None, :], best, float("inf")), axis=0), out, N, True, good)
        partial += step
    for i in tl.static_range(len(temperatures)):
        T = row_temperature(temperatures[i], row, good, F.PER_ROW[i])
        Tt = row_temperature(teacher_temperatures[i], row, good, F.TEACHER_PER_ROW[i])
        d, dt = tl.maximum(shift / T, 2 * NATS), tl.maximum(shiftt / Tt, 2 * NATS)  # finite, and e^NATS is 0 already
        k, kt = tl.exp2(d * LOG2E), tl.exp2(dt * LOG2E)
        S, partial = part_sums(partial, step, here, True)
        X, partial = part_sums(partial, step, here, F.WANT_X[i])
        Q, partial = part_sums(partial, step, here, F.WANT_Q[i])
        St, partial = part_sums(partial, step, here, F.COMPARED[i])
        Y, partial = part_sums(partial, step, here, F.WANT_Y[i])
        f, partial = part_sums(partial, step, here, F.WANT_F[i])
        lost, partial = part_sums(partial, step, here, F.WANT_F[i])
        g, partial = part_sums(partial, step, here, F.WANT_G[i])
        lostt, partial = part_sums(partial, step, here, F.WANT_G[i])
        s, x, q = rebase(S, X, Q, d, k, F.WANT_X[i], F.WANT_Q[i])
        st, y, f, lost, g, lostt = rebase_teacher(
            S, St, Y, f, lost, g, lostt, d, dt, k, kt, NATS, F.WANT_Y[i], F.WANT_F[i], F.WANT_G[i]
        )
        out = put(tl.sum(s, axis=0), out, N, True, good)
        out = put(tl.sum(x, axis=0), out, N, F.WANT_X[i], good)
        out = put(tl.sum(q, axis=0), out, N, F.WANT_Q[i], good)
        out = put(tl.sum(st, axis=0), out, N, F.COMPARED[i], good)
        out = put(tl.sum(y, axis=0), out, N, F.WANT_Y[i], good)
        out = put(tl.sum(f + lost * NATS, axis=0), out, N, F.WANT_F[i], good)
        out = put(tl.sum(g + lostt * NATS, axis=0), out, N, F.WANT_G[i], good)
