# mypy: ignore-errors
"""Element-wise functions that printed losses call: as exact as PyTorch's where Triton's own are approximate.

They run once per row, so exactness costs nothing.  All take and return float32, a scalar or a block; `lowest` and
`highest` take any number.
"""

import triton
import triton.language as tl

from headloss.backends.triton.kernels.logits import LN2, LOG2E
from headloss.backends.triton.kernels.logits import tanh as unsigned_tanh

INF = tl.constexpr(float("inf"))  # a NaN cannot be such a constant: Triton would find that it has changed


@triton.jit
def exp(x):
    """e^x as e^(x - n log 2) 2^n: 2^(x log2(e)) alone loses digits as |x| grows."""
    n = tl.minimum(tl.maximum(tl.floor(x * LOG2E + 0.5), -300.0), 300.0)
    rest = (x - n * 0.693359375) + n * 2.12194440e-4
    half = tl.floor(n * 0.5)
    return tl.exp2(rest * LOG2E) * tl.exp2(half) * tl.exp2(n - half)


@triton.jit
def quick_exp(x):
    return tl.exp2(x * LOG2E)


@triton.jit
def quick_div(x, y):
    return x / y


@triton.jit
def expm1(x):
    near = 1.0 + x * (1.0 / 8.0)
    near = 1.0 + x * (1.0 / 7.0) * near
    near = 1.0 + x * (1.0 / 6.0) * near
    near = 1.0 + x * (1.0 / 5.0) * near
    near = 1.0 + x * (1.0 / 4.0) * near
    near = 1.0 + x * (1.0 / 3.0) * near
    near = x + x * (x * 0.5 * near)
    return tl.where(x == 0, x, tl.where(tl.abs(x) < 0.35, near, exp(x) - 1.0))  # -0 stays -0


@triton.jit
def log1p(x):
    u = 1.0 + x
    d = u - 1.0
    return tl.where(d == 0, x, tl.where(u == INF, u, tl.log(u) * tl.div_rn(x, tl.where(d == 0, 1.0, d))))


@triton.jit
def tanh(x):
    return tl.where(x == 0, x, unsigned_tanh(x))


@triton.jit
def sigmoid(x):
    return tl.div_rn(1.0, 1.0 + exp(-x))


@triton.jit
def quick_sigmoid(x):
    return 1.0 / (1.0 + tl.exp2(-x * LOG2E))


@triton.jit
def softplus(x, beta, threshold):
    y = x * beta
    return tl.where(y > threshold, x, tl.div_rn(log1p(exp(y)), beta))


@triton.jit
def log_sigmoid(x):
    return tl.minimum(x, 0.0, propagate_nan=tl.PropagateNan.ALL) - log1p(exp(-tl.abs(x)))


@triton.jit
def log_sigmoid_backward(grad, x):
    z = exp(-tl.abs(x))
    part = tl.div_rn(z, 1.0 + z)
    return grad * tl.where(x < 0, 1.0 - part, part)


@triton.jit
def softplus_backward(grad, x, beta, threshold):
    z = exp(x * beta)
    return tl.where(x * beta > threshold, grad, tl.div_rn(grad * z, z + 1.0))


@triton.jit
def silu_backward(grad, x):
    s = sigmoid(x)
    return grad * s * (1.0 + x * (1.0 - s))


@triton.jit
def logaddexp(x, y):
    top = tl.maximum(x, y, propagate_nan=tl.PropagateNan.ALL)
    same = (x == y) & (tl.abs(x) == INF)
    return tl.where(same, x, top + log1p(exp(-tl.abs(tl.where(same, 0.0, x - y)))))


if triton.knobs.runtime.interpret:  # which has no inline assembly

    @triton.jit
    def quick_log2(x):
        return tl.log2(x)

else:

    @triton.jit
    def quick_log2(x):
        """log2 of a positive normal number, off by 2^-22 of 1 or of itself: `tl.log2` is 27 instructions."""
        code: tl.constexpr = "lg2.approx.ftz.f32 $0, $1;"
        return tl.inline_asm_elementwise(code, "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def quick_log(x):
    return LN2 * quick_log2(x)


@triton.jit
def quick_falling(d):
    """1 / (1 + e^d)."""
    e = tl.exp2(-tl.abs(d) * LOG2E)
    return tl.where(d > 0, e, 1.0) / (1.0 + e)


@triton.jit
def quick_logaddexp(x, y):
    """With a polynomial for log(1 + e), 0 <= e <= 1, right to 2e-7; for finite numbers only."""
    e = tl.exp2(-tl.abs(x - y) * LOG2E)
    near = 0.005126102 * e - 0.029074065
    near = near * e + 0.07751609
    near = near * e - 0.13602248
    near = near * e + 0.19076881
    near = near * e - 0.24835399
    near = near * e + 0.3331812
    near = near * e - 0.49999446
    near = near * e + 0.99999994
    return tl.maximum(x, y) + near * e


@triton.jit
def power(x, y):
    """x^y by way of float64, in which y log2(x) keeps its digits."""
    x, y = tl.broadcast(x, y)
    size = tl.exp2(y.to(tl.float64) * tl.log2(tl.abs(x).to(tl.float64))).to(tl.float32)
    size = tl.where((tl.abs(x) == 1.0) & (y == y), 1.0, size)
    whole = tl.floor(y) == y
    odd = whole & (tl.floor(y * 0.5) * 2.0 != y)
    below_zero = (x == 0) & (tl.div_rn(1.0, x) < 0)
    size = tl.where(below_zero & odd, -size, size)
    signed = tl.where(x < 0, tl.where(whole, tl.where(odd, -size, size), float("nan")), size)
    signed = tl.where((x < 0) & (tl.abs(x) == INF) & (whole == 0), size, signed)
    return tl.where((y == 0) | (x == 1.0), 1.0, signed)


@triton.jit
def power_by(x, y):
    """x^y with a number y; for 0.5 and -0.5 it takes the square root, as PyTorch does."""
    root = tl.sqrt_rn(x)
    return tl.where(y == 0.5, root, tl.where(y == -0.5, tl.div_rn(1.0, root), power(x, y)))


@triton.jit
def sign(x):
    return (x > 0).to(tl.float32) - (x < 0).to(tl.float32)


@triton.jit
def nearest(x):
    """To the nearest whole number, halves to the even one."""
    size = tl.abs(x)
    whole = (size + 8388608.0) - 8388608.0
    whole = tl.where(whole == 0, x * 0.0, tl.where(x < 0, -whole, whole))  # -0.3 to -0
    return tl.where(size < 8388608.0, whole, x)


@triton.jit
def lowest(x, y):
    return tl.minimum(x, y, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def highest(x, y):
    return tl.maximum(x, y, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def xlogy(x, y):
    return tl.where(y == y, tl.where(x == 0, 0.0, x * tl.log(y)), float("nan"))


@triton.jit
def gelu(x):
    return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))


@triton.jit
def gelu_backward(grad, x):
    cdf = 0.5 * (1.0 + tl.erf(x * 0.7071067811865476))
    return grad * (cdf + x * exp(-0.5 * x * x) * 0.3989422804014327)


@triton.jit
def huber(x, y, delta):
    z = tl.abs(x - y)
    return tl.where(z <= delta, 0.5 * z * z, delta * (z - 0.5 * delta))


@triton.jit
def huber_backward(grad, x, y, delta):
    z = x - y
    return tl.where(z < -delta, -delta * grad, tl.where(z > delta, delta * grad, z * grad))


@triton.jit
def smooth_l1(x, y, beta):
    z = tl.abs(x - y)
    safe = tl.where(beta == 0, 1.0, beta)
    return tl.where(z < beta, tl.div_rn(0.5 * z * z, safe), z - 0.5 * beta)


@triton.jit
def smooth_l1_backward(grad, x, y, beta):
    z = x - y
    safe = tl.where(beta == 0, 1.0, beta)
    return tl.where(z <= -beta, -grad, tl.where(z >= beta, grad, tl.div_rn(grad * z, safe)))


@triton.jit
def elu(x, alpha, scale, input_scale):
    return tl.where(x > 0, x * scale, expm1(x * input_scale) * (alpha * scale))


@triton.jit
def elu_backward(grad, alpha, scale, input_scale, IS_RESULT: tl.constexpr, x):
    if IS_RESULT:
        below = grad * input_scale * (x + alpha * scale)
    else:
        below = grad * input_scale * (alpha * scale) * exp(x * input_scale)
    return tl.where(x > 0, grad * scale, below)


@triton.jit
def binary_cross(x, y):
    """-(y log x + (1 - y) log(1 - x)), with logarithms clamped at -100 as in PyTorch."""
    log_x = highest(tl.log(x), -100.0)
    log_rest = highest(log1p(-x), -100.0)
    return (y - 1.0) * log_rest - y * log_x


@triton.jit
def binary_cross_backward(grad, x, y):
    return tl.div_rn(grad * (x - y), highest((1.0 - x) * x, 1e-12))


@triton.jit
def sum_along(x, is_id):
    """The sum of a block without its padding; `x` may be one value for all of it."""
    return tl.sum(tl.where(is_id, x, 0.0), axis=0)


@triton.jit
def logsumexp_along(x, is_id):
    x = tl.where(is_id, x, -INF)
    top = tl.max(x, axis=0)
    top = tl.where(tl.abs(top) == INF, 0.0, top)
    return tl.log(tl.sum(exp(x - top), axis=0)) + top


@triton.jit
def log_softmax_along(x, is_id):
    return x - logsumexp_along(x, is_id)


@triton.jit
def softmax_along(x, is_id):
    return exp(log_softmax_along(x, is_id))


@triton.jit
def log_softmax_backward_along(grad, output, is_id):
    return grad - exp(output + tl.zeros_like(grad)) * sum_along(grad, is_id)


@triton.jit
def softmax_backward_along(grad, output, is_id):
    return output * (grad - sum_along(grad * output, is_id))
