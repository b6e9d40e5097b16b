"""Distillation from a dense teacher against the speed of memory: `python benchmarks/gpu_teachers.py [--configs]`, CUDA.

First every divergence and every kind of teacher is held against float64 next to eager in the same dtype; no time is
reported when the numbers are wrong.  Then, for forward KL, reverse KL and JSD at 4096 x 128256 in bfloat16:

    facts         the sums (and the second read)      against one read of both matrices
    pull          the gradient                        against one read of both and one write
    whole call    loss and gradient, in one launch    against one read of both and one write, next to two launches, the
                                                      torch backend, torch.compile of the plain formula, and Liger's
                                                      kernels where installed; with 64 ids per row instead of a dense
                                                      teacher, against one read and one write of the student's matrix;
                                                      with two dense teachers, against one read of all three and one
                                                      write; with one of fewer columns

`--configs` times a few block shapes for each kernel instead.  The results go to
benchmarks/results, or to the folder $OUT.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import math
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import triton

import headloss as hl
from headloss.engine import plan as planning
from headloss.losses import forward_kl, jsd, reverse_kl, skew_kl, soft_cross_entropy, tvd

sys.path.insert(0, str(Path(__file__).parent))
from gpu_kernels import DEVICE, error, read_only, save, say, timed

teachers: Any = import_module("headloss.backends.triton.teachers")
Shape = teachers.Shape
DIVERGENCES: list[tuple[Any, dict[str, float]]] = [
    (forward_kl, {}), (reverse_kl, {}), (soft_cross_entropy, {}), (jsd, {"beta": 0.5}), (jsd, {"beta": 0.1}),
    (skew_kl, {"alpha": 0.1}), (tvd, {}),
]  # fmt: skip
FLOOR = -1e4


@contextlib.contextmanager
def launches(how: str) -> Iterator[None]:
    """A new objective inside takes "two" launches whatever it could do."""
    printed = planning._print_terms
    if how == "two":
        planning._print_terms = lambda *_: (None, "two are measured")
    try:
        yield
    finally:
        planning._print_terms = printed


# ---------------------------------------------------------------- right?


def draw(n: int, v: int, dtype: torch.dtype, spread: float = 3.0) -> torch.Tensor:
    return (spread * torch.randn(n, v, device=DEVICE)).to(dtype)


def plain(fn: Any, options: dict[str, Any], x: torch.Tensor, u: torch.Tensor, T: float = 1.0) -> torch.Tensor:
    """The divergence of every row by its definition, over the columns that both have."""
    U = min(x.shape[-1], u.shape[-1])
    wide = lambda z: z[:, :U] if z.dtype == torch.float64 else z[:, :U].float()
    logp, logq = ((wide(z) / T).log_softmax(-1).clamp(min=FLOOR) for z in (x, u))
    return fn(logp, logq, **options).sum(-1)


def plain_sparse(
    fn: Any, options: dict[str, Any], x: torch.Tensor, ids: torch.Tensor, logprobs: torch.Tensor, tail: str
) -> torch.Tensor:
    z = x if x.dtype == torch.float64 else x.float()
    logq = logprobs.to(z.dtype)
    if tail == "renormalise":
        return fn(z.gather(-1, ids).log_softmax(-1), logq.log_softmax(-1), **options).sum(-1)
    logp = z.log_softmax(-1)
    value = fn(logp.gather(-1, ids), logq, **options).sum(-1)
    if tail == "bucket":
        rest = logp.scatter(-1, ids, -math.inf).logsumexp(-1)
        value = value + fn(rest, torch.log1p(-logq.exp().sum(-1)), **options)
    return value


def compared(
    name: str, run: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, make: Callable[[], Any], teacher: Any
) -> Iterator[str]:
    """Loss and gradient in one launch and in two, against float64: at most twice eager's error in the same dtype."""
    found = []
    for dtype in (torch.float64, x.dtype):
        leaf = x.detach().clone().to(dtype).requires_grad_()
        run(leaf).sum().backward()
        with torch.no_grad():
            found.append((run(leaf).double(), leaf.grad))
    for how in ("one", "two"):
        with launches(how):
            objective = make()
            ours, again = (_loss_and_gradient(objective, x, teacher) for _ in range(2))
        for what, mine, truth, eager in zip(("loss", "gradient"), ours, *found, strict=True):
            if what == "loss":
                truth, eager = truth.sum(), eager.sum()
            scale = float(truth.abs().max()) if what == "gradient" else 1.0
            a, b = error(mine / scale, truth / scale), error(eager / scale, truth / scale)
            if not a <= 2 * b + 4e-6 or not torch.equal(mine.isfinite(), truth.isfinite()):
                yield f"{name}, {how} {what}: {a:.2e}, eager {b:.2e}"
        if not all(torch.equal(a, b) for a, b in zip(ours, again, strict=True)):
            yield f"{name}, {how}: not the same bits twice"


def _loss_and_gradient(objective: Any, x: torch.Tensor, teacher: Any) -> tuple[torch.Tensor, torch.Tensor]:
    leaf = (x.detach().clone() if x.is_contiguous() else x.detach()).requires_grad_()
    out = objective(hl.Logits(leaf), teacher=teacher)
    return out.terms["kd"], torch.autograd.grad(out.loss, leaf)[0]


def check(few: bool = False) -> list[str]:
    wrong: list[str] = []
    torch.manual_seed(0)
    dtypes = (torch.bfloat16, torch.float32) if few else (torch.bfloat16, torch.float16, torch.float32)
    term = lambda fn, options, **more: (
        lambda: hl.Objective(kd=hl.Term(fn, reduction="token_sum", **options, **more), backend="triton")
    )
    for dtype in dtypes:
        sizes = ((9, 5003), (9, 32768)) if few else ((9, 128256), (17, 50257), (5, 1003))
        for n, v in sizes:
            x, u = draw(n, v, dtype), draw(n, v, dtype)
            K = min(64, v // 2)
            logq = u.double().log_softmax(-1)
            ids = logq.topk(K).indices[:, torch.randperm(K, device=DEVICE)]
            logprobs = logq.gather(-1, ids).float()
            for fn, options in DIVERGENCES:
                name = f"{fn.__name__}{options or ''} {dtype} {n}x{v}"
                run = lambda z, fn=fn, o=options, u=u: plain(fn, o, z, u.to(z.dtype))
                wrong += compared(name, run, x, term(fn, options), hl.Logits(u))
                for tail in ("bucket", "none", "renormalise"):
                    run = lambda z, fn=fn, o=options, i=ids, q=logprobs, t=tail: plain_sparse(fn, o, z, i, q, t)
                    teacher = hl.Sparse(ids, logprobs)
                    wrong += compared(f"{name} {tail}", run, x, term(fn, options, tail=tail), teacher)
        wide, other = draw(9, 4000, dtype), draw(9, 4100, dtype)
        for fn, options in DIVERGENCES:  # other widths, offsets, temperature, and a teacher of another dtype
            kind = torch.float32 if dtype != torch.float32 else torch.bfloat16
            x, u = wide[:, 3:3001], other[:, 5:2905].to(kind)
            run = lambda z, fn=fn, o=options, u=u: plain(
                fn, o, z, u.to(z.dtype) if z.dtype == torch.float64 else u, 2.0
            )
            name = f"{fn.__name__}{options or ''} {dtype} beside {kind}, 2998 and 2900 columns"
            wrong += compared(name, run, x, term(fn, options, temperature=2.0), hl.Logits(u))
        wrong += check_mix(dtype)
    return wrong


def check_mix(dtype: torch.dtype) -> list[str]:
    """Everything at once, against the torch backend in float64."""
    n, v, K = 13, 32003, 20
    x, u, w = draw(n, v, dtype), draw(n, v, dtype), draw(n, v - 70, dtype)
    u[:, ::7] = -math.inf
    ids = torch.randint(0, v, (n, K), device=DEVICE)
    ids[:, 3] = -1
    ids[:, 5] = ids[:, 6]
    named = {
        "a": hl.Logits(u, softcap=20.0), "b": hl.Logits(w, temperature=torch.rand(n, device=DEVICE) + 0.5),
        "c": hl.Sparse(ids, torch.randn(n, K, device=DEVICE).log_softmax(-1) - 0.2),
    }  # fmt: skip
    targets = torch.randint(0, v, (n,), device=DEVICE)
    targets[:2] = ids[:2, 0]
    targets[4] = -100
    dense = {
        "ce": hl.losses.cross_entropy, "z": hl.Term(hl.losses.z_loss, weight=0.01),
        "f": hl.Term(forward_kl, teacher="a", temperature=2.0), "j": hl.Term(jsd, teacher="b"),
        "s": hl.Term(tvd, teacher="b"),
    }  # fmt: skip
    sparse = {
        "t": hl.Term(forward_kl, teacher="c"), "r": hl.Term(reverse_kl, teacher="c", tail="none", temperature=0.8)
    }  # fmt: skip
    wrong = []
    for what, terms in (("mix", {**dense, **sparse}), ("dense teachers", dense)):
        teacher, found = {t: named[t] for t in ("abc" if terms is not dense else "ab")}, {}
        for backend in ("torch", "triton"):
            objective = hl.Objective(**terms, metrics=["entropy", "accuracy"], backend=backend)
            leaf = x.detach().clone().to(torch.float64 if backend == "torch" else dtype).requires_grad_()
            out = objective(hl.Logits(leaf, softcap=15.0, scale=0.9), targets, teacher=teacher)
            out.loss.backward()
            found[backend] = (out.loss.detach(), leaf.grad)
        scale = float(found["torch"][1].abs().max())
        loss, grad = error(found["triton"][0], found["torch"][0]), error(*(found[b][1] / scale for b in found))
        close = 2e-5 if dtype == torch.float32 else 6e-3
        wrong += [f"{what} {dtype}: loss {loss:.2e}, gradient {grad:.2e}"] if loss > 2e-5 or grad > close else []
    return wrong


# ---------------------------------------------------------------- fast?


class Problem:
    def __init__(self, N: int = 4096, V: int = 128256, dtype: torch.dtype = torch.bfloat16) -> None:
        self.shape = f"{N}x{V}"
        self.x, self.u = (torch.empty(N, V, dtype=dtype, device=DEVICE).normal_(std=3.0) for _ in range(2))
        self.out = torch.empty_like(self.x)

    def facts_floor(self) -> float:
        return sum(min(timed(read_only(z)), timed(read_only(z, width=8192))) for z in (self.x, self.u))

    def pull_floor(self) -> float:
        return timed(lambda: torch.add(self.x, self.u, out=self.out))


def parts_of(problem: Problem, fn: Any, **options: Any) -> dict[str, Callable[..., Any]]:
    """The launches of one divergence, each to be run by itself."""
    from headloss.divergence import Element
    from headloss.facts import Fact, Want, coefficients, finish
    from headloss.teachers import DenseChunk, teacher_coefficients

    names = {
        forward_kl: ("teacher_cross_entropy", "teacher_entropy"),
        reverse_kl: ("reverse_cross_entropy", "shared_entropy"),
    }
    facts_of = [Fact(name, None, "t") for name in names.get(fn, ())]
    want = Want(facts_of or [Fact("divergence", None, "t", Element(fn, options))])
    V = problem.x.shape[1]
    chunk = [DenseChunk(problem.u, 1.0, None, (1.0,), V)]
    engine: Any = import_module("headloss.backends.triton.backend")
    sums = lambda **more: engine.sums(problem.x, None, want, [1.0], teachers=chunk, **more)
    facts, softmax = finish(sums(), want, [1.0], V)
    look = lambda **more: engine.divergence_pass(problem.x, want, softmax, chunk, [[1.0]], **more)
    found = {"sums": sums}
    if any(f.element is not None for f in want.facts):
        ((value, slopes),) = look()
        facts |= {want.facts[0]: value}
        softmax = softmax._replace(teachers=(softmax.teachers[0]._replace(slopes=(slopes,)),))
        found["divergence_pass"] = look
    ones = {f: torch.rand(len(problem.x), device=DEVICE) for f in want.facts if f.name != "teacher_entropy"}
    own = [teacher_coefficients(softmax.teachers[0], want.temperatures_of(want.teachers[0]), want.facts, facts, ones)]
    more = {"teachers": chunk, "teacher_pulls": own, "teacher_temperatures": [[1.0]]}
    mine = coefficients(facts, ones, want, V)
    found["pull"] = lambda **m: engine.pull(problem.x, None, softmax, mine, [1.0], problem.out, **more, **m)
    return found


LAUNCHES = {"one": "one launch", "two": "two launches"}
TIMED: list[tuple[Any, dict[str, float]]] = [(forward_kl, {}), (reverse_kl, {}), (jsd, {"beta": 0.5})]


def table() -> list[dict[str, Any]]:
    lines: list[dict[str, Any]] = []
    p = Problem()
    facts_floor, pull_floor = p.facts_floor(), p.pull_floor()

    def line(what: str, ms: float, floor: float, **more: Any) -> None:
        lines.append({"what": what, "shape": p.shape, "ms": ms, "floor_ms": floor, "ratio": floor / ms, **more})
        say(f"{what:44s} {ms:8.3f} ms  floor {floor:7.3f} ms  {floor / ms:6.1%}")

    for fn, options in TIMED:
        found = parts_of(p, fn, **options)
        for part, run in found.items():
            line(f"{fn.__name__}, {part} by itself", timed(run), pull_floor if part == "pull" else facts_floor)
    ids_floor = timed(lambda: p.x.mul_(1.0))
    named = [z.float().log_softmax(-1).topk(64) for z in p.u.split(256)]
    sparse = hl.Sparse(torch.cat([x.indices for x in named]), torch.cat([x.values for x in named]) - 0.01)
    for fn, options in TIMED:
        objective = lambda backend="triton", fn=fn, o=options: hl.Objective(kd=hl.Term(fn, **o), backend=backend)
        for how in ("one", "two"):
            with launches(how):
                line(f"{fn.__name__}, {LAUNCHES[how]}", _whole(p, objective(), hl.Logits(p.u)), pull_floor)
                line(f"{fn.__name__}, 64 ids, {LAUNCHES[how]}", _whole(p, objective(), sparse), ids_floor)
        line(f"{fn.__name__}, torch backend", _whole(p, objective("torch"), hl.Logits(p.u)), pull_floor)
        compiled = torch.compile(lambda x, u, fn=fn, o=options: plain(fn, o, x, u).mean())
        line(f"{fn.__name__}, torch.compile", _whole(p, compiled), pull_floor)
        peer = liger(fn, options)
        if peer is not None:
            line(f"{fn.__name__}, Liger after log_softmax", _whole(p, peer), pull_floor)
    other = torch.empty_like(p.u).normal_(std=3.0)
    both_floor = timed(lambda: torch.addcmul(p.x, p.u, other, out=p.out))
    both = {"a": hl.Logits(p.u), "b": hl.Logits(other)}
    for fn, options in ((reverse_kl, {}), (jsd, {"beta": 0.5})):
        terms = {"a": hl.Term(forward_kl, teacher="a"), "b": hl.Term(fn, teacher="b", **options)}
        what = f"forward_kl to one teacher, {fn.__name__} to another"
        line(f"{what}, whole call", _whole(p, hl.Objective(**terms, backend="triton"), both), both_floor)
        plainly = lambda x, u, fn=fn, o=options: plain(forward_kl, {}, x, u).mean() + plain(fn, o, x, other).mean()
        line(f"{what}, torch.compile", _whole(p, torch.compile(plainly)), both_floor)
    fewer = hl.Logits(p.u[:, :-64])
    line("forward_kl, 64 columns fewer", _whole(p, hl.Objective(kd=forward_kl, backend="triton"), fewer), pull_floor)
    return lines


def _whole(p: Problem, call: Any, teacher: Any = None) -> float:
    leaf = p.x.detach().requires_grad_()

    def run() -> None:
        leaf.grad = None
        out = call(hl.Logits(leaf), teacher=teacher) if isinstance(call, hl.Objective) else call(leaf, p.u)
        (out.loss if isinstance(call, hl.Objective) else out).backward()

    return timed(run, repeats=7)


def liger(fn: Any, options: dict[str, float]) -> Any:
    if find_spec("liger_kernel") is None:
        return None
    from liger_kernel.ops.jsd import LigerJSDFunction  # type: ignore
    from liger_kernel.ops.kl_div import LigerKLDivLossFunction  # type: ignore

    logs = lambda x, u: (x.float().log_softmax(-1), u.float().log_softmax(-1))
    if fn is jsd:
        return lambda x, u: LigerJSDFunction.apply(*logs(x, u), None, options["beta"], -100, None, None)
    if fn is forward_kl:
        return lambda x, u: LigerKLDivLossFunction.apply(*logs(x, u), "batchmean", True, 1e-10)
    return None


SHAPES = {
    "sums": [
        Shape(32768, 128, 2, 1, 4), Shape(32768, 128, 4, 1, 4), Shape(16384, 128, 2, 1, 4), Shape(32768, 256, 2, 1, 8),
        Shape(32768, 128, 1, 1, 4), Shape(16384, 64, 2, 1, 2),
    ],
    "divergence_pass": [
        Shape(16384, 128, 1, 1, 4), Shape(32768, 128, 1, 1, 4), Shape(32768, 128, 2, 1, 4), Shape(16384, 256, 1, 1, 8),
    ],
    "pull": [
        Shape(4096, 128, 2, 1, 4), Shape(4096, 128, 4, 1, 4), Shape(4096, 128, 1, 1, 4), Shape(2048, 128, 2, 1, 4),
        Shape(8192, 128, 2, 1, 4), Shape(4096, 256, 1, 1, 8),
    ],
}  # fmt: skip


def configs() -> list[dict[str, Any]]:
    lines: list[dict[str, Any]] = []
    p = Problem()
    facts_floor, pull_floor = p.facts_floor(), p.pull_floor()
    say(f"floors: two reads {facts_floor:.3f} ms, two reads and a write {pull_floor:.3f} ms")
    for fn, options in TIMED:
        for part, run in parts_of(p, fn, **options).items():
            floor = pull_floor if part == "pull" else facts_floor
            for shape in SHAPES[part]:
                ms = timed(lambda run=run, shape=shape: run(shape=shape), repeats=9)
                lines.append({"what": f"{fn.__name__}, {part}", "shape": shape, "ms": ms, "ratio": floor / ms})
                say(f"{fn.__name__} {part} {tuple(shape)!s:28s} {ms:.3f} ms {floor / ms:6.1%}")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--configs", action="store_true", help="time a few block shapes for each kernel")
    parser.add_argument("--few", action="store_true", help="a short check of the numbers")
    parser.add_argument("--check", action="store_true", help="only check the numbers")
    args = parser.parse_args()
    say(torch.cuda.get_device_name(), "torch", torch.__version__, "triton", triton.__version__)
    wrong = [] if args.configs else check(args.few)
    say("all right" if not wrong else "WRONG:\n" + "\n".join(wrong))
    if args.check:
        sys.exit(bool(wrong))
    results: dict[str, Any] = {
        "command": " ".join(["python benchmarks/gpu_teachers.py", *sys.argv[1:]]),
        "date": datetime.date.today().isoformat(),
        "device": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__, "wrong": wrong
    }  # fmt: skip
    if not wrong:
        results["configs" if args.configs else "table"] = configs() if args.configs else table()
        save("gpu_teachers_configs" if args.configs else "gpu_teachers", results)
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
