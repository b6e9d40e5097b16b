"""Launches past Triton's dispatcher: arguments of equal kinds are arguments that Triton compiles one kernel for."""

import itertools

import pytest
import torch

pytest.importorskip("triton")
import headloss.backends.triton_launch as launch_module
from headloss.backends.triton_launch import Launch, look


class Compiled:
    """What a fake kernel was compiled into: writes down how it is launched."""

    def __init__(self, log):
        self.log = log

    def __getitem__(self, grid):
        return lambda *arguments: self.log.append(("compiled", grid, arguments))


class Kernel:
    arg_names = ("x", "n", "given", "A", "B")

    def __init__(self, log):
        self.log = log

    def __getitem__(self, grid):
        def run(*arguments, **constants):
            self.log.append(("kernel", grid, arguments, constants))
            return Compiled(self.log)

        return run


@pytest.fixture
def log(monkeypatch):
    monkeypatch.setattr(launch_module, "CompiledKernel", Compiled)
    return []


def test_a_later_launch_takes_what_was_compiled_with_every_argument_of_its_own(log):
    launch = Launch(Kernel(log), {"B": 2, "num_warps": 4, "A": 1})
    first, second = torch.zeros(4), torch.zeros(8)
    launch(3, first, 5, (0.5, None))
    launch(7, second, 6, (0.25, None))
    assert log[0] == ("kernel", (3,), (first, 5, (0.5, None)), {"B": 2, "num_warps": 4, "A": 1})
    name, grid, arguments = log[1]
    assert name == "compiled" and grid == (7, 1, 1)
    assert arguments[0] is second and arguments[1:] == (6, (0.25, None), 1, 2)


@pytest.mark.parametrize(
    "other",
    [
        lambda x: (x.double(), 5, (0.5,)),
        lambda x: (x[1:], 5, (0.5,)),
        lambda x: (x, 1, (0.5,)),
        lambda x: (x, 16, (0.5,)),
        lambda x: (x, 1 << 31, (0.5,)),
        lambda x: (x, 5, (None,)),
        lambda x: (x, 5, (torch.zeros(()),)),
        lambda x: (x, 5, (0.5, 0.5)),
        lambda x: (x, 5, ((0.5,),)),
    ],
    ids=["dtype", "alignment", "one", "sixteen", "long", "none", "tensor", "longer", "nested"],
)
def test_one_thing_that_differs_is_looked_at_by_triton(log, other):
    launch = Launch(Kernel(log), {"A": 1, "B": 2})
    x = torch.zeros(8)
    launch(1, x, 5, (0.5,))
    launch(1, *other(x))
    launch(1, x, 5, (0.5,))
    assert [entry[0] for entry in log] == ["kernel", "kernel", "compiled"]


def test_what_compiles_nothing_is_called_each_time():
    log = []
    launch = Launch(Kernel(log), {"A": 1, "B": 2})
    for _ in range(2):
        launch(1, torch.zeros(4), 5, ())
    assert [entry[0] for entry in log] == ["kernel", "kernel"] and not launch.known


def test_equal_kinds_are_one_kernel_for_triton():
    """Against Triton's own reading of arguments, for Hopper."""
    triton = pytest.importorskip("triton")
    jit = pytest.importorskip("triton.runtime.jit")
    if triton.knobs.runtime.interpret or not hasattr(jit, "create_function_from_signature"):
        pytest.skip("the interpreter compiles nothing")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import make_backend

    from headloss.backends.kernels.scale import scale_kernel
    from headloss.backends.kernels.totals import totals_kernel

    backend = make_backend(GPUTarget("cuda", 90, 32))
    tensors = [torch.zeros(40, dtype=d) for d in (torch.float32, torch.bfloat16, torch.int64, torch.bool)]
    tensors += [x[k:] for x in tensors for k in (1, 4, 16)]
    numbers = [0, 1, 2, 15, 16, 17, 32, (1 << 31) - 1, 1 << 31, 1 << 32, (1 << 32) + 1]
    tuples = [(), (1.0,), (0.0,), (-2.5, 1.0), *((x,) for x in tensors), *((1.0, x) for x in tensors[:4])]
    for kernel, sets in (
        (scale_kernel, [tensors, tensors[:3], numbers]),
        (totals_kernel, [tensors[:6], tensors[:1], tensors[:1], tuples, numbers]),
    ):
        bind = jit.create_function_from_signature(kernel.signature, kernel.params, backend)
        constants = dict.fromkeys(kernel.arg_names[len(sets) :], 8)
        seen = {}
        for arguments in itertools.product(*sets):
            look(arguments, key := [])
            ours = tuple(key)
            theirs = str(bind(*arguments, **constants)[1])
            assert seen.setdefault(ours, theirs) == theirs, (ours, arguments)
        assert len(set(seen.values())) > 30  # or nothing was told apart


HOPPER = {
    "totals, one term": lambda v: (v._totals(3, (-1,)), {"weights": ("fp32",)}),
    "totals, five terms": lambda v: (v._totals(3, (0,) * 5), {"weights": ("*fp32",) * 5}),
    "targets, for the host": lambda v: (v._READ, {"numbers": "*i64"}),
    "targets, for the device": lambda v: (v._COUNT, {"mean": "*fp64", "fine": "*i1"}),
}


@pytest.mark.parametrize("name", HOPPER)
def test_small_kernels_compile_for_hopper(name):
    triton = pytest.importorskip("triton")
    if triton.knobs.runtime.interpret:
        pytest.skip("the interpreter compiles nothing")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from headloss.backends import triton_visit

    launch, given = HOPPER[name](triton_visit)
    given |= {"found": "*fp32", "sums": "*fp32", "loss": "*fp32", "target": "*i64", "N": "i32", "V": "i32"}
    signature = {n: given.get(n, "constexpr") for n in launch.kernel.arg_names}
    constants = {n: launch.constants.get(n) for n, said in signature.items() if said == "constexpr"}
    options = {n: x for n, x in launch.constants.items() if n not in signature}
    source = ASTSource(launch.kernel, signature, constants, {(0,): [["tt.divisibility", 16]]})
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    assert ".local" not in compiled.asm["ptx"] and compiled.metadata.shared <= 4096
