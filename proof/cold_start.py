"""Eight processes that start together on an empty Triton cache: `python -m proof.cold_start`, on a CUDA device.

Each makes the same calls, on logits and on hidden states, with a teacher and without.  All of them must end, with the
same bits, and with what eager says; then again with the cache they leave behind.  Without a GPU, `--device compiler`
only compiles the kernels for Hopper, all processes into one cache; `--device cpu` times what one process alone pays
for `import headloss` and for its first call.  The seconds go to benchmarks/results/cold_start_<device>.json.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

import headloss as hl
from headloss.losses import cross_entropy, entropy_bonus, forward_kl, grpo, z_loss
from proof.record import ROOT, command, environment, short, write

N, V, D = 512, 32003, 256


def calls(device: str) -> dict[str, Any]:
    """Losses and gradients of a few first calls: a digest of their bits, and the error of cross-entropy."""
    torch.manual_seed(0)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    hidden = torch.randn(N, D, device=device).to(dtype)
    weight = (torch.randn(V, D, device=device) * 3 / D**0.5).to(dtype)
    targets = torch.randint(V, (N,), device=device)
    logits = hidden @ weight.t()
    old = hl.row_facts(hl.Logits(logits), targets, ("logprob",)).logprob + 0.1
    mix = {"ce": cross_entropy, "z": hl.Term(z_loss, weight=1e-4), "h": hl.Term(entropy_bonus, weight=1e-3)}
    distilled = hl.Objective(kd=forward_kl)
    policy = hl.Objective(rl=grpo, **mix, metrics=["entropy", "accuracy"])
    digest = hashlib.sha256()
    begin = time.monotonic()
    for name in ("logits", "hidden"):
        x = (logits if name == "logits" else hidden).detach().requires_grad_()
        source = hl.Logits(x) if name == "logits" else hl.Linear(x, weight, memory="8MiB")
        for out in (
            policy(source, targets, advantage=torch.ones_like(old), old_logprob=old),
            hl.Objective(**mix)(source, targets),
            distilled(source, targets, teacher=hl.Logits(logits.flip(0))),
        ):
            (grad,) = torch.autograd.grad(out.loss, x)
            digest.update(out.loss.detach().cpu().numpy().tobytes())
            digest.update(grad.float().cpu().numpy().tobytes())
    ours = hl.Objective(ce=cross_entropy)(hl.Logits(logits), targets).loss
    eager = torch.nn.functional.cross_entropy(logits.double(), targets)
    error = float((ours.double() - eager).abs() / eager)
    return {"seconds": round(time.monotonic() - begin, 2), "digest": digest.hexdigest(), "error": error}


def compilations() -> dict[str, Any]:
    """The kernels of tests/kernels/test_triton_compile.py, compiled for Hopper: a digest of the binaries."""
    spec = importlib.util.spec_from_file_location("kernels", ROOT / "tests" / "kernels" / "test_triton_compile.py")
    assert spec is not None and spec.loader is not None
    kernels = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(kernels)
    begin, digest = time.monotonic(), hashlib.sha256()
    for make in kernels.KERNELS.values():
        digest.update(make().cubin)
    return {"seconds": round(time.monotonic() - begin, 2), "digest": digest.hexdigest()}


def together(count: int, cache: Path, device: str) -> list[dict[str, Any]]:
    arguments = [sys.executable, "-m", "proof.cold_start", "--one", "--device", device]
    environ = os.environ | {"TRITON_CACHE_DIR": str(cache), "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}
    processes = [
        subprocess.Popen(arguments, cwd=ROOT, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(count)
    ]
    found = []
    for process in processes:
        out, err = process.communicate(timeout=500)
        failed = process.returncode != 0
        found.append({"failed": err[-600:]} if failed else json.loads(out.strip().splitlines()[-1]))
    return found


def race(count: int, device: str) -> dict[str, Any]:
    result: dict[str, Any] = {"processes": count}
    with tempfile.TemporaryDirectory(prefix="cold-") as cache:
        for state in ("cold", "warm"):
            begin = time.monotonic()
            rows = together(count, Path(cache), device)
            result[state] = {
                "seconds, with the start of Python": round(time.monotonic() - begin, 1),
                "seconds of the calls": [row.get("seconds") for row in rows],
                "failed": [row["failed"] for row in rows if "failed" in row],
                "different results": len({row.get("digest") for row in rows}),
                "largest error of the loss": max((row.get("error", 0.0) for row in rows), default=0.0),
                "binaries in the cache": sum(1 for _ in Path(cache).rglob("*.cubin")),
            }
    states = (result["cold"], result["warm"])
    result["fine"] = all(not s["failed"] and s["different results"] == 1 for s in states)
    return result


# A new process per loss and source; the compiler is what torch's make_fx and torch.compile load when first called:
# a function of one's own is traced with make_fx.
FIRST = """
import json, sys, time
import torch
marks = [time.process_time()]
import headloss as hl
from headloss import losses
marks.append(time.process_time())
loss, source = sys.argv[1:3]
if "compiler" in sys.argv:
    import torch._dynamo, torch._inductor.sizevars, torch.export._trace
N, V, D = 64, 1000, 32
targets, hidden = torch.randint(V, (N,)), torch.randn(N, D, requires_grad=True)
x = hl.Linear(hidden, torch.randn(V, D)) if source == "Linear" else hl.Logits(torch.randn(N, V, requires_grad=True))
given = {"advantage": torch.randn(N), "old_logprob": -torch.rand(N)} if loss == "grpo" else {}
given |= {"teacher": hl.Logits(torch.randn(N, V))} if loss == "jsd" else {}
def own(logprob, entropy):
    return -logprob - 0.01 * entropy
losses.own = own
for _ in range(2):
    marks.append(time.process_time())
    hl.Objective(a=getattr(losses, loss))(x, targets, **given).loss.backward()
    marks.append(time.process_time())
print(json.dumps([b - a for a, b in zip(marks[::2], marks[1::2])]))
"""


def alone(rounds: int = 2) -> dict[str, Any]:
    """CPU seconds of the import and of the first two calls in a process of its own: the least of a few rounds."""
    found: dict[str, Any] = {"import headloss, after torch": 9e9}
    # Python files compiled once, as an installed package is.
    with tempfile.TemporaryDirectory(prefix="bytecode-") as cache:
        environ = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
        environ |= {"PYTHONPYCACHEPREFIX": cache, "PYTHONPATH": str(ROOT)}
        for loss in ("cross_entropy", "grpo", "jsd", "own"):
            for source in ("Logits", "Linear"):
                row = {}
                for state, more in (("", ()), (", compiler loaded", ("compiler",))):
                    times = []
                    for _ in range(rounds + 1):  # the first writes the bytecode
                        line = [sys.executable, "-c", FIRST, loss, source, *more]
                        done = subprocess.run(line, env=environ, stdout=subprocess.PIPE, text=True, check=True)
                        times.append(json.loads(done.stdout.splitlines()[-1]))
                    least = [min(column) for column in zip(*times, strict=True)]
                    key = "import headloss, after torch"
                    found[key] = round(min(found[key], least[0]), 3)
                    row |= {f"first call{state}": round(least[1], 3), "second call": round(least[2], 4)}
                found[f"{loss}, {source}"] = row
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=("cpu", "cuda", "compiler"))
    parser.add_argument("--processes", type=int, default=8)
    parser.add_argument("--one", action="store_true", help="be one of the processes")
    args = parser.parse_args()
    if args.one:
        print(json.dumps(compilations() if args.device == "compiler" else calls(args.device)))
        return
    found = {"CPU seconds alone": alone(), "fine": True} if args.device == "cpu" else race(args.processes, args.device)
    print(json.dumps(found, indent=1))
    write(
        f"cold_start_{short(args.device)}",
        {"command": command("proof.cold_start"), **environment(args.device), **found},
    )
    sys.exit(0 if found["fine"] else 1)


if __name__ == "__main__":
    main()
