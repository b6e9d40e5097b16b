"""`objective.explain`: what a call would do, in words and numbers, without running it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from headloss.backends import choose
from headloss.engine.arguments import CallArguments, Chunk
from headloss.engine.bind import chunked_because
from headloss.engine.budget import COPIES, Cost, chunk_rows, fixed_bytes_of
from headloss.engine.budget import pieces as parts
from headloss.engine.logits_forward_grad import makes_grad_in_forward, reads_all_rows
from headloss.engine.plan import Plan
from headloss.engine.support_sweep import support_chunks, width
from headloss.engine.teachers import DenseTeacherRows, TeacherRows, cost_of, heads_of, most_rows
from headloss.facts import FACTS
from headloss.rows import Rows
from headloss.segments import Segments
from headloss.sources import Linear, Source, parse_bytes

RESULTS = ("gradient of", "weight gradient")


class TermPlan(NamedTuple):
    name: str
    loss: str
    kind: str  # "row", "segment" or "batch"
    reason: str  # the operation that decided it
    takes: str = ""  # its inputs that have other names in the call


class Explanation(NamedTuple):
    """The plan of a call.  `print` it."""

    source: str
    backend: str
    facts: tuple[str, ...]
    terms: tuple[TermPlan, ...]
    off: tuple[str, ...]
    grade: str
    launches: str  # which kernels run the loss, and why
    first_call: dict[str, float]  # seconds that the first call of this form spent, if there was one
    rows: int
    rows_total: int
    vocab: int
    chunks: int
    forward_sweeps: int  # over the vocabulary, without grad mode
    sweeps: int  # forward and backward
    gemms: int  # forward and backward; 1 without grad mode
    teacher_gemms: int  # for the teachers' logits
    host_reads: int
    read_because: str  # why the host reads the targets, and so waits for them; empty if it does not
    collectives: dict[str, int]  # by purpose, forward and backward
    bytes: dict[str, int]  # by purpose
    code: str = ""  # the printed program, if it was asked for
    products: str = ""  # whose matrix products run, and why
    whole: Any = None  # with a support, the Explanation of the terms on the whole vocabulary

    @property
    def beyond(self) -> int:
        """Bytes that a call holds at one time beyond its inputs and its results."""
        return sum(n for what, n in self.bytes.items() if not what.startswith(RESULTS))

    def __str__(self) -> str:
        lines = [
            f"{self.source}: {self.rows} of {self.rows_total} rows x {self.vocab} columns, backend {self.backend}",
            f"facts        {', '.join(self.facts) or 'none'}",
        ]
        for t in self.terms:
            lines.append(f"term         {t.name} ({t.loss}{t.takes}): {t.kind}, {t.reason}")
        for name in self.off:
            lines.append(f"term         {name}: switched off, costs nothing")
        lines.append(f"gradients    {self.grade}")
        lines += [f"products     {self.products}"] if self.products else []
        lines += [f"kernels      {self.launches}"] if self.launches else []
        chunks = "1 chunk" if self.chunks == 1 else f"{self.chunks} chunks"
        gemms = f", {self.gemms} GEMMs over {chunks} (1 without grad)" if self.gemms else ""
        gemms += (
            f", {self.teacher_gemms} GEMM{'s' * (self.teacher_gemms > 1)} of teachers" if self.teacher_gemms else ""
        )
        passes = f"{self.sweeps} {'pass' if self.sweeps == 1 else 'passes'} over the vocabulary"
        lines.append(f"work         {passes} ({self.forward_sweeps} without grad){gemms}")
        waits = f"{self.host_reads} for the device ({self.read_because})" if self.read_because else "none"
        lines.append(f"waits        {waits}")
        counted = [f"{n} {what}" for what, n in self.collectives.items()]
        lines.append(f"collectives  {', '.join(counted) or 'none'}")
        lines += [f"memory       {size_of(n):>10}  {what}" for what, n in self.bytes.items()]
        spent = ", ".join(f"{s:.2f} s {_STEPS.get(what, what)}" for what, s in self.first_call.items())
        lines += [f"first call   {spent}"] if spent else []
        if self.code:
            lines += ["", self.code]
        lines += ["", f"and on the whole vocabulary, {self.whole}"] if self.whole is not None else []
        return "\n".join(lines)


_STEPS = {"tracing": "tracing the losses", "printing": "writing the kernel", "compiling": "compiling it"}


def explain(
    plan: Plan,
    arguments: CallArguments,
    rows: Rows,
    chunks: Sequence[Chunk] | None,
    teacher_rows: Mapping[str, TeacherRows],
    backend: str,
    read_because: str,
    show_source: bool = False,
) -> Explanation:
    source = arguments.source
    read_because = "" if source.device.type == "cpu" else read_because  # meta tensors stand for a GPU's
    engine = plan.backend.NAME
    cost = cost_of(teacher_rows, source, rows)
    terms = tuple(TermPlan(t.name, t.call.signature.name, *t.trace[:2], _taken(t)) for t in plan.terms)
    if isinstance(source, Linear):
        walked = chunks or [Chunk(part) for part in parts(rows.count, chunk_rows(source, cost, rows.count))]
        pieces = len(walked)
        sizes, grade = _linear_bytes(source, walked, cost), _linear_grade(plan, arguments.segments, rows, chunks)
        gemms = 0 if plan.want.only_ids else 3 if chunks is not None else 4 + _divergences_across_ranks(plan, source)
    else:
        pieces, gemms = len(chunks) if chunks else 1, 0
        written = 0 if source.inplace else source.logits.numel() * source.logits.element_size()
        sizes = {"gradient of logits" + (" (in place)" if source.inplace else ""): written}
        grade = "logits are read for the facts, then again to write the gradient"
        if plan.program is not None and not plan.program.by_segment:
            again = any(f.element is not None for f in plan.want.facts)
            grade = f"in the same pass: logits are read {'twice for a divergence' if again else 'once'}, written once"
        if makes_grad_in_forward(plan, source) and (chunks or reads_all_rows(source, rows, teacher_rows)):
            grade = "in the same pass: exponentials are kept in the gradient's buffer and reused"
            if source.fact_dtype != source.logits.dtype and chunks:
                held = max(c.rows.stop - c.rows.start for c in chunks) * source.columns * source.fact_dtype.itemsize
                sizes["exponentials of a chunk"] = held
        most = most_rows(teacher_rows)
        if most is not None:
            sizes["teachers' logits"] = min(most, rows.count) * cost.row
            sizes["rows of teachers' weights, and copies"] = cost.fixed_bytes
    chunked = chunked_because(plan, source)
    products = "" if engine != "triton" or not isinstance(source, Linear) else f"cuBLAS, chunk by chunk: {chunked}"
    bent = not chunked and _bends(plan)
    if not chunked:
        products = "the head's own; rows that are ignored or have no gradient are left out on the device"
        pieces = 1 if rows.count <= source.chunk_rows() else pieces  # type: ignore[union-attr]
        gemms = 3 if chunks is not None or pieces == 1 else 4
        twice = "" if gemms == 3 else ", which is computed again for the gradient"
        grade = f"facts in the first product{twice}, gradients from its exponentials by row factors"
        if bent:
            grade += ", one sweep over them first: a term moves entropy or sum_p2"
    sizes["facts, cotangents and coefficients"] = (
        rows.count * source.fact_dtype.itemsize * 2 * (len(plan.want.facts) + 1)
    )
    if plan.kept:
        pieces, gemms, products = len(_kept_parts(arguments, rows, teacher_rows)), 0, ""
        grade = "kept columns only: no full GEMM and no pass over the vocabulary"
        grade += "" if chunks else "; they are computed again for the gradient"
        sizes = _kept_bytes(arguments, rows, teacher_rows)
    swept = chunked and not plan.want.only_ids and not plan.kept
    apart = int(plan.want.of_logits and engine == "triton")  # facts of the raw logits, and their gradient
    return Explanation(
        source=type(source).__name__,
        backend=engine,
        facts=tuple(map(str, plan.want.facts)),
        terms=terms,
        off=plan.off,
        grade=grade,
        launches=(_between(plan, len(chunks or ()) if pieces > 1 else 1) if not chunked else _launches(plan))
        if engine == "triton"
        else _without_triton(plan, source, backend),
        first_call=plan.times,
        rows=rows.count,
        rows_total=rows.total,
        vocab=source.vocab,
        chunks=pieces,
        forward_sweeps=1 + apart if swept else 0,
        sweeps=2 + 2 * apart if swept else int(bent),
        gemms=gemms,
        teacher_gemms=0 if plan.kept else _teacher_gemms(plan, source, teacher_rows, chunks, pieces),
        host_reads=int(read_because != ""),
        read_because=read_because,
        collectives=_collectives(plan, arguments, pieces if chunks is not None else 1),
        bytes={what: n for what, n in sizes.items() if n},
        code=_code(plan, engine) if show_source else "",
        products=products,
    )


def _kept_parts(
    arguments: CallArguments, rows: Rows, teacher_rows: Mapping[str, TeacherRows]
) -> list[tuple[slice, int, int]]:
    """Runs of rows whose kept logits are made together: the rows, the places per row, and the bytes."""
    source, support = arguments.source, arguments.support
    assert support is not None
    each = source.fact_dtype.itemsize * (1 + sum(isinstance(g, DenseTeacherRows) for g in teacher_rows.values()))
    known = support.known()
    parts = support_chunks(known, rows, source, each // source.fact_dtype.itemsize - 1)
    widths = [width(known, rows, part) for part in parts]
    return [(part, W, (part.stop - part.start) * W * each) for part, W in zip(parts, widths, strict=True)]


def _kept_bytes(arguments: CallArguments, rows: Rows, teacher_rows: Mapping[str, TeacherRows]) -> dict[str, int]:
    source, parts = arguments.source, _kept_parts(arguments, rows, teacher_rows)
    part, width, most = max(parts, key=lambda x: x[2])
    found = {f"kept logits of {part.stop - part.start} rows x {width}": most}
    if isinstance(source, Linear):
        found["gradient of hidden"] = source.hidden.numel() * source.hidden.dtype.itemsize
        found |= {**fixed_bytes_of(source, len(parts) > 1), COPIES: 0}
        found["weight gradient"] = source.weight.numel() * source.weight.element_size()
    else:
        found["gradient of logits"] = 0 if source.inplace else source.logits.numel() * source.logits.element_size()
    return found


def _code(plan: Plan, engine: str) -> str:
    if plan.program is not None:
        return plan.program.source
    reason = plan.reason if engine == "triton" else f'backend {engine}; backend="triton" shows what a GPU would run'
    return f"# no source: {reason}"


def _without_triton(plan: Plan, source: Source, backend: str) -> str:
    """Why "auto" did not choose the Triton backend, where that exists."""
    why = choose(backend, source.device, source.fact_dtype).cannot_run(plan.want)
    return "" if why is None else f"none of Triton's, which cannot run {why}"


def _bends(plan: Plan) -> bool:
    """Whether some term's gradient may have more parts than a p_j + c + y 1[j = target]."""
    settles = plan.settles or plan.program
    if settles is not None:
        return any(x for present in settles.present for x in present[1:3])
    one = torch.ones((), dtype=torch.float32, device="cpu")
    read = {fact for term in plan.terms for fact in {*term.call.facts} - term.trace.unused}
    pulls = [FACTS[fact.name].pull(one, one, one) for fact in read]
    return any(pull is not None and (pull.b is not None or pull.e is not None) for pull in pulls)


def _between(plan: Plan, chunks: int) -> str:
    if plan.settles is None:
        return "between the products the losses run in torch"
    return f"between the products one launch{' per chunk' * (chunks > 1)} settles facts and losses"


def _launches(plan: Plan) -> str:
    if plan.program is not None and plan.program.by_segment:
        what = "segments" if plan.kind == "segment" else "rows"
        why = f" ({plan.reason})" if plan.reason else ""
        return f"one launch for the facts, one that settles the {what}, one for the gradient{why}"
    if plan.program is not None:
        return "one launch per chunk: the loss runs inside the sweep"
    apart = "; facts of the logits themselves in PyTorch's operations, on tiles of rows" if plan.want.of_logits else ""
    return f"one launch for the facts, one for the gradient ({plan.reason}){apart}"


def _teacher_gemms(
    plan: Plan, source: Source, teacher_rows: Mapping[str, TeacherRows], chunks: Sequence[Chunk] | None, pieces: int
) -> int:
    """How many GEMMs make teachers' logits: one per teacher in a visit.  Without a visit, one more for the gradient,
    and one for a second read across ranks, unless there is a single chunk, whose logits still exist."""
    made = len(heads_of(teacher_rows))
    if chunks is not None:
        return made
    return made * (2 + (_divergences_across_ranks(plan, source) and not (isinstance(source, Linear) and pieces == 1)))


def _divergences_across_ranks(plan: Plan, source: Source) -> bool:
    """Whether the logits of all rows are made once more, after the gather, for a divergence's second read."""
    return source.shard is not None and any(f.element is not None for f in plan.want.facts)


def _linear_grade(plan: Plan, segments: Segments | None, rows: Rows, chunks: Sequence[Chunk] | None) -> str:
    if plan.want.only_ids:
        return "only the teacher's ids: no softmax over the vocabulary and no full GEMM"
    if chunks is not None:
        twice = ", read twice for a divergence" if any(f.element is not None for f in plan.want.facts) else ""
        if plan.kind != "row" and [chunk.segments for chunk in chunks] == [None]:
            return f"in the same pass: the logits of all rows fit into one chunk, and are computed once{twice}"
        return f"in the same pass: each chunk's logits are computed once{twice}"
    batch = [f"{t.name}: {t.trace.reason}" for t in plan.terms if t.trace.kind == "batch"]
    if batch:
        why = batch[0]
    elif segments is not None and segments.group is not None:
        why = "segments lie on several ranks"
    elif rows.stats is None:
        why = "segment lengths are not known to the host"
    elif not rows.by_segment:
        why = "segments are interleaved, and a metric may depend on the order of rows"
    else:
        why = "a segment is longer than a chunk"
    return f"facts of all rows first, then logits again for the gradient ({why})"


def _linear_bytes(source: Linear, chunks: Sequence[Chunk], cost: Cost) -> dict[str, int]:
    most = lambda of: max([of(c).stop - of(c).start for c in chunks], default=0)
    longest, runs = most(lambda c: c.rows), most(lambda c: c.whole)
    several, budget = sum(c.is_last for c in chunks) > 1, parse_bytes(source.memory)
    others = {"rows of teachers' weights, and copies": cost.fixed_bytes, **fixed_bytes_of(source, several)}
    left, named = budget, dict[str, int]()
    for what, n in others.items():
        room = source.room([*named.values(), n], source.row_bytes + cost.row)
        named[what if room < left else f"{what}, beyond the budget"] = n
        left = room
    return {
        f"chunk of {runs} rows x {source.columns} (budget {size_of(budget)})": runs * source.row_bytes,
        "teachers' logits" + (f" of {longest} rows" if longest < runs else ""): longest * cost.row,
        "gathered hidden rows": runs * cost.gathered,
        **named,
        "gradient of hidden": source.hidden.numel()
        * (source.fact_dtype if source.is_fp16 else source.hidden.dtype).itemsize,
        "weight gradient": 0 if _added(source, several) else source.weight.numel() * source.weight.element_size(),
    }


def _collectives(plan: Plan, arguments: CallArguments, visited: int) -> dict[str, int]:
    source, segments = arguments.source, arguments.segments
    found: dict[str, int] = {}
    if source.shard is not None:
        if plan.want.only_ids:
            found["all-reduce of the logits at the ids"] = 1
        else:
            found["all-gather of partials"] = visited
        if any(f.element is not None for f in plan.want.facts):
            found["all-reduce of divergences"] = visited
        if isinstance(source, Linear) and not source.shard.partial_hidden:
            found["all-reduce of the gradient of hidden"] = 1
    if segments is not None and segments.group is not None:
        found["all-reduce of segment counts"] = 1
        weighted = sum(t.sums_weights and t.trace.value == "row" for t in plan.terms)
        if weighted:
            found["all-reduce of the sum of row weights"] = weighted
        sums = sum(sum(t.trace.sums) for t in plan.terms)
        if sums:
            found["all-reduce of segment totals, forward and backward"] = sums
    return found


def _added(source: Linear, several: bool) -> bool:
    """Whether the product that makes the weight's gradient adds it to main_grad itself."""
    return not several and source.weight_grad_into == "main_grad" and not source.is_fp16


def size_of(n: int) -> str:
    """Bytes in words."""
    for unit in ("B", "KiB", "MiB"):
        if n < 1024:
            return f"{n:.0f} {unit}" if unit == "B" else f"{n:.1f} {unit}"
        n /= 1024  # type: ignore[assignment]
    return f"{n:.2f} GiB"


def _taken(term: Any) -> str:
    taken = "".join(f", {p.name} from {p.takes}" for p in term.call.signature.parameters if p.takes)
    return taken if term.call.share is None else f"{taken}, {term.call.share}"
