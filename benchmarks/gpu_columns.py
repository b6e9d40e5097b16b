"""Some columns of each row, by the public API: `python benchmarks/gpu_columns.py`, on a GPU.

A policy loss over the sets that tokens were sampled from: 46% of the rows keep one column, the mean is about 8 and the
most about 100.  Targets and support are prepared, as a data loader would; a line says what a support that is new in
every call adds.  The floor is the head's three products through cuBLAS on the same shapes in the same run.  Numbers are
checked against float64 before the clock starts, next to eager in the same dtype, and a wrong one ends the run.  The
results go to benchmarks/results, or to the folder $OUT.
"""

from __future__ import annotations

import argparse
import datetime
import sys
from pathlib import Path
from typing import Any

import torch

import headloss as hl
from headloss.losses import forward_kl, grpo

sys.path.insert(0, str(Path(__file__).parent))
from gpu_kernels import save
from gpu_product import peak, turns, wall

DEVICE = "cuda"


class Case:
    def __init__(self, N: int, V: int, D: int) -> None:
        torch.manual_seed(0)
        self.shape = N, V, D
        self.h = torch.randn(N, D, device=DEVICE, dtype=torch.bfloat16)
        self.w = (torch.randn(V, D, device=DEVICE) * 3 / D**0.5).bfloat16()
        lengths = torch.where(
            torch.rand(N) < 0.46, 1, (2 + torch.empty(N).exponential_(1 / 11.5)).long().clamp(max=106)
        )
        sets = [torch.randint(V, (4 * int(n),)).unique() for n in lengths]
        sets = [x[torch.randperm(len(x))[: int(n)]] for x, n in zip(sets, lengths, strict=True)]
        self.offsets = torch.tensor([0, *(len(x) for x in sets)]).cumsum(0)
        self.ids = torch.cat(sets)
        self.y = torch.stack([x[0] for x in sets]).to(DEVICE)
        self.support = hl.Support.from_csr(self.ids.to(DEVICE), self.offsets.to(DEVICE))
        self.prepared = hl.prepare(self.y, support=self.support)
        self.inputs = {
            "advantage": torch.randn(N, device=DEVICE),
            "old_logprob": -torch.rand(N, device=DEVICE) * 2,
        }

    def step(self, objective: hl.Objective, support: str = "prepared", **more: Any) -> Any:
        """`support`: "prepared" with the targets, "new" in every call, or "none"."""
        prepared = hl.prepare(self.y)
        ids, offsets = self.ids.to(DEVICE), self.offsets.to(DEVICE)

        def step() -> Any:
            h, w = self.h.detach().requires_grad_(), self.w.detach().requires_grad_()
            targets = self.prepared if support == "prepared" else prepared
            given = {**more, "support": hl.Support.from_csr(ids, offsets)} if support == "new" else more
            out = objective(hl.Linear(h, w, memory="4GiB"), targets, **self.inputs, **given)
            return out.loss.detach(), *torch.autograd.grad(out.loss, (h, w))

        return step

    def three(self) -> Any:
        z = torch.empty(len(self.h), len(self.w), device=DEVICE, dtype=torch.bfloat16)
        dh, dw = torch.empty_like(self.h), torch.empty_like(self.w)

        def three() -> None:
            torch.mm(self.h, self.w.t(), out=z)
            torch.mm(z, self.w, out=dh)
            torch.mm(z.t(), self.h, out=dw)

        return three

    def dense(self, rows: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
        """Some rows with -inf outside their sets, in plain PyTorch."""
        h, w = (x.detach().to(dtype).requires_grad_() for x in (self.h[:rows], self.w))
        z = (h @ w.t()).to(torch.promote_types(dtype, torch.float32))
        mask = torch.ones_like(z, dtype=torch.bool)
        row = torch.repeat_interleave(torch.arange(rows), self.offsets.diff()[:rows])
        mask[row.to(DEVICE), self.ids[: int(self.offsets[rows])].to(DEVICE)] = False
        logp = z.masked_fill(mask, -torch.inf).log_softmax(-1).gather(1, self.y[:rows, None])[:, 0]
        ratio = (logp - self.inputs["old_logprob"][:rows]).exp()
        gain = self.inputs["advantage"][:rows]
        loss = -torch.minimum(ratio * gain, ratio.clamp(0.8, 1.2) * gain).mean()
        return loss.detach(), *torch.autograd.grad(loss, (h, w))

    def errors(self, objective: hl.Objective, rows: int = 512) -> dict[str, float]:
        truth, eager = self.dense(rows, torch.float64), self.dense(rows, torch.bfloat16)
        h, w = self.h[:rows].detach().requires_grad_(), self.w.detach().requires_grad_()
        support = hl.Support.from_csr(
            self.ids[: int(self.offsets[rows])].to(DEVICE), self.offsets[: rows + 1].to(DEVICE)
        )
        inputs = {n: x[:rows] for n, x in self.inputs.items()}
        out = objective(hl.Linear(h, w), self.y[:rows], support=support, **inputs)
        found = (out.loss.detach(), *torch.autograd.grad(out.loss, (h, w)))
        apart = lambda a, b: float((a.double() - b).norm() / b.norm())
        errors = {}
        for name, x, plain, true in zip(("loss", "dhidden", "dweight"), found, eager, truth, strict=True):
            errors[name], errors[f"{name}, eager"] = apart(x, true), apart(plain, true)
            assert errors[name] <= errors[f"{name}, eager"] + 1e-6, (name, errors)
        return errors


def busy(step: Any) -> float:
    """Milliseconds that kernels of a step run, whatever the host does between them."""
    step(), step()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
        step()
        torch.cuda.synchronize()
    on_device = (e for e in seen.events() if e.device_type == torch.autograd.DeviceType.CUDA)
    return sum(e.self_device_time_total for e in on_device) / 1000


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--shape", type=int, nargs=3, default=(8192, 128256, 4096))
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()
    case = Case(*args.shape)
    policy = hl.Objective(rl=grpo, metrics=["entropy"])
    plain = hl.Objective(kl=hl.Term(forward_kl, weight=0.1))
    both = hl.Objective(rl=grpo, kl=hl.Term(forward_kl, weight=0.1, support="all"), metrics=["entropy"])
    lengths = case.offsets.diff()
    sets = {
        "singletons": float((lengths == 1).double().mean()),
        "mean": float(lengths.double().mean()),
        "most": int(lengths.max()),
    }
    print(args.shape, sets, case.errors(policy), flush=True)
    step = case.step(policy)
    first, second = step(), step()
    assert torch.equal(first[1], second[1]) and torch.equal(first[2], second[2]), "a gradient is not repeatable"
    del first, second
    times = turns({"three products": case.three(), "support": step}, args.rounds, queued=4e7)  # the host gets ahead
    row: dict[str, Any] = {"shape": list(args.shape), "sets": sets, "errors": case.errors(policy), "ms": times}
    row["of three products"] = times["support"] / times["three products"]
    row["busy ms"], row["wall ms"], row["peak MiB"] = busy(step), wall(step, 20), peak(step)
    new = case.step(policy, "new")
    row["with a new support in every call"] = {"busy ms": busy(new), "wall ms": wall(new, 20)}
    row["a new support adds, wall ms"] = row["with a new support in every call"]["wall ms"] - row["wall ms"]
    print(row, flush=True)
    teacher = hl.Logits(torch.randn(len(case.h), len(case.w), device=DEVICE, dtype=torch.bfloat16))
    inputs, case.inputs = case.inputs, {}
    alone = case.step(plain, "none", teacher=teacher)
    times = turns({"whole-vocabulary KL": alone}, 2)  # compiled
    case.inputs = inputs
    together = case.step(both, teacher=teacher)

    def one() -> Any:
        case.inputs = {}
        found = alone()
        case.inputs = inputs
        return found

    times = turns({"whole-vocabulary KL": one, "and support": together}, args.rounds, queued=4e7)
    row["with a whole-vocabulary KL, ms"] = times
    row["of the KL alone"] = times["and support"] / times["whole-vocabulary KL"]
    print({k: row[k] for k in list(row)[-2:]}, flush=True)
    about = {
        "device": torch.cuda.get_device_name(), "torch": torch.__version__, "date": datetime.date.today().isoformat(),
        "command": f"python benchmarks/gpu_columns.py --rounds {args.rounds}", "dtype": "bfloat16", "repeatable": True,
    }  # fmt: skip
    save("gpu_columns", {**about, "support": row})


if __name__ == "__main__":
    main()
