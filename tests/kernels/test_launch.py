"""Launches past Triton's dispatcher: arguments of equal kinds are arguments that Triton compiles one kernel for."""

import contextlib
import itertools
import types

import pytest
import torch

pytest.importorskip("triton")
from triton import knobs

import headloss.backends.triton.launch as launch_module
from headloss.backends.triton.launch import OPTIONS, Launch, append_kinds
from headloss.engine.heads import on_source_device


class Compiled:
    """What a fake kernel was compiled into: writes down how it is launched."""

    function, packed_metadata = "function", "metadata"

    def __init__(self, log):
        self.log = log

    def __getitem__(self, grid):
        return lambda *arguments: self.log.append(("compiled", grid, arguments))

    def run(self, *arguments):
        self.log.append(("run", arguments))


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
    assert log[0] == ("kernel", (3,), (first, 5, (0.5, None)), {**OPTIONS, "B": 2, "num_warps": 4, "A": 1})
    name, grid, arguments = log[1]
    assert name == "compiled" and grid == (7, 1, 1)
    assert arguments[0] is second and arguments[1:] == (6, (0.25, None), 1, 2)


def test_every_launch_says_whether_multiply_and_add_are_fused(log):
    """Triton warns where nothing is said, and its versions differ."""
    Launch(Kernel(log), {"A": 1, "B": 2})(4, torch.ones(2), 3, ())
    assert log[0][3]["enable_fp_fusion"] is True
    Launch(Kernel(log), {"A": 1, "B": 2, "enable_fp_fusion": False})(4, torch.ones(2), 3, ())
    assert log[1][3]["enable_fp_fusion"] is False


def test_on_a_device_a_later_launch_goes_past_the_runner_unless_somebody_watches(log, monkeypatch):
    if not hasattr(knobs, "HookChain"):
        pytest.skip("needs triton 3.5, which has chains of hooks")
    hooks = types.SimpleNamespace(launch_enter_hook=knobs.HookChain(), launch_exit_hook=knobs.HookChain(reversed=True))
    monkeypatch.setattr(launch_module, "knobs", types.SimpleNamespace(runtime=hooks))
    monkeypatch.setattr(launch_module, "current_stream", {0: 11, 1: 12}.__getitem__)
    entered = on_two_devices(monkeypatch)
    launch, arguments = Launch(Kernel(log), {"A": 1, "B": 2}), (torch.zeros(4), 5, ())
    for where in (0, 0, 1, 1):
        launch.run("key", where, 3, arguments)
    assert [entry[0] for entry in log] == ["kernel", "run", "kernel", "run"]
    assert entered == [1, "left", 1, "left"]  # the current device is 0
    handles, none = ("function", "metadata"), (None, None, None)
    assert log[1][1] == (3, 1, 1, 11, *handles, *none, *arguments, 1, 2)
    assert log[3][1] == (3, 1, 1, 12, *handles, *none, *arguments, 1, 2)
    for hook in (hooks.launch_enter_hook, hooks.launch_exit_hook):
        log.clear()
        hook.add(print)
        launch.run("key", 0, 3, arguments)
        hook.remove(print)
        launch.run("key", 0, 3, arguments)
        assert [entry[0] for entry in log] == ["compiled", "run"]
    hooks.launch_enter_hook = hooks.launch_exit_hook = None  # as it was before there were chains
    launch.run("key", 0, 3, arguments)
    assert log[-1][0] == "run"


def on_two_devices(monkeypatch):
    """Notes which becomes the current one; that is number 0."""
    entered, current = [], [0]

    @contextlib.contextmanager
    def device(x):
        current.append(x if isinstance(x, int) else x.index)
        entered.append(current[-1])
        yield
        current.pop()
        entered.append("left")

    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: current[-1], raising=False)
    monkeypatch.setattr(torch.cuda, "device", device)
    return entered


def test_a_kernel_runs_on_the_device_of_its_tensors(log, monkeypatch):
    """Targets are counted and ids are merged before a sweep begins, which makes its device the current one."""
    entered = on_two_devices(monkeypatch)
    for i, where in enumerate((-1, 0, 1)):
        monkeypatch.setattr(launch_module, "place", lambda x, where=where: where)
        launch = Launch(Kernel(log), {"A": 1, "B": 2})
        launch(1, torch.zeros(4), 5, ())
        assert len(log) == i + 1 and [*launch.compiled] == [(next(iter(launch.compiled))[0], where)]
    assert entered == [1, "left"]


def test_a_sweep_makes_its_device_the_current_one(monkeypatch):
    """Triton launches on the current device, wherever the tensors are."""
    entered = on_two_devices(monkeypatch)
    home = on_source_device(lambda sweep, x: entered.append(x))
    for device in ("cpu", "cuda:0", "cuda:1"):
        home(types.SimpleNamespace(source=types.SimpleNamespace(device=torch.device(device))), device)
    assert entered == ["cpu", "cuda:0", 1, "cuda:1", "left"]


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
    assert [entry[0] for entry in log] == ["kernel", "kernel"] and not launch.compiled


def test_equal_kinds_are_one_kernel_for_triton():
    """Against Triton's own reading of arguments, for Hopper."""
    triton = pytest.importorskip("triton")
    jit = pytest.importorskip("triton.runtime.jit")
    if triton.knobs.runtime.interpret or not hasattr(jit, "create_function_from_signature"):
        pytest.skip("the interpreter compiles nothing")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import make_backend

    from headloss.backends.triton.kernels.scale import scale_kernel
    from headloss.backends.triton.kernels.totals import totals_kernel

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
            append_kinds(arguments, key := [])
            ours = tuple(key)
            theirs = str(bind(*arguments, **constants)[1])
            assert seen.setdefault(ours, theirs) == theirs, (ours, arguments)
        assert len(set(seen.values())) > 30  # or nothing was told apart


def test_equal_forms_of_a_visit_are_one_kernel_for_triton(monkeypatch):
    """A visit has a key of its own, which must tell apart what Triton tells apart."""
    triton = pytest.importorskip("triton")
    jit = pytest.importorskip("triton.runtime.jit")
    if triton.knobs.runtime.interpret or not hasattr(jit, "create_function_from_signature"):
        pytest.skip("the interpreter compiles nothing")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import make_backend

    from headloss.backends.triton import visit as triton_visit
    from headloss.backends.triton.kernels.visit import visit_kernel

    calls = []
    monkeypatch.setattr(
        Launch, "run", lambda launch, key, where, programs, arguments: calls.append((launch, arguments))
    )
    printed = program()
    made = lambda base, *inputs: triton_visit.Arguments(dict(zip(printed.inputs, inputs, strict=True)), (base,), (1.0,))
    whole = torch.zeros(1 << 14, dtype=torch.float32)
    logits = [
        whole[i : i + 3 * s].view(3, s)[:, :v] for i, s, v in ((0, 64, 64), (0, 65, 64), (4, 64, 64), (1, 68, 64))
    ]
    logits += [x.to(torch.bfloat16) for x in logits] + [torch.zeros(3, 1), torch.zeros(3, 16)]
    targets = [torch.zeros(6, dtype=d)[k::2] for d in (torch.int64, torch.int32) for k in (0, 1)]
    rows = [torch.zeros(8, dtype=d)[k : k + 3] for d in (torch.float32, torch.bfloat16, torch.int64) for k in (0, 1)]
    numbers = [0.5, torch.zeros(()), torch.zeros(2, dtype=torch.float64)[1]]
    for x, y, row, base in itertools.product(logits, targets, rows, numbers):
        ignore = row.dtype == torch.int64
        for out in (None, x, torch.empty_like(x)):
            triton_visit.visit(x, y, printed.want, (1.0,), printed, made(base, row, rows[0]), out, ignore=ignore)
    T = (torch.ones(3),)
    triton_visit.visit(logits[0], targets[0], printed.want, T, printed, made(1.0, rows[0], rows[0]), None, softcap=3.0)
    bind = jit.create_function_from_signature(
        visit_kernel.signature, visit_kernel.params, make_backend(GPUTarget("cuda", 90, 32))
    )
    seen = {}
    for launch, arguments in calls:
        constants = dict.fromkeys(visit_kernel.arg_names[len(arguments) :], 8)
        theirs = str(bind(*arguments, **constants)[1])
        assert seen.setdefault(launch, theirs) == theirs, arguments
    assert len(set(seen.values())) > 30  # or nothing was told apart


def program():
    """Some terms with two inputs, printed."""
    import headloss as hl
    from headloss.engine.arguments import CallArguments
    from headloss.engine.lookup import find
    from headloss.losses import grpo

    objective = hl.Objective(rl=grpo, backend="triton")
    meta = lambda *shape, dtype=torch.float32: torch.empty(*shape, dtype=dtype, device="meta")
    inputs = {"advantage": meta(3), "old_logprob": meta(3)}
    made = find(objective, CallArguments(hl.Logits(meta(3, 64)), meta(3, dtype=torch.long), inputs=inputs)).plan
    assert made.program is not None and len(made.program.inputs) == 2
    return made.program


COUNTED = {"numbers": "*i64", "mean": "*fp64", "valid": "*i1"}
HOPPER = {
    "totals, one term": lambda v: (v._totals(3, (-1,)), {"weights": ("fp32",)}),
    "totals, five terms": lambda v: (v._totals(3, ((0, torch.float32, True),) * 5), {"weights": ("*fp32",) * 5}),
    "targets": lambda v: (v._COUNT, COUNTED),
    "targets and segments": lambda v: (v._COUNT_BOTH, {**COUNTED, "ids": "*i64", "live_ids": "*i64"}),
}


@pytest.mark.parametrize("name", HOPPER)
def test_small_kernels_compile_for_hopper(name):
    triton = pytest.importorskip("triton")
    if triton.knobs.runtime.interpret:
        pytest.skip("the interpreter compiles nothing")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from headloss.backends.triton import totals

    launch, given = HOPPER[name](totals)
    given = given | {"found": "*fp32", "sums": "*fp32", "loss": "*fp32", "target": "*i64", "N": "i32"}
    signature = {n: given.get(n, "constexpr") for n in launch.kernel.arg_names}
    constants = {n: launch.constants.get(n) for n, said in signature.items() if said == "constexpr"}
    options = {n: x for n, x in launch.constants.items() if n not in signature}
    source = ASTSource(launch.kernel, signature, constants, {(0,): [["tt.divisibility", 16]]})
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    assert ".local" not in compiled.asm["ptx"] and compiled.metadata.shared <= 16384
