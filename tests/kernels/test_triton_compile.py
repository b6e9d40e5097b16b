"""Every kernel compiles for Hopper without a GPU: no spills, 128-bit loads, no barrier inside the loop."""

import re
import subprocess
from importlib import import_module
from pathlib import Path

import pytest
import torch

triton = pytest.importorskip("triton")
if triton.knobs.runtime.interpret:
    pytest.skip("the interpreter compiles nothing", allow_module_level=True)

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

backend = import_module("headloss.backends.triton.sweeps")
tiles = import_module("headloss.backends.triton.tiles")
from headloss.backends.triton.kernels.pull import pull_kernel  # noqa: E402
from headloss.backends.triton.kernels.sums import merge_kernel, sums_kernel  # noqa: E402
from headloss.backends.triton.kernels.top import cut_kernel, order_kernel, top_kernel  # noqa: E402

BIN = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
INTS = ("N", "V", "k", "parts", "width", "stride", "lead", "out_stride", "out_lead", "target_stride", "start")
WIDE = {"bf16": 8, "fp16": 8, "fp32": 4}


class Built:
    def __init__(self, kernel, dtype, warps, temperatures=1, **constants):
        signature = dict.fromkeys(INTS, "i32") | {"scale": "fp32", "cap": "fp32"}
        signature |= {"raw": f"*{dtype}", "target": "*i64", "rows": "*fp32", "partial": "*fp32"}
        signature |= {"values": "*fp32", "columns": "*i64", "counts": "*i32", "found": "*i64", "groups": "*i32"}
        signature |= {"out": f"*{dtype}" if kernel is pull_kernel else "*fp32"}
        signature["temperatures"] = ("fp32",) * temperatures
        names = kernel.arg_names
        aligned = {
            (names.index(n),): [["tt.divisibility", 16]] for n in ("raw", "out", "rows", "partial") if n in names
        }
        source = ASTSource(kernel, {n: signature.get(n, "constexpr") for n in names}, constants, aligned)
        compiled = triton.compile(
            source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps, **tiles.LAUNCH}
        )
        self.cubin = compiled.asm["cubin"]

    def dump(self, what, folder):
        path = folder / "kernel.cubin"
        path.write_bytes(self.cubin)
        return subprocess.run([BIN / "cuobjdump", what, path], capture_output=True, text=True, check=True).stdout


def sums(dtype, V, *, temperatures=1, every=False, capped=False, peel=True):
    shape = tiles.row_shape(backend.SUMS, V)
    vector = WIDE[dtype] if peel else 1
    flags = (True,) * temperatures
    return Built(
        sums_kernel, dtype, shape.warps, temperatures,
        TARGET=True, TOTAL=every, ARGMAX=every, WANT_X=flags, WANT_Q=(every,) * temperatures,
        PER_ROW=(False,) * temperatures, SCALED=capped, CAPPED=capped, CHAINED=tiles.CHAINS,
        LINE=8 * vector if peel else 1, VEC=vector, K=shape.loads if peel else 1, L=shape.lanes, J=WIDE[dtype],
    )  # fmt: skip


def pull(dtype, V, *, temperatures=1, every=False, capped=False):
    shape = tiles.row_shape(backend.PULL, V)
    some, rest = (True,) * temperatures, (every,) * temperatures
    return Built(
        pull_kernel, dtype, shape.warps, temperatures,
        A=some, B=some, E=rest, C=rest, Y=some, TARGET=True, PER_ROW=(False,) * temperatures,
        SCALED=capped, CAPPED=capped, WIDTH=shape.width, LINE=8 * WIDE[dtype], VEC=WIDE[dtype], RAW_VEC=WIDE[dtype],
        BLOCK=shape.lanes * shape.loads * WIDE[dtype], STAGES=shape.stages,
    )  # fmt: skip


def merge():
    return Built(
        merge_kernel, "bf16", 1, 2,
        TARGET=True, TOTAL=True, ARGMAX=True, WANT_X=(True, True), WANT_Q=(True, False), PER_ROW=(False, False),
        SCALED=True, CAPPED=True, PADDED=8, ROWS=4, CHAINED=tiles.CHAINS,
    )  # fmt: skip


def top(dtype, k, kernel):
    found = import_module("headloss.backends.triton.top")
    flags = {"SCALED": False, "CAPPED": False, "LINE": 8, "L": found.L, "J": WIDE[dtype], "M": max(256, 2 * k)}
    if kernel is top_kernel:
        B = found.loads(151936, k, WIDE[dtype])
        flags |= {"B": B, "G": triton.next_power_of_2(triton.cdiv(151936, found.L * WIDE[dtype] * B) * found.L)}
    return Built(kernel, dtype, 8, **flags)


KERNELS = {
    "top 64": lambda: top("bf16", 64, top_kernel),
    "top 64, float32": lambda: top("fp32", 64, top_kernel),
    "top 64, cut": lambda: top("fp32", 64, cut_kernel),
    "top 64, ordered": lambda: Built(order_kernel, "bf16", 1, M=256),
    "sums 128256": lambda: sums("bf16", 128256),
    "sums 262144 float32": lambda: sums("fp32", 262144),
    "sums 2000": lambda: sums("fp16", 2000),
    "sums, every fact at two temperatures": lambda: sums("bf16", 151936, temperatures=2, every=True, capped=True),
    "sums, nothing known of the rows": lambda: sums("bf16", 151936, peel=False),
    "pull 128256": lambda: pull("bf16", 128256),
    "pull 32000": lambda: pull("bf16", 32000),
    "pull 151936 float32": lambda: pull("fp32", 151936),
    "pull, every coefficient at two temperatures": lambda: pull(
        "bf16", 151936, temperatures=2, every=True, capped=True
    ),
    "merge": merge,
}


@pytest.mark.parametrize("name", KERNELS)
def test_compiles_without_spills(name, tmp_path):
    built = KERNELS[name]()
    usage = re.search(r"REG:(\d+) STACK:(\d+)", built.dump("--dump-resource-usage", tmp_path))
    assert usage is not None and int(usage[2]) <= 8 * ("cut" in name), usage  # of rows of equal logits alone
    if name in ("sums 128256", "pull 128256"):
        code = built.dump("-sass", tmp_path)
        assert len(re.findall(r"LDG\.E\.EF\.128", code)) >= 4  # the loop's loads
        assert len(re.findall(r"LDG\S*\.U16", code)) <= 2  # the target's, and the ragged ends'
        found = list(loops(code))
        assert found
        for loop in found:
            assert not re.search(r"BAR\.SYNC|SHFL", loop), "lanes wait for each other inside the loop"


def loops(code):
    """The text of each backward jump that holds an exponential."""
    lines = [(int(m[1], 16), m[2]) for m in re.finditer(r"/\*([0-9a-f]{4,5})\*/\s+([^;]*);", code)]
    for at, text in lines:
        jump = re.search(r"BRA\S* .*?0x([0-9a-f]+)", text)
        if jump and int(jump[1], 16) < at:
            body = "\n".join(t for where, t in lines if int(jump[1], 16) <= where <= at)
            if "MUFU.EX2" in body:
                yield body


# ---------------------------------------------------------------- beside teachers

from headloss.backends.triton.kernels.dense import dense_sums_kernel  # noqa: E402
from headloss.backends.triton.kernels.guided import guided_kernel, look_kernel  # noqa: E402
from headloss.backends.triton.kernels.meeting import dense_merge_kernel  # noqa: E402
from headloss.backends.triton.kernels.sparse import gather_kernel, merge_ids_kernel, store_kernel, tail_kernel  # noqa: E402
from headloss.backends.triton.printer.elements import printed  # noqa: E402
from headloss.divergence import Element  # noqa: E402
from headloss.losses import jsd, tvd  # noqa: E402

beside = import_module("headloss.backends.triton.teachers")
pulls = import_module("headloss.backends.triton.pulls")
COUNTS = ("teacher_stride", "teacher_lead", "count", "others", "apart")


class Taught(Built):
    def __init__(self, kernel, dtype, teacher, warps, *, temperatures=1, numbers=1, out="fp32", **constants):
        floats = ("scale", "cap", "teacher_scale", "teacher_cap", "given", "teacher_given")
        signature = dict.fromkeys((*INTS, *COUNTS), "i32") | dict.fromkeys(floats, "fp32")
        signature |= {
            "raw": f"*{dtype}",
            "teacher": f"*{teacher}",
            "out": f"*{out}",
            "rows": "*fp32",
            "partial": "*fp32",
        }
        signature |= {"ids": "*i64", "at": "*i64", "target": "*i64", "values": "*fp32", "inside": "*i1"}
        signature |= {"logprobs": "*fp32", "valid": "*i1", "out_logprobs": "*fp32"}
        signature |= {"out_ids": "*i64", "out_sorted": "*i64"}
        many = {"temperatures", "teacher_temperatures", "met_temperatures"}
        signature |= dict.fromkeys(many, ("fp32",) * temperatures) | {"numbers": ("fp32",) * numbers}
        names = kernel.arg_names
        aligned = {
            (names.index(n),): [["tt.divisibility", 16]]
            for n in ("raw", "teacher", "out", "rows", "partial")
            if n in names
        }
        source = ASTSource(kernel, {n: signature.get(n, "constexpr") for n in names}, constants, aligned)
        options = {"num_warps": warps, **tiles.LAUNCH}
        self.cubin = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["cubin"]


PLAIN = {"SCALED": False, "CAPPED": False}
TEACHERS_PLAIN = {"TEACHER_SCALED": False, "TEACHER_CAPPED": False}


def dense(names, V=128256, *, dtype="bf16", teacher="bf16", n=1, capped=False):
    shape = tiles.row_shape(beside.DENSE, V)
    flags = {f"WANT_{k}": (k in names,) * n for k in "XQYFG"}
    every = len(names) > 3
    return Taught(
        dense_sums_kernel, dtype, teacher, shape.warps, temperatures=n,
        TOTAL=every, ARGMAX=every, ARGMAXT=every, MET=(True,) * n, **flags,
        PER_ROW=(False,) * n, TEACHER_PER_ROW=(False,) * n, SCALED=capped, CAPPED=capped,
        TEACHER_SCALED=capped, TEACHER_CAPPED=capped, LINE=8 * WIDE[dtype], VEC=WIDE[dtype], TEACHER_VEC=WIDE[teacher],
        K=shape.loads, L=shape.lanes, J=min(WIDE[dtype], WIDE[teacher]), CHAINED=tiles.CHAINS,
    )  # fmt: skip


def dense_merge():
    flags = {f"WANT_{k}": (True, True) for k in "XQYFG"}
    return Taught(
        dense_merge_kernel, "bf16", "bf16", 1, temperatures=2, TARGET=True, TOTAL=True, ARGMAX=True, ARGMAXT=True,
        MET=(True, True), **flags, PER_ROW=(False,) * 2, TEACHER_PER_ROW=(False,) * 2, SCALED=True, CAPPED=True,
        PADDED=8, ROWS=4, CHAINED=tiles.CHAINS,
    )  # fmt: skip


def second_look(*elements):
    shape = tiles.row_shape(beside.LOOK, 128256)
    element, numbers = printed(tuple((0, e) for e in elements), 1)
    return Taught(
        look_kernel, "bf16", "bf16", shape.warps, numbers=len(numbers), ELEMENT=element, SUMS=2 * len(elements),
        PER_ROW=False, TEACHER_PER_ROW=False, **PLAIN, **TEACHERS_PLAIN, LINE=64, VEC=8, TEACHER_VEC=8,
        K=shape.loads, L=shape.lanes, J=8,
    )  # fmt: skip


def guided(names="", own="", *, element=None, dtype="bf16"):
    shape = tiles.row_shape(pulls.LOOKING if element else pulls.GUIDED, 128256)
    function, numbers = printed(((0, element),), 1) if element else (None, (0.0,))
    return Taught(
        guided_kernel, dtype, dtype, shape.warps, out=dtype, numbers=len(numbers),
        **{k: (k in own,) for k in "ABECY"}, TARGET="Y" in own, TEACHER=True, ELEMENT=function,
        **{f"T{k}": (k in names,) for k in "ABCD"}, LOOKS=(0,) if element else (),
        PER_ROW=(False,), MET_PER_ROW=(False,), TEACHER_PER_ROW=(False,), **PLAIN, **TEACHERS_PLAIN,
        WIDTH=shape.width, LINE=8 * WIDE[dtype], VEC=WIDE[dtype], RAW_VEC=WIDE[dtype], TEACHER_VEC=WIDE[dtype],
        BLOCK=shape.lanes * shape.loads * WIDE[dtype], ADD=False,
    )  # fmt: skip


def tail():
    shape = tiles.row_shape(backend.SUMS, 128256)
    return Taught(
        tail_kernel, "bf16", "bf16", shape.warps, temperatures=2, PER_ROW=(False,) * 2, **PLAIN, LINE=64, VEC=8,
        K=shape.loads, L=shape.lanes, J=8, IDS=64, OFF=(False,) * 2,
    )  # fmt: skip


JSD = Element(jsd, {"beta": 0.5})
TAUGHT = {
    "sums of a forward comparison": lambda: dense("YF"),
    "sums of a reverse comparison": lambda: dense("XG"),
    "sums, float32": lambda: dense("YF", dtype="fp32", teacher="fp32"),
    "sums, float32 beside bfloat16": lambda: dense("YF", teacher="fp32"),
    "sums of everything at two temperatures": lambda: dense("XQYFG", n=2, capped=True),
    "merge": dense_merge,
    "look": lambda: second_look(JSD),
    "look at two": lambda: second_look(JSD, Element(tvd, {})),
    "pull of a forward comparison": lambda: guided("AD"),
    "pull of a reverse comparison": lambda: guided("ABC"),
    "pull, float32": lambda: guided("AD", dtype="fp32"),
    "pull of a look": lambda: guided(element=JSD),
    "pull of everything": lambda: guided("ABCD", "ABECY", element=JSD),
    "tail": tail,
    "ids, each once": lambda: Taught(merge_ids_kernel, "bf16", "bf16", 1, VALID=True, IDS=64),
    "values at ids": lambda: Taught(gather_kernel, "bf16", "bf16", 4, IDS=64),
    "stores at ids": lambda: Taught(store_kernel, "bf16", "bf16", 4, out="bf16", IDS=64),
}


@pytest.mark.parametrize("name", TAUGHT)
def test_teachers_kernels_compile_without_spills(name, tmp_path):
    built = TAUGHT[name]()
    usage = re.search(r"REG:(\d+) STACK:(\d+)", built.dump("--dump-resource-usage", tmp_path))
    assert usage is not None and int(usage[2]) <= 16, usage  # a number or two may be put aside before the loops
    code = built.dump("-sass", tmp_path)
    assert not any(re.search(r"LDL|STL", loop) for loop in loops(code)), "spills inside the loop"
    if name.startswith("sums of a") or name == "look":
        assert len(re.findall(r"LDG\.E\.EF\.128", code)) >= 4, "both rows are read 16 bytes at a time"
        for loop in loops(code):
            assert not re.search(r"BAR\.SYNC|SHFL", loop), "lanes wait for each other inside the loop"


# ---------------------------------------------------------------- one launch

visits = import_module("headloss.backends.triton.visit")
launches = import_module("headloss.backends.triton.launch")
from headloss import Term  # noqa: E402
from headloss.backends.triton.printer.program import lower  # noqa: E402
from headloss.facts import Want  # noqa: E402
from headloss.losses import cross_entropy, entropy_bonus, focal, grpo, z_loss  # noqa: E402
from headloss.metrics import read_metrics  # noqa: E402
from headloss.trace.trace import Shape as Layout  # noqa: E402
from headloss.trace.trace import trace  # noqa: E402


def program_of(metrics, terms):

    calls = {name: term.call(None, {}) for name, term in terms.items()}
    own = list(read_metrics(metrics))
    layouts = {n: Layout("row", torch.float32, ()) for call in calls.values() for n in call.input_names}
    traces = {n: trace(call, layouts, torch.float32, "cpu", False) for n, call in calls.items()}
    facts = [f for n, call in calls.items() for f in call.facts if f not in traces[n].unused]
    want = Want([*facts, *(f for _, call in own for f in call.facts)])
    return lower({n: (calls[n], traces[n]) for n in calls}, want, layouts, own)


LETTERS = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.int64: "i64", torch.bool: "i1"}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def signature_of(x, path, aligned):
    """What Triton makes of an argument; where pointers are aligned goes to `aligned`."""
    if isinstance(x, tuple):
        items = [signature_of(y, (*path, i), aligned) for i, y in enumerate(x)]
        return type(x)(*items) if hasattr(x, "_fields") else tuple(items)
    if isinstance(x, torch.Tensor):
        aligned |= {path: [["tt.divisibility", 16]]} if x.data_ptr() % 16 == 0 else {}
        return f"*{LETTERS[x.dtype]}"
    return "fp32" if isinstance(x, float) else "i32"


class Visit(Built):
    """The one-launch kernel of a program, as a call with logits of this dtype and width would build it."""

    def __init__(self, program, dtype, V, *, aligned=True, capped=False, gradient=True, teachers=(), ids=0):
        empty = lambda *shape, kind=torch.float32: torch.empty(*shape, dtype=kind, device="meta")
        rows, kind = 300, DTYPES[dtype]
        raw = empty(rows, V if aligned else V + V % 2 + 1, kind=kind)[:, :V]
        long = {True: torch.int64, False: torch.float32}
        inputs = {n: empty(rows, ids, kind=long["ids" in n]) if " of " in n else empty(rows) for n in program.inputs}
        arguments = visits.Arguments(inputs, [empty(rows)] * len(program.terms), [1.0] * len(program.terms))
        seen = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(launches.Launch, "run", lambda launch, *call: seen.append((launch, call[-1])))
            visits.visit(
                raw, empty(rows, kind=torch.int64), program.want, [1.0] * len(program.want.temperatures), program,
                arguments, raw if gradient else None, teachers=teachers, scale=0.5 if capped else 1.0,
                softcap=30.0 if capped else None,
            )  # fmt: skip
        ((launch, given),) = seen
        names, places = launch.kernel.arg_names, {}
        signature = {n: signature_of(x, (i,), places) for i, (n, x) in enumerate(zip(names, given, strict=False))}
        constants = {n: launch.constants[n] for n in names[len(given) :]}
        options = {n: x for n, x in launch.constants.items() if n not in constants}
        source = ASTSource(launch.kernel, signature | dict.fromkeys(constants, "constexpr"), constants, places)
        self.cubin = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["cubin"]


def alone(dtype, V, metrics=(), *, aligned=True, capped=False, gradient=True, **terms):
    return Visit(program_of(list(metrics), terms), dtype, V, aligned=aligned, capped=capped, gradient=gradient)


CE = {"ce": Term(cross_entropy)}
MIX = {**CE, "z": Term(z_loss, weight=1e-4), "rl": Term(grpo)}
VISITS = {
    "32000": lambda: alone("bf16", 32000, **CE),
    "32000, a mix": lambda: alone("bf16", 32000, ("entropy", "accuracy"), **MIX),
    "50257": lambda: alone("bf16", 50257, aligned=False, **CE),
    "32000 float32": lambda: alone("fp32", 32000, **CE),
    "128256": lambda: alone("bf16", 128256, **CE),
    "128256, a mix": lambda: alone("bf16", 128256, ("entropy", "accuracy"), **MIX),
    "128256, a mix, no gradient": lambda: alone("bf16", 128256, ("entropy", "accuracy"), gradient=False, **MIX),
    "every kind of coefficient": lambda: alone(
        "fp16", 32000, ("accuracy",), capped=True, ce=Term(cross_entropy, label_smoothing=0.1),
        bonus=Term(entropy_bonus), it=Term(focal, gamma=1.5),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", VISITS)
def test_one_launch_compiles_for_hopper(name, tmp_path):
    built = VISITS[name]()
    usage = re.search(r"REG:(\d+) STACK:(\d+)", built.dump("--dump-resource-usage", tmp_path))
    assert usage is not None
    code = built.dump("-sass", tmp_path)
    found = [loop for loop in loops(code) if loop.count("MUFU.EX2") >= 16]
    assert len(found) >= 2 - name.endswith("no gradient"), "two sweeps"
    for loop in found:
        assert not re.search(r"BAR\.SYNC|SHFL", loop), "lanes wait for each other inside the loop"
        assert not re.search(r"LDL|STL", loop), "spills inside the loop"
        assert re.search(r"LDG\S*\.128", loop) and not re.search(r"LDG\S*\.U16", loop)
    assert int(usage[2]) == 0, usage


def test_every_printed_operation_compiles():
    """One graph with a good part of the table in it, forward and backward."""
    import torch.nn.functional as F
    from torch.fx.experimental.proxy_tensor import make_fx

    from headloss.backends.triton.printer.lower import pointwise

    def many(x, y, n):
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            silu = [F.silu(x)] if torch.__version__ >= "2.9" else []  # which allocated before
            parts = [
                x.exp(), x.expm1(), x.log1p(), x.log(), x.sqrt(), x**2.5, x.sigmoid(), x.tanh(), F.softplus(x),
                F.logsigmoid(x), *silu, F.gelu(x), F.elu(x), F.huber_loss(x, y, reduction="none"), x.sin(), x.erf(),
                F.smooth_l1_loss(x, y, reduction="none"), torch.logaddexp(x, y), torch.minimum(x, y), x.clamp(y, y + 1),
                torch.where(x > y, x, y), x.masked_fill(y > 0, 1e-40), x.round(), x.sign() * x, torch.xlogy(x, y),
                x * n, x * (n == 2), F.binary_cross_entropy_with_logits(x, y, reduction="none"), x.abs().rsqrt(),
                x.nan_to_num(), (x > y) ^ (n > 1), x.isfinite() & ~x.isnan(), F.relu6(x) + F.leaky_relu(x),
            ]  # fmt: skip
            value = sum(p.to(x.dtype) for p in parts)
            return value.detach(), *torch.autograd.grad([value], [x], [torch.ones_like(value)])

    import torch as t

    function = pointwise(make_fx(many, tracing_mode="symbolic")(t.rand(7), t.rand(7), t.arange(7)))
    source = ASTSource(
        printed_kernel, {"x": "*fp32", "y": "*fp32", "n": "*i64", "out": "*fp32", "FN": "constexpr"}, {"FN": function}
    )
    assert triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["cubin"]


@triton.jit
def printed_kernel(x, y, n, out, FN: triton.language.constexpr):
    i = triton.language.arange(0, 128)
    value, grad = FN(triton.language.load(x + i), triton.language.load(y + i), triton.language.load(n + i))
    triton.language.store(out + i, value + grad)


# ---------------------------------------------------------------- one launch beside a teacher

from headloss import Logits, Sparse  # noqa: E402
from headloss.engine.plan import _ids  # noqa: E402
from headloss.losses import forward_kl, reverse_kl  # noqa: E402
from headloss.teachers import DenseChunk, SparseChunk  # noqa: E402
from headloss.trace.signature import ONLY  # noqa: E402


def with_teacher(V=128256, metrics=(), *, ids=0, dtype="bf16", **terms):
    """The same beside a teacher, dense or of `ids` ids per row."""
    one = torch.zeros(1, V, device="meta")
    told = Sparse(torch.zeros(1, ids, dtype=torch.long), torch.zeros(1, ids)) if ids else Logits(one)
    calls = {name: term.call(None, {ONLY: told}) for name, term in terms.items()}
    layouts = {n: Layout("row", torch.float32, ()) for call in calls.values() for n in call.input_names}
    layouts |= _ids(Logits(one), {ONLY: told})
    own = list(read_metrics(list(metrics)))
    traces = {n: trace(call, layouts, torch.float32, "cpu", False) for n, call in calls.items()}
    facts = [f for n, call in calls.items() for f in call.facts if f not in traces[n].unused]
    want = Want([*facts, *(f for _, call in own for f in call.facts)])
    program = lower({n: (calls[n], traces[n]) for n in calls}, want, layouts, own)
    if ids:
        chunk = SparseChunk(torch.empty(300, ids, dtype=torch.long, device="meta"))
    else:
        raw = torch.empty(300, V, dtype=DTYPES[dtype], device="meta")
        chunk = DenseChunk(raw, 1.0, None, (1.0,) * len(want.temperatures_of(want.teachers[0])), V)
    return Visit(program, dtype, V, teachers=[chunk], ids=ids)


BESIDE = {
    "forward": lambda: with_teacher(kd=Term(forward_kl)),
    "reverse": lambda: with_teacher(kd=Term(reverse_kl)),
    "a second look": lambda: with_teacher(kd=Term(jsd)),
    "a second look at another temperature": lambda: with_teacher(
        V=40003, metrics=("entropy",), a=Term(forward_kl), b=Term(jsd, temperature=2.0), c=Term(reverse_kl), **CE
    ),
    "a mix": lambda: with_teacher(metrics=("entropy", "accuracy"), kd=Term(forward_kl), **CE),
    "float32": lambda: with_teacher(dtype="fp32", kd=Term(forward_kl)),
    "ids": lambda: with_teacher(ids=64, kd=Term(forward_kl)),
    "ids and a mix": lambda: with_teacher(metrics=("entropy", "accuracy"), ids=20, kd=Term(reverse_kl), **CE),
}


@pytest.mark.parametrize("name", BESIDE)
def test_one_launch_beside_a_teacher_compiles_for_hopper(name, tmp_path):
    built = BESIDE[name]()
    usage = re.search(r"REG:(\d+) STACK:(\d+)", built.dump("--dump-resource-usage", tmp_path))
    assert usage is not None and int(usage[2]) <= 32, usage  # a number or two may be put aside before the loops
    code = built.dump("-sass", tmp_path)
    assert len(re.findall(r"LDG\S*\.128", code)) >= 3, "rows are read 16 bytes at a time"
    found = [loop for loop in loops(code) if loop.count("MUFU.EX2") >= 4]
    assert len(found) >= 2 - name.endswith("no gradient"), "two sweeps"
    for loop in found:
        assert not re.search(r"LDL|STL", loop), "spills inside the loop"
