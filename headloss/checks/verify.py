"""`hl.verify`: compares an objective as training runs it with the same functions on dense float64 logits of a few rows.

    print(hl.verify(objective, hl.Linear(hidden, weight), targets, advantage=advantage))
    hl.verify(objective, hl.Linear(hidden, weight), targets, advantage=advantage).check()      # raises if it is off

The same code runs as in training: the backend, the traces and plans of earlier calls, and for `Linear` one more call in
chunks.  The reference, `dense.py`, calls each function as the user wrote it.  The allowed difference is what the dtype
explains: twice the error of plain PyTorch on the same rows (four times in half precision), or as much as a rounding of
the inputs changes, plus a few roundings.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from headloss.checks.dense import answer
from headloss.checks.dense_records import IGNORE, Answer, DenseCall, of_rows, replaced, rows_of
from headloss.checks.leaf_tensors import leaves_of, nudged_leaves, tensors_of
from headloss.engine.derived_inputs import with_candidates
from headloss.engine.layout import MARKS, lay_out, readings
from headloss.engine.teachers import named_teachers
from headloss.prepared import Prepared, prepare
from headloss.routed import Routed
from headloss.segments import Segments
from headloss.sources import Linear, Logits, Source, Sparse, Teacher
from headloss.support import Support

if TYPE_CHECKING:
    from headloss.objective import Objective

FEW = {torch.float64: 4e6, torch.float32: 64.0, torch.bfloat16: 4.0, torch.float16: 4.0}  # roundings; 1e-9 in float64


class Compared(NamedTuple):
    """One quantity: its largest difference over all runs, and what was allowed."""

    what: str
    difference: float
    allowed: float
    run: str  # the run that it comes from: "first call", "later call", "in chunks"

    @property
    def ok(self) -> bool:
        return self.difference == 0 or self.difference <= self.allowed  # false for NaN


class Verification(NamedTuple):
    """What `verify` found: `str()` is a table, and `check()` raises if something is off."""

    compared: tuple[Compared, ...]
    unchecked: tuple[str, ...]  # what could not be compared, and why
    rows: str  # which rows were used
    how: str  # what ran

    @property
    def ok(self) -> bool:
        return all(c.ok for c in self.compared)

    def check(self) -> Verification:
        """Return self, or raise AssertionError with the table."""
        if not self.ok:
            raise AssertionError(f"the objective does not compute what its functions say\n{self}")
        return self

    def as_data(self) -> dict[str, Any]:
        """The result as plain data."""
        summary = {"ok": self.ok, "rows": self.rows, "how": self.how, "unchecked": list(self.unchecked)}
        return {**summary, "compared": [{**c._asdict(), "ok": c.ok} for c in self.compared]}

    def __str__(self) -> str:
        width = max([len(c.what) for c in self.compared] + [8])
        lines = [f"{'quantity':<{width}}  {'difference':>10}  {'allowed':>10}"]
        for c in self.compared:
            status = "ok" if c.ok else f"off, {c.run}" + ", NaN in plain PyTorch too" * math.isnan(c.allowed)
            lines.append(f"{c.what:<{width}}  {c.difference:>10.2e}  {c.allowed:>10.2e}  {status}")
        lines += [f"not checked: {what}" for what in self.unchecked]
        off = sum(not c.ok for c in self.compared)
        verdict = "all right" if self.ok else f"{off} of {len(self.compared)} off"
        return "\n".join([*lines, f"{verdict}; {self.rows}; {self.how}"])


def verify(
    objective: Objective,
    source: Source,
    targets: Tensor | Prepared | None = None,
    *,
    rows: int = 64,
    segments: Segments | None = None,
    num_items: int | Tensor | None = None,
    num_segments: int | Tensor | None = None,
    weights: Mapping[str, float | Tensor] | None = None,
    grad_scale: float | Tensor = 1.0,
    host_read: bool = True,
    teacher: Teacher | Mapping[str, Teacher] | None = None,
    ids: Tensor | None = None,
    support: Support | None = None,
    **inputs: Any,
) -> Verification:
    """Compare a call's loss, terms, metrics and gradients with dense float64 PyTorch on the functions as written.

    The arguments are those of the call.  About `rows` rows are used, or whole segments if there are segments; the
    largest things in memory are the float64 copies of the weight and its gradient.  Gradients are compared for the
    source's tensors and inputs that require grad, or for all the source's tensors if none does.  No tensor of the
    caller is written to, and the random generators keep their state.

    >>> hl.verify(objective, hl.Logits(logits), targets, advantage=advantage).check()
    """
    if isinstance(rows, bool) or not isinstance(rows, int) or rows < 1:
        raise ValueError(f"rows: wanted a number of rows, at least 1, got {rows!r}")
    numbers: dict[str, Any] = {"num_items": num_items, "num_segments": num_segments}
    numbers |= {"weights": weights, "grad_scale": grad_scale}
    teacher = with_candidates(teacher, ids, source)
    kwargs = {"host_read": host_read, "teacher": teacher, "support": support, **numbers, **inputs}
    plan = objective.explain(source, targets, segments=segments, **kwargs)  # raises if an argument is wrong
    prepared = isinstance(targets, Prepared)
    if isinstance(targets, Prepared):
        segments = targets.segments if segments is None else segments
        support, tokens, targets = targets.support or support, targets.tokens, targets.targets
        if tokens is not None:  # prepared targets are columns; the caller's are tokens
            targets = torch.where(targets == IGNORE, IGNORE, tokens.vocab_ids[targets.clamp(min=0)])
            of_terms = {t.targets for t in objective.terms.values()} & inputs.keys()  # ignored where the target is lost
            inputs = {n: x.masked_fill(tokens.lost, IGNORE) if n in of_terms else x for n, x in inputs.items()}
    fitted = lambda x: x.fitted(source.leading, source.device)
    segments = None if segments is None else fitted(segments)
    inputs = {n: fitted(x) if isinstance(x, Segments) else x for n, x in inputs.items()}
    groups = {"segments": segments} | {n: x for n, x in inputs.items() if isinstance(x, Segments)}
    _check_whole(source, groups, teacher)
    teachers: dict[str, Teacher] = named_teachers(teacher)
    kinds = _kinds(objective, source, segments, inputs)
    call = DenseCall(source, targets, segments, teachers, *kinds, **numbers, support=support)
    call, which = _choose_rows(call, rows)
    devices = [source.device] if source.device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices), torch.enable_grad():
        options = Options(host_read, prepared, isinstance(teacher, Mapping))
        return _compare(objective, call, options, which, _described(plan))


def _check_whole(source: Source, segments: Mapping[str, Segments | None], teacher: Any) -> None:
    every = [source, *(teacher.values() if isinstance(teacher, Mapping) else [teacher])]
    every += [t for x in every if isinstance(x, Routed) for t in x.teachers.values()]
    if any(getattr(x, "shard", None) is not None or _is_distributed(x) for x in every):
        raise ValueError(
            "source: is one rank's shard of a vocabulary, but verify needs the whole; verify the same objective on a "
            "whole head (a small one will do)"
        )
    for name, x in segments.items():
        if x is not None and x.group is not None:
            raise ValueError(f"{name}: lie on several ranks; verify on segments without a group")


def _is_distributed(source: Any) -> bool:
    return any(hasattr(x, "placements") for x in getattr(source, "tensors", ()))


def _described(plan: Any) -> str:
    terms = ", ".join(f"{t.name}: {t.kind}" for t in plan.terms)
    return f"{terms}; backend {plan.backend}; gradients {plan.grade}"


def _kinds(
    objective: Objective, source: Source, segments: Segments | None, inputs: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, str]]:
    """The inputs, each marked with its kind, and the kinds: with fewer rows a shape alone might fit another kind."""
    read = readings(objective.terms, objective.metrics)
    laid = lay_out(read, {n: inputs[n] for n in inputs if n in read}, source, segments)  # class weights are not read
    kinds = dict.fromkeys(inputs, "whole") | {n: shape.kind for n, (_, shape) in laid.items()}
    targets = {t.targets: "row" for t in objective.terms.values() if t.targets is not None and t.targets in inputs}
    laid, kinds = {n: x for n, x in laid.items() if n not in targets}, {**kinds, **targets}
    plain = {n for n, kind in kinds.items() if kind == "scalar" or n == "pairs"}
    marked = {n: x if n in plain else MARKS[kinds[n]](x) for n, (x, _) in laid.items()}
    return {**inputs, **marked}, kinds


def _choose_rows(call: DenseCall, most: int) -> tuple[DenseCall, str]:
    """About `most` rows, in whole segments, and so many that their count equals no other size; and a text for it."""
    source, targets, segments, pairs = call.source, call.targets, call.segments, call.inputs.get("pairs")
    N = torch.Size(source.leading).numel()
    device = source.device
    valid = torch.ones(N, dtype=torch.bool, device="cpu") if targets is None else (targets != IGNORE).reshape(-1).cpu()
    if segments is None:
        keep = (
            torch.arange(N, device="cpu")
            if most >= N
            else torch.linspace(0, N - 1, most, dtype=torch.float64, device="cpu").round().long().unique()
        )
        while len(keep) > 2 and _ambiguous(keep, valid, call, 0):
            keep = keep[:-1]
        which = f"{len(keep)} of {N} rows" if len(keep) < N else f"all {N} rows"
        return (call if len(keep) == N else _on_rows(call, keep.to(device), None)), which
    ids = segments.ids.reshape(-1).cpu()
    order = list(range(segments.num_segments)) if pairs is None else pairs.reshape(-1).tolist()
    chosen = _choose_segments(dict.fromkeys(order), ids, valid, call, most)
    keep = torch.isin(ids, torch.tensor(chosen, device="cpu")).nonzero()[:, 0]
    every = len(keep) == N and len(chosen) == segments.num_segments
    which = f"{len(keep)} of {N} rows, {len(chosen)} of {segments.num_segments} segments"
    return (call if every else _on_rows(call, keep.to(device), chosen)), which


def _choose_segments(order: Any, ids: Tensor, valid: Tensor, call: DenseCall, most: int) -> list[int]:
    """Take segments in order until there are enough rows and no count equals another size; see `_ambiguous`."""
    step = 2 if call.inputs.get("pairs") is not None else 1  # both of a pair
    chosen: list[int] = []
    order, rows = list(order), 0
    sizes = torch.bincount(ids[ids >= 0], minlength=max(order, default=0) + 1).tolist()
    for i in range(0, len(order), step):
        new = order[i : i + step]
        size = sum(sizes[s] for s in new)
        if chosen and rows + size > most:
            keep = torch.isin(ids, torch.tensor(chosen, device="cpu")).nonzero()[:, 0]
            if not _ambiguous(keep, valid, call, len(chosen)):
                break
        if size:
            chosen += new
            rows += size
    return sorted(chosen)


def _ambiguous(keep: Tensor, valid: Tensor, call: DenseCall, segments: int) -> bool:
    """Whether the number of rows equals that of segments, pairs or columns, so that a shape would be ambiguous."""
    counts = {len(keep), int(valid[keep].sum())}
    pairs = call.inputs.get("pairs")
    others = {call.source.vocab} | ({segments} if segments else set()) | (set() if pairs is None else {len(pairs)})
    return bool(counts & others)


def _on_rows(call: DenseCall, keep: Tensor, chosen: Sequence[int] | None) -> DenseCall:
    """The call on these rows, flattened; segments are renumbered."""
    lead = len(call.source.leading)
    rows = lambda x: x.reshape(-1, *x.shape[lead:])[keep]
    segments, inputs = call.segments, dict(call.inputs)
    if segments is not None and chosen is not None:
        number = torch.full((segments.num_segments + 1,), -1, dtype=torch.long, device=keep.device)
        number[torch.tensor(chosen, device=keep.device)] = torch.arange(len(chosen), device=keep.device)
        segments = Segments(number[rows(segments.ids).long()], len(chosen))  # id -1 reads the last entry, -1
    for name, x in call.inputs.items():
        kind, inner = call.kinds[name], getattr(x, "value", x)
        if isinstance(x, Segments):  # of a reduction; segments left without rows do not count
            inner = Segments(rows(x.ids), x.num_segments)
        if kind == "row":
            inner = rows(inner)
        elif kind == "segment" and chosen is not None:
            inner = inner[torch.tensor(chosen, device=inner.device)]
        elif name == "pairs" and chosen is not None:
            inner = number.to(inner.device)[inner.long()]
            inner = inner[(inner >= 0).all(-1)]
        inputs[name] = inner if inner is getattr(x, "value", x) or not hasattr(x, "value") else type(x)(inner)
    teachers: dict[str, Any] = {}
    for name, t in call.teachers.items():
        if isinstance(t, Routed):
            teachers[name] = Routed({n: of_rows(x, rows) for n, x in t.teachers.items()}, rows(t.route))
            continue
        teachers[name] = Sparse(rows(t.ids), rows(t.logprobs)) if isinstance(t, Sparse) else of_rows(t, rows)
    targets = None if call.targets is None else rows(call.targets)
    support = None if call.support is None else rows_of(call.support, keep)
    source = of_rows(call.source, rows)
    return call._replace(
        source=source, targets=targets, segments=segments, inputs=inputs, teachers=teachers, support=support
    )


class Run(NamedTuple):
    label: str
    numbers: dict[str, float]
    grads: dict[str, Tensor]


class Options(NamedTuple):
    """Options of a call that the dense reference does not need."""

    host_read: bool
    prepared: bool
    named: bool  # whether teachers were passed by name


def _run(objective: Objective, call: DenseCall, label: str, options: Options, memory: int | None = None) -> Run:
    """Run the objective itself, on copies of the tensors."""
    leaves = leaves_of(call, None)
    tensors = {n: x for n, x in leaves.items() if not n.startswith("input ")}
    source = call.source
    if isinstance(source, Logits) and source.inplace:
        tensors = {n: x.clone() for n, x in tensors.items()}  # a leaf cannot be overwritten
    source = replaced(source, **tensors, **({} if memory is None else {"memory": memory}))
    inputs: dict[str, Any] = {}
    for name, x in call.inputs.items():
        inner = leaves.get(f"input {name}", getattr(x, "value", x))
        inner = inner.clone() if isinstance(inner, Tensor) and not inner.requires_grad else inner
        inputs[name] = type(x)(inner) if hasattr(x, "value") else inner
    teacher: Any = dict(call.teachers) if options.named else next(iter(call.teachers.values()), None)
    targets: Any = call.targets if call.targets is None else call.targets.clone()
    support: Any = call.support
    if options.prepared:
        targets, support = prepare(targets, call.segments, support=support, vocab_ids=source.vocab_ids), None
    out = objective(
        source, targets, segments=call.segments, num_items=call.num_items, num_segments=call.num_segments,
        weights=call.weights, grad_scale=call.grad_scale, host_read=options.host_read, teacher=teacher,
        support=support, **inputs,
    )  # fmt: skip
    wanted = {n: x for n, x in leaves.items() if x.requires_grad}
    grads = {n: torch.zeros_like(x) for n, x in wanted.items()}
    if out.loss.requires_grad:
        found = torch.autograd.grad(out.loss, list(wanted.values()), allow_unused=True)
        grads |= {n: g for n, g in zip(wanted, found, strict=True) if g is not None}
    numbers = {"loss": float(out.loss.detach())} | {f"term {n}": float(x) for n, x in out.terms.items()}
    return Run(label, numbers | {f"metric {n}": float(m) for n, m in out.metrics.items()}, grads)


def _runs(objective: Objective, call: DenseCall, options: Options) -> Iterator[Run]:
    yield _run(objective, call, "first call", options)
    yield _run(objective, call, "later call", options)
    source = call.source
    if isinstance(source, Linear):
        N = torch.Size(source.leading).numel()
        per_row = source.row_bytes + sum(8 * t.vocab for t in call.teachers.values() if not isinstance(t, Sparse))
        per_row += 8 * source.vocab * len(objective.terms) * ("class_weight" in call.inputs)  # as a teacher
        yield _run(objective, call, "in chunks", options, max(1, N // 3) * per_row)


def _compare(objective: Objective, call: DenseCall, options: Options, which: str, plan: str) -> Verification:
    plain = call._replace(inputs={n: getattr(x, "value", x) for n, x in call.inputs.items()})
    fact_dtype, unchecked = call.source.fact_dtype, []
    runs = list(_runs(objective, call, options))
    wide = torch.float32 if call.source.device.type == "mps" else torch.float64
    try:
        truth = answer(objective, plain, wide, leaves_of(plain, wide))
    except (RuntimeError, TypeError) as error:  # a function that fixes the dtype of its tensors
        if fact_dtype == wide:
            raise
        wide = fact_dtype
        first = str(error).strip().splitlines()[0]
        unchecked.append(f"{wide} in place of float64, in which a function cannot run: {first}")
        truth = answer(objective, plain, wide, leaves_of(plain, wide))
    again = answer(objective, plain, wide, leaves_of(plain, wide))
    eager = truth if fact_dtype == torch.float64 else answer(objective, plain, fact_dtype, leaves_of(plain, None))
    nudged = truth if fact_dtype == torch.float64 else answer(objective, plain, wide, nudged_leaves(plain, wide))
    judged = list(_judge(runs, truth, (eager, nudged), call.source))
    beyond = [c.what for c in judged if math.isinf(c.allowed)]
    unchecked += [f"the {what}, which overflows in plain PyTorch too" for what in beyond]
    compared = [_repeat(truth, again), *(c for c in judged if c.what not in beyond)]
    found = {n: truth.grads.get(n) for n in (*tensors_of(call.source), *truth.grads)}
    unchecked += [f"the gradient of {n}, which does not require grad" for n, g in found.items() if g is None]
    unchecked += [f"more than that the gradient of {n} is 0" for n, g in found.items() if g is not None and not g.any()]
    return Verification(tuple(compared), tuple(unchecked), which, plan)


def _repeat(truth: Answer, again: Answer) -> Compared:
    """Run the reference twice: a function that draws random numbers or changes what it reads gives itself away."""
    worst = 0.0
    for name, part in truth.numbers.items():
        if error := _difference(float(part.number), float(again.numbers[name].number)):
            error /= max(part.scale, 1e-30)
            worst = error if math.isnan(error) else max(worst, error)
    return Compared("the functions, called twice", worst, 1e-9, "a function is not deterministic")


def _judge(runs: list[Run], truth: Answer, near: tuple[Answer, Answer], source: Source) -> Iterator[Compared]:
    """`near`: the reference in the source's own precision, and on numbers changed by a rounding of that precision."""
    eager, _ = near
    dtype = source.fact_dtype
    narrow = isinstance(source, Linear) and source.gemm_dtype.itemsize < 4
    times = 4 if narrow else 2
    for name, part in truth.numbers.items():
        few = FEW[dtype] * torch.finfo(dtype).eps * max(part.scale, abs(_finite(part.number)))
        flips = part.step if dtype != torch.float64 else 0.0
        allowed = times * max(x.numbers[name].error(part) for x in near) + few + flips
        errors = [(_difference(run.numbers.get(name, math.nan), float(part.number)), run.label) for run in runs]
        yield Compared(name, *_worst(errors, allowed))
    for name in (n for n in runs[0].numbers if n not in truth.numbers):
        yield Compared(name, math.nan, 0.0, "no function returns it")
    for name, grad in truth.grads.items():
        own = min(runs[0].grads[name].dtype, dtype, key=lambda d: d.itemsize)  # the terms' weights are no wider
        scale = float(grad.abs().max()) if grad.numel() else 0.0
        lost = max(_largest(x.grads[name], grad) for x in near)
        allowed = times * lost + FEW[own] * torch.finfo(own).eps * scale
        if grad.isfinite().all() and not eager.grads[name].isfinite().all():  # overflows float16
            allowed = math.inf
        errors = [(_largest(run.grads[name], grad), run.label) for run in runs]
        yield Compared(f"gradient of {name.removeprefix('input ')}", *_worst(errors, allowed))


def _worst(errors: list[tuple[float, str]], allowed: float) -> tuple[float, float, str]:
    error, label = max(errors, key=lambda e: (math.isnan(e[0]), e[0]))
    return error, allowed, label


def _largest(got: Tensor, truth: Tensor) -> float:
    return float((got.double() - truth.double()).abs().max()) if truth.numel() else 0.0


def _difference(a: float, b: float) -> float:
    return 0.0 if a == b or (math.isnan(a) and math.isnan(b)) else abs(a - b)


def _finite(x: Tensor) -> float:
    return float(x) if math.isfinite(float(x)) else 0.0
