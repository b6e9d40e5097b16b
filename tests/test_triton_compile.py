"""Every kernel compiles for Hopper without a GPU: no spills, 128-bit loads, no barrier inside the loop."""

import re
import subprocess
from importlib import import_module
from pathlib import Path

import pytest

triton = pytest.importorskip("triton")
if triton.knobs.runtime.interpret:
    pytest.skip("the interpreter compiles nothing", allow_module_level=True)

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

backend = import_module("headloss.backends.triton")
from headloss.backends.kernels.pull import pull_kernel  # noqa: E402
from headloss.backends.kernels.sums import merge_kernel, sums_kernel  # noqa: E402

BIN = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
INTS = ("N", "V", "parts", "width", "stride", "lead", "out_stride", "out_lead", "target_stride", "start")
WIDE = {"bf16": 8, "fp16": 8, "fp32": 4}


class Built:
    def __init__(self, kernel, dtype, warps, temperatures=1, **constants):
        signature = dict.fromkeys(INTS, "i32") | {"scale": "fp32", "cap": "fp32"}
        signature |= {"raw": f"*{dtype}", "target": "*i64", "rows": "*fp32", "partial": "*fp32"}
        signature |= {"out": f"*{dtype}" if kernel is pull_kernel else "*fp32"}
        signature["temperatures"] = ("fp32",) * temperatures
        names = kernel.arg_names
        aligned = {
            (names.index(n),): [["tt.divisibility", 16]] for n in ("raw", "out", "rows", "partial") if n in names
        }
        source = ASTSource(kernel, {n: signature.get(n, "constexpr") for n in names}, constants, aligned)
        compiled = triton.compile(
            source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps, **backend.LAUNCH}
        )
        self.cubin = compiled.asm["cubin"]

    def dump(self, what, folder):
        path = folder / "kernel.cubin"
        path.write_bytes(self.cubin)
        return subprocess.run([BIN / "cuobjdump", what, path], capture_output=True, text=True, check=True).stdout


def sums(dtype, V, *, temperatures=1, every=False, capped=False, peel=True):
    shape = backend._row_shape(backend.SUMS, V)
    vector = WIDE[dtype] if peel else 1
    flags = (True,) * temperatures
    return Built(
        sums_kernel, dtype, shape.warps, temperatures,
        TARGET=True, TOTAL=every, ARGMAX=every, WANT_X=flags, WANT_Q=(every,) * temperatures,
        PER_ROW=(False,) * temperatures, SCALED=capped, CAPPED=capped, CHAINED=True,
        LINE=8 * vector if peel else 1, VEC=vector, K=shape.loads, L=shape.lanes, J=WIDE[dtype],
    )  # fmt: skip


def pull(dtype, V, *, temperatures=1, every=False, capped=False):
    shape = backend._row_shape(backend.PULL, V)
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
        SCALED=True, CAPPED=True, PADDED=8, ROWS=4, CHAINED=True,
    )  # fmt: skip


KERNELS = {
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
    assert usage is not None and (int(usage[2]) == 0 or "nothing known" in name), usage
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
