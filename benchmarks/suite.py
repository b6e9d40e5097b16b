"""Speed, memory and accuracy of a head at work, against what is installed: `python -m benchmarks.suite` on CUDA.

Dimension key:  N rows   R rows that count   V vocabulary   D hidden size

Five workloads (pretraining, SFT with masks, GRPO, GSPO, distillation) at five real vocabularies, forward and backward
from hidden states and weights, in bf16 (on a CPU in float32, and fewer rows); then how headloss scales with N, V, D,
the losses and simulated ranks.
The floor of every line is the GEMMs that it cannot do without, through cuBLAS, in the same run: three on the rows that
count, and one more for a teacher's logits.  Every way is first held to float64 on fewer rows, next to eager in the same
dtype; where headloss is wrong there is no time, a peer that is further from float64 than twice eager is marked.
A time is that of a step in a run of them without a pause, as in training: the device finds its work queued.  On an H200
the same products take 15% less time after a pause.  `wall ms` is a step alone, on a device that has rested, until it is
done.

    --tiny        a few seconds on any device: does everything run?
    --seconds S   stop beginning new measurements after S seconds; what was left out is in the result
    --first       the first vocabulary alone, where every way runs; results: suite_first_<device>.json
    --warm I      only workload I (0 to 4), nothing written: several of these at a time fill the compilers' caches

Results: benchmarks/results/suite_<device>.json, or the folder $OUT; `python benchmarks/plots.py` draws them.
"""

from __future__ import annotations

import argparse
import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

import headloss as hl
from headloss.backends import choose
from headloss.cli.memory import peak_bytes
from headloss.facts import CONSTANT, Fact, Want, coefficients, finish, merge
from headloss.losses import cross_entropy, dft, entropy_bonus, focal, grpo, gspo, jsd, reinforce, z_loss
from headloss.parallel.shard import _fields, _refill
from proof.record import command, environment, short, write

VOCABULARIES = (128256, 151936, 262144, 32000, 50257)
DOCUMENTS = 8
MEMORY = "1GiB"
WARM, REST = 150.0, 20.0  # ms: how long the device works before it is timed, and how long it rests
CLIP, SEQUENCE_CLIP, Z = 0.2, 0.05, 1e-4


class Batch(NamedTuple):
    """One head's inputs.  Every document has one advantage."""

    hidden: Tensor
    weight: Tensor
    targets: Tensor
    old_logprob: Tensor
    advantage: Tensor
    teacher_hidden: Tensor | None
    teacher_weight: Tensor | None

    @property
    def segments(self) -> hl.Segments:
        return hl.Segments.from_batch((DOCUMENTS, len(self.targets) // DOCUMENTS))

    def leaves(self, dtype: torch.dtype | None = None) -> Batch:
        hidden, weight = (x.detach().to(dtype or x.dtype).requires_grad_() for x in (self.hidden, self.weight))
        teacher_head = [
            None if x is None else x.to(dtype or x.dtype) for x in (self.teacher_hidden, self.teacher_weight)
        ]
        return self._replace(
            hidden=hidden, weight=weight, teacher_hidden=teacher_head[0], teacher_weight=teacher_head[1]
        )


def batch(N: int, V: int, D: int, ignored: float, teacher: bool, device: str, dtype: torch.dtype) -> Batch:
    torch.manual_seed(0)
    draw = lambda *size: torch.randn(*size, device=device)
    hidden, weight = draw(N, D).to(dtype), (draw(V, D) * 3 / D**0.5).to(dtype)
    targets = torch.randint(V, (N,), device=device)
    place = torch.arange(N, device=device) % (N // DOCUMENTS)
    targets[place < ignored * (N // DOCUMENTS)] = -100  # the prompt of every document
    old = hl.row_facts(hl.Linear(hidden, weight, memory=MEMORY), targets, ("logprob",)).logprob + 0.1 * draw(N)
    advantage = draw(DOCUMENTS).repeat_interleave(N // DOCUMENTS)
    teacher_head = (draw(N, D).to(dtype), (draw(V, D) * 3 / D**0.5).to(dtype)) if teacher else (None, None)
    return Batch(hidden, weight, targets, old, advantage, *teacher_head)


Way = Callable[[Batch], Tensor]  # to the loss


class Workload(NamedTuple):
    name: str
    objective: hl.Objective
    eager: Way
    ignored: float = 0.0
    teacher: bool = False


def logits(b: Batch) -> Tensor:
    z = F.linear(b.hidden, b.weight)
    return z if z.dtype == torch.float64 else z.float()


def eager_pretraining(b: Batch) -> Tensor:
    z = logits(b)
    return F.cross_entropy(z, b.targets) + Z * z.logsumexp(-1).square().mean()


def eager_sft(b: Batch) -> Tensor:
    return F.cross_entropy(logits(b), b.targets)


def clipped(logratio: Tensor, advantage: Tensor, clip: float) -> Tensor:
    ratio = logratio.exp()
    return -torch.minimum(ratio * advantage, ratio.clamp(1 - clip, 1 + clip) * advantage)


def eager_grpo(b: Batch) -> Tensor:
    logprob = -F.cross_entropy(logits(b), b.targets, reduction="none")
    return policy(b, logprob, False)


def eager_gspo(b: Batch) -> Tensor:
    logprob = -F.cross_entropy(logits(b), b.targets, reduction="none")
    return policy(b, logprob, True)


def policy(b: Batch, logprob: Tensor, whole: bool) -> Tensor:
    """From log-probabilities to the loss: GRPO's, or GSPO's on whole sequences; a mean over tokens."""
    valid = b.targets != -100
    d = torch.where(valid, logprob - b.old_logprob.to(logprob.dtype), 0)
    if whole:
        lines = lambda x: x.view(DOCUMENTS, -1)
        d = (lines(d).sum(1) / lines(valid).sum(1)).repeat_interleave(len(d) // DOCUMENTS)
    loss = clipped(d, b.advantage.to(d.dtype), SEQUENCE_CLIP if whole else CLIP)
    return torch.where(valid, loss, 0).sum() / valid.sum()


def eager_distillation(b: Batch) -> Tensor:
    assert b.teacher_hidden is not None and b.teacher_weight is not None
    logp = logits(b).log_softmax(-1)
    logq = logits(b._replace(hidden=b.teacher_hidden, weight=b.teacher_weight)).log_softmax(-1)
    logm = torch.logaddexp(logp, logq) - torch.log(torch.tensor(2.0, dtype=logp.dtype))
    return (logp.exp() * (logp - logm) + logq.exp() * (logq - logm)).sum(-1).mean() / 2


WORKLOADS = (
    Workload("pretraining", hl.Objective(ce=cross_entropy, z=hl.Term(z_loss, weight=Z)), eager_pretraining),
    Workload("SFT, 60% masked", hl.Objective(ce=cross_entropy), eager_sft, ignored=0.6),
    Workload("GRPO, 30% prompt", hl.Objective(rl=hl.Term(grpo, low=CLIP, high=CLIP)), eager_grpo, ignored=0.3),
    Workload(
        "GSPO, 30% prompt",
        hl.Objective(rl=hl.Term(gspo, low=SEQUENCE_CLIP, high=SEQUENCE_CLIP)),
        eager_gspo,
        ignored=0.3,
    ),
    Workload("distillation, JSD", hl.Objective(kd=jsd), eager_distillation, teacher=True),
)


def ours(work: Workload, memory: str) -> Way:
    needs = any(t.needs_segments for t in work.objective.terms.values())
    asks = {p for t in work.objective.terms.values() for p in ("old_logprob", "advantage") if t.fn in (grpo, gspo)}

    def way(b: Batch) -> Tensor:
        shape = (DOCUMENTS, len(b.targets) // DOCUMENTS) if needs else b.targets.shape
        inputs = {name: getattr(b, name).view(shape) for name in asks}
        if b.teacher_hidden is not None and b.teacher_weight is not None:
            inputs["teacher"] = hl.Linear(b.teacher_hidden.view(*shape, -1), b.teacher_weight)
        source = hl.Linear(b.hidden.view(*shape, -1), b.weight, memory=memory)
        segments = hl.Segments.from_batch(b.targets.view(shape)) if needs else None
        return work.objective(source, b.targets.view(shape), segments=segments, **inputs).loss

    return way


# Peers: each of them where it can be imported


def liger(work: Workload) -> Way | None:
    from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss, LigerFusedLinearJSDLoss
    from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction

    if work.eager in (eager_pretraining, eager_sft):
        z = Z if work.eager is eager_pretraining else 0.0

        def ce(b: Batch) -> Tensor:
            out = LigerFusedLinearCrossEntropyFunction.apply(
                b.hidden, b.weight, b.targets, None, None, -100, z, 0.0, "mean", None, False
            )
            return out[0] if isinstance(out, tuple) else out

        return ce
    if work.teacher:
        distill = LigerFusedLinearJSDLoss(weight_hard_loss=0.0, weight_soft_loss=1.0, beta=0.5)
        return lambda b: distill(b.hidden, b.weight, b.teacher_hidden, b.teacher_weight, b.targets)
    whole = work.eager is eager_gspo
    clip = SEQUENCE_CLIP if whole else CLIP
    head = LigerFusedLinearGRPOLoss(
        beta=0.0, use_ref_model=False, epsilon_low=clip, epsilon_high=clip, loss_type="bnpo",
        importance_sampling_level="sequence" if whole else "token",
    )  # fmt: skip

    def rl(b: Batch) -> Tensor:
        lines = lambda x: x.view(DOCUMENTS, -1, *x.shape[1:])
        valid = lines(b.targets) != -100
        out = head(
            lines(b.hidden), b.weight, lines(b.targets).clamp(min=0), valid.long(), lines(b.advantage)[:, 0],
            old_per_token_logps=lines(b.old_logprob),
        )  # fmt: skip
        return out[0] if isinstance(out, tuple) else out

    return rl


def compiled_on_kept_rows(work: Workload) -> Way | None:
    """What a careful user of torch.compile does by hand: the rows that count alone reach the head."""
    if not work.ignored:
        return None
    nll = torch.compile(lambda b: F.cross_entropy(logits(b), b.targets, reduction="none"), dynamic=False)

    def way(b: Batch) -> Tensor:
        rows = (b.targets != -100).nonzero()[:, 0]
        found = nll(b._replace(hidden=b.hidden[rows], targets=b.targets[rows]))
        if work.eager is eager_sft:
            return found.mean()
        return policy(b, found.new_zeros(len(b.targets)).index_copy(0, rows, -found), work.eager is eager_gspo)

    return way


def cut_cross_entropy(work: Workload) -> Way | None:
    from cut_cross_entropy import linear_cross_entropy

    return (lambda b: linear_cross_entropy(b.hidden, b.weight, b.targets)) if work.eager is eager_sft else None


def quack(work: Workload) -> Way | None:
    """Given the rows that count alone: it would compute the others."""
    from quack.linear_cross_entropy import chunked_linear_cross_entropy

    if work.eager is not eager_sft:
        return None

    def way(b: Batch) -> Tensor:
        rows = (b.targets != -100).nonzero()[:, 0]
        return chunked_linear_cross_entropy(b.hidden[rows], b.weight, b.targets[rows])

    return way


def torch_linear(work: Workload) -> Way | None:
    fused = F.linear_cross_entropy  # since torch 2.13
    return (lambda b: fused(b.hidden, b.weight, b.targets)) if work.eager is eager_sft else None


def trl(work: Workload) -> Way | None:
    """TRL's fused head: log-probabilities, or a divergence, from tiles of the vocabulary."""
    from trl.kernels.chunked_divergence import ChunkedDivergenceFunction
    from trl.kernels.chunked_logprob import ChunkedLogProbFunction

    if work.teacher:
        apply = ChunkedDivergenceFunction.apply
        return lambda b: apply(b.hidden, b.weight, None, b.teacher_hidden, b.teacher_weight, None, 0.5)[0].mean()

    def logprob(b: Batch) -> Tensor:
        """Of every row; 0 where it is ignored: TRL's trainers leave those rows out before the head."""
        rows = (b.targets != -100).nonzero()[:, 0]
        found = ChunkedLogProbFunction.apply(b.hidden[rows], b.weight, None, b.targets[rows], 1.0, 32768, None, 1.0, ())
        return torch.zeros(len(b.targets), device=rows.device).index_copy(0, rows, found[0].float())

    if work.eager is eager_sft:
        return lambda b: -logprob(b).sum() / (b.targets != -100).sum()
    if work.eager in (eager_grpo, eager_gspo):
        return lambda b: policy(b, logprob(b), work.eager is eager_gspo)
    return None


PEERS = {"Liger": liger, "TRL": trl, "QuACK": quack, "cut-cross-entropy": cut_cross_entropy}
PEERS |= {"F.linear_cross_entropy": torch_linear}


class Clock:
    """Times and bytes on one device, and how much time is left."""

    def __init__(self, device: str, seconds: float) -> None:
        self.device, self.end = device, time.monotonic() + seconds

    @property
    def over(self) -> bool:
        return time.monotonic() > self.end

    def wall(self, step: Callable[[], Any]) -> float:
        """Of a step that finds the device rested and is waited for."""
        if self.device == "cuda":
            torch.cuda.synchronize()
            time.sleep(REST / 1e3)
        begin = time.perf_counter()
        step()
        if self.device == "cuda":
            torch.cuda.synchronize()
        return 1e3 * (time.perf_counter() - begin)

    def busy(self, step: Callable[[], Any]) -> float:
        """Of a step in a run of them without a pause."""
        if self.device != "cuda":
            return self.wall(step)
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        first = math.ceil(WARM / self.wall(step))
        for i in range(3 * first):
            if i == first:
                start.record()
            step()
        stop.record()
        stop.synchronize()
        return start.elapsed_time(stop) / (2 * first)

    def turns(
        self, steps: dict[str, Callable[[], Any]], rounds: int, clock: Callable[[Callable[[], Any]], float]
    ) -> dict[str, float]:
        """Median milliseconds of each; they take turns, so that what disturbs one disturbs all."""
        times: dict[str, list[float]] = {name: [] for name in steps}
        for _ in range(rounds):
            for name, step in steps.items():
                times[name].append(clock(step))
        return {name: statistics.median(t) for name, t in times.items()}

    def peak(self, step: Callable[[], Any]) -> float:
        """GiB above the inputs, gradients included."""
        if self.device != "cuda":
            return peak_bytes(step) / 2**30
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step()
        torch.cuda.synchronize()
        return (torch.cuda.max_memory_allocated() - before) / 2**30


def gradients(way: Way, b: Batch) -> tuple[Tensor, Tensor, Tensor]:
    loss = way(b)
    return loss.detach(), *torch.autograd.grad(loss, (b.hidden, b.weight))


def floor(b: Batch) -> Callable[[], Any]:
    """The GEMMs of the rows that count, and the teacher's, at the width that cuBLAS is fastest at."""
    wide = lambda w: F.pad(w.detach(), (0, 0, 0, -len(w) % 64))  # an odd vocabulary costs it five times as much
    h, w = b.hidden.detach()[b.targets != -100], wide(b.weight)
    teacher_head = None if b.teacher_weight is None else wide(b.teacher_weight)
    z, dh, dw = h.new_empty(len(h), len(w)), torch.empty_like(h), torch.empty_like(w)

    def gemms() -> None:
        torch.mm(h, w.t(), out=z)
        torch.mm(z, w, out=dh)
        torch.mm(z.t(), h, out=dw)
        if b.teacher_hidden is not None and teacher_head is not None:
            torch.mm(b.teacher_hidden, teacher_head.t(), out=z)

    return gemms


def errors(ways: dict[str, Way], work: Workload, size: tuple[int, int, int], device: str, dtype: Any) -> dict[str, Any]:
    """Of each way, the errors of loss, hidden and weight gradient relative to float64."""
    b = batch(*size, work.ignored, work.teacher, device, dtype).leaves()
    truth = gradients(work.eager, b.leaves(torch.float64))
    found: dict[str, Any] = {}
    for name, way in ways.items():
        try:
            got = gradients(way, b)
            found[name] = [float((x.double() - t).norm() / t.norm()) for x, t in zip(got, truth, strict=True)]
        except Exception as error:  # a peer that cannot do it says so in the table
            found[name] = _said(error)
    return found


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip()[:120]}"


def measure(
    work: Workload, size: tuple[int, int, int], ways: dict[str, Way], clock: Clock, dtype: torch.dtype, rounds: int
) -> Iterator[dict[str, Any]]:
    """A line for each way: right, then how fast and how large."""
    N, V, D = size
    wrong = errors(ways, work, (min(N, 256), V, D), clock.device, dtype)
    b = batch(N, V, D, work.ignored, work.teacher, clock.device, dtype).leaves()
    limits = [2 * e + 1e-4 for e in wrong["eager"]]
    steps: dict[str, Callable[[], Any]] = {"floor": floor(b)}
    lines: dict[str, dict[str, Any]] = {}
    for name, way in ways.items():
        line: dict[str, Any] = {"workload": work.name, "way": name, "N": N, "V": V, "D": D}
        if isinstance(wrong[name], str):
            yield line | {"failed": wrong[name]}
            continue
        off = not all(e <= limit for e, limit in zip(wrong[name], limits, strict=True))
        lines[name] = line | {"errors (loss, dH, dW)": wrong[name], "wrong": off}
        if not (off and name == "headloss"):
            steps[name] = lambda way=way: gradients(way, b)  # type: ignore[misc]
    if clock.device == "cuda":  # or what was compiled for fewer rows would be compiled for any number of them
        torch.compiler.reset()
    peaks: dict[str, float] = {}
    for name, step in list(steps.items()):
        try:
            step()
            peaks[name] = clock.peak(step)
        except Exception as error:
            if name in ("floor", "headloss"):
                raise
            del steps[name]
            lines.pop(name)
            yield {"workload": work.name, "way": name, "N": N, "V": V, "D": D, "failed": _said(error)}
    times = clock.turns(steps, min(3, rounds), clock.busy)
    walls = clock.turns(steps, rounds, clock.wall) if clock.device == "cuda" else times
    for name, line in lines.items():
        if name in times:
            line |= {"ms": times[name], "floor ms": times["floor"], "ratio": times[name] / times["floor"]}
            line |= {"wall ms": walls[name], "GiB": peaks[name]}
        yield line


def ways_of(work: Workload, compiled: bool, memory: str, slow: bool) -> dict[str, Way]:
    found: dict[str, Way] = {"headloss": ours(work, memory), "eager": work.eager}
    for name, peer in PEERS.items():
        if name == "cut-cross-entropy" and not slow:
            continue
        try:
            way = peer(work)
        except Exception as error:
            print(f"{name}: {type(error).__name__}: {str(error)[:100]}")
            continue
        if way is not None:
            found[name] = way
    if compiled:
        found["torch.compile"] = torch.compile(work.eager, dynamic=False)
        if (way := compiled_on_kept_rows(work)) is not None:
            found["torch.compile, kept rows"] = way
    return found


# Scaling


def scaling(clock: Clock, dtype: torch.dtype, rounds: int, tiny: bool) -> Iterator[dict[str, Any]]:
    """Headloss alone: one of N, V, D, the number of losses and the ranks grows, the others stay."""
    large = clock.device == "cuda"
    N, V, D = (64, 96, 16) if tiny else (4096, 128256, 2048) if large else (256, 32000, 128)
    work = WORKLOADS[0]
    many_N = (32, 64) if tiny else (512, 1024, 2048, 4096, 8192, 16384) if large else (64, 128, 256, 512)
    many_D = (8, 16) if tiny else (512, 1024, 2048, 4096, 8192) if large else (64, 128, 256, 512)
    sizes = {
        "N": [(n, V, D) for n in many_N],
        "V": [(N, v, D) for v in ((50, 97) if tiny else sorted(VOCABULARIES))],
        "D": [(N, V, d) for d in many_D],
    }
    for what, many in sizes.items():
        for size in many:
            if not clock.over:
                yield {"grows": what, **_scaled(work.objective, size, clock, dtype, rounds)}
    losses: dict[str, Any] = {"ce": cross_entropy, "z": hl.Term(z_loss, weight=Z), "h": entropy_bonus, "dft": dft}
    losses |= {"focal": focal, "pg": reinforce, "rl": grpo, "ls": hl.Term(cross_entropy, label_smoothing=0.1)}
    for count in (1, 2) if tiny else (1, 2, 4, 8):
        if not clock.over:
            chosen = hl.Objective(**dict(itertools.islice(losses.items(), count)))
            yield {"grows": "losses", "losses": count, **_scaled(chosen, (N, V, D), clock, dtype, rounds)}
    for ranks in (1, 2) if tiny else (1, 2, 4, 8):
        if not clock.over:
            yield {"grows": "simulated ranks", "ranks": ranks, **_rank(ranks, (N, V, D), clock, dtype, rounds)}


def _scaled(
    objective: hl.Objective, size: tuple[int, int, int], clock: Clock, dtype: torch.dtype, rounds: int
) -> dict[str, Any]:
    b = batch(*size, 0.0, False, clock.device, dtype).leaves()
    asks = {n for t in objective.terms.values() for n in ("advantage", "old_logprob") if n in t.fn.__code__.co_varnames}
    inputs = {n: getattr(b, n) for n in asks}
    way: Way = lambda b: objective(hl.Linear(b.hidden, b.weight, memory=MEMORY), b.targets, **inputs).loss
    return _line(lambda: gradients(way, b), floor(b), size, clock, rounds)


def _rank(ranks: int, size: tuple[int, int, int], clock: Clock, dtype: torch.dtype, rounds: int) -> dict[str, Any]:
    """What one of several ranks does, with everything but the wires: its columns, the others' partials, the merge."""
    N, V, D = size
    b = batch(N, V // ranks, D, 0.0, False, clock.device, dtype)
    sweep: Any = choose("auto", b.hidden.device)
    want = Want([Fact("lse"), Fact("logprob")])

    def step() -> None:
        raw = torch.mm(b.hidden, b.weight.t())
        partial = sweep.sums(raw, b.targets, want, [1.0], start=0)
        packed = torch.stack(list(_fields(partial)))[None].expand(ranks, -1, -1).contiguous()
        whole = merge(_refill(partial, iter(packed.unbind(1))), [1.0])
        facts, softmax = finish(whole, want, [1.0], V)
        grads = {f: torch.full_like(x, -1 / N) for f, x in facts.items() if f.name not in CONSTANT}
        sweep.pull(raw, b.targets, softmax, coefficients(facts, grads, want, V), [1.0], raw, start=0)
        torch.mm(raw, b.weight)
        torch.mm(raw.t(), b.hidden)

    return _line(step, floor(b), (N, V // ranks, D), clock, rounds)


def _line(
    step: Callable[[], Any], gemms: Callable[[], Any], size: tuple[int, int, int], clock: Clock, rounds: int
) -> dict[str, Any]:
    peak = clock.peak(step)
    gemms()
    times = clock.turns({"ours": step, "floor": gemms}, min(3, rounds), clock.busy)
    N, V, D = size
    line = {"N": N, "V": V, "D": D, "ms": times["ours"], "floor ms": times["floor"]}
    return line | {"ratio": times["ours"] / times["floor"], "GiB": peak}


def run(
    device: str,
    tiny: bool,
    seconds: float,
    vocabularies: Sequence[int] = VOCABULARIES,
    workloads: Sequence[Workload] = WORKLOADS,
) -> dict[str, Any]:
    """`tiny` for a test; a CPU gets a head of its own size."""
    clock = Clock(device, seconds)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    rounds = 2 if tiny else 7 if device == "cuda" else 3
    rounds = rounds if workloads is WORKLOADS else 1
    N, D = (64, 16) if tiny else (4096, 4096) if device == "cuda" else (256, 128)
    rows: list[dict[str, Any]] = []
    left: list[str] = []
    scaled: list[dict[str, Any]] = []
    memory = "20KiB" if tiny else MEMORY if device == "cuda" else "32MiB"
    for number, V in enumerate((97, 128) if tiny else vocabularies):
        for work in workloads:
            if clock.over:
                left.append(f"{work.name} at {V}")
                continue
            first = vocabularies[0] == V  # where what compiles for long, or is slow, is measured too
            ways = ways_of(work, device == "cuda" and first, memory, slow=first)
            for line in measure(work, (N, V, D), ways, clock, dtype, rounds):
                rows.append(line)
                _say(line)
            if device == "cuda":
                torch.cuda.empty_cache()
        scaled_too = number == 0 and workloads is WORKLOADS and len(vocabularies) > 1
        for line in scaling(clock, dtype, rounds, tiny) if scaled_too else ():
            scaled.append(line)
            _say(line)
        if number == 0 and clock.over:
            left.append("some of the scaling")
    return {"dtype": str(dtype), "memory": memory, "workloads": rows, "scaling": scaled, "left out": left}


def _say(line: dict[str, Any]) -> None:
    name = line.get("workload") or f"{line['grows']} {line.get('losses', line.get('ranks', ''))}"
    size = f"{line['N']} x {line['V']} x {line['D']}"
    ms, ratio, alone, held = (line.get(key, float("nan")) for key in ("ms", "ratio", "wall ms", "GiB"))
    told = line.get("failed") or f"{ms:9.3f} ms {ratio:7.3f}x {alone:9.3f} ms alone {held:6.2f} GiB"
    more = "  WRONG" if line.get("wrong") else ""
    print(f"{name:20s} {line.get('way', 'headloss'):24s} {size:24s} {told}{more}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cpu", "cuda"))
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--seconds", type=float, default=1e9)
    parser.add_argument("--first", action="store_true")
    parser.add_argument("--warm", type=int, choices=range(len(WORKLOADS)))
    args = parser.parse_args()
    if args.warm is not None:
        run(args.device, args.tiny, args.seconds, VOCABULARIES[: 1 if args.first else None], [WORKLOADS[args.warm]])
        return
    found = run(args.device, args.tiny, args.seconds, VOCABULARIES[: 1 if args.first else None])
    result = {"command": command("benchmarks.suite"), **environment(args.device), **found}
    write(f"suite_{'first_' if args.first else ''}{short(args.device)}{'_tiny' if args.tiny else ''}", result)


if __name__ == "__main__":
    main()
