"""The Triton backend as the engine sees it: all that `headloss.backends.torch` offers, and a visit in one launch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from headloss.backends.triton import cached_launches, columns, logit_facts, second_read, settle, settled_pull, sweeps
from headloss.backends.triton import product as product
from headloss.backends.triton import product_ranks as product_ranks
from headloss.backends.triton import teacher_pulls as teacher_pulls
from headloss.backends.triton import teachers as teacher_sweeps
from headloss.backends.triton import totals as row_totals
from headloss.backends.triton import visit as visits
from headloss.backends.triton.printer.elements import printed
from headloss.backends.triton.printer.facts import check_sums
from headloss.backends.triton.printer.lower import Unprintable
from headloss.backends.triton.printer.program import Program
from headloss.backends.triton.printer.program import lower as print_terms
from headloss.backends.triton.printer.segments import lower as print_segments
from headloss.facts import Partial, Want
from headloss.teachers import TeacherChunk

NAME = "triton"

divergence_pass, merge_repeated, scale_ = second_read.divergence_pass, teacher_sweeps.merge_repeated, sweeps.scale_
# a visit: facts, values, metrics and gradient of some rows in one launch; its arguments, and its sums over rows
visit, Arguments, totals = visits.visit, visits.Arguments, row_totals.totals
Visits, Settles = cached_launches.Visits, cached_launches.Settles
# segment losses, settled between the two sweeps
sums_matrix, Settling, Weights, spans = sweeps.sums_matrix, settle.Settling, settle.Weights, settle.spans
packed, pull_settled = settle.packed, settled_pull.pull_settled
count_targets = row_totals.count_targets
# a linear head at some columns of each row, or at the same columns of all rows
project, combine, take = columns.project, columns.combine, columns.take
find_places = columns.find_places


def sums(*call: Any, teachers: Sequence[TeacherChunk] = (), **options: Any) -> Partial:
    """The partial of some columns, and every teacher's; see `sweeps.sums` and `teachers.sums`."""
    check_sums(call[2])
    partial = teacher_sweeps.sums(*call, teachers=teachers, **options) if teachers else sweeps.sums(*call, **options)
    if not call[2].of_logits:
        return partial
    return logit_facts.with_sums(partial, call[0], call[2], teachers, options["scale"], options["softcap"])


def pull(*call: Any, teachers: Sequence[TeacherChunk] = (), **options: Any) -> None:
    """Write the gradient with respect to the raw logits; see `sweeps.pull` and `teacher_pulls.pull`."""
    if not teachers:
        sweeps.pull(*call, **options)
    elif logit_facts.pulls_on_logits(options["teacher_pulls"]):
        logit_facts.pull(teacher_pulls.pull, call, {"teachers": tuple(teachers), **options})
    else:
        teacher_pulls.pull(*call, teachers=teachers, **options)


def takes_one_launch(C: int, V: int) -> bool:
    """Whether a visit of C rows takes one launch: always, unless the number of rows may decide."""
    return sweeps.BATCH_INVARIANT or visits.takes_one_launch(C, V)


def lower(
    terms: Mapping[str, tuple[Any, Any]],
    want: Want,
    inputs: Mapping[str, Any],
    metrics: Sequence[tuple[str, Any]],
    between: bool = False,
) -> tuple[Program | None, str]:
    """The program of a visit or, with `between`, of settling between two sweeps; or None, and why there is none."""
    if want.of_logits:
        return None, "a kernel with a loss in it sums over the softmax alone"
    by_segment = between or any(trace.kind == "segment" for _, trace in terms.values())
    try:
        program = (print_segments if by_segment else print_terms)(terms, want, inputs, metrics)
    except Unprintable as error:
        return None, str(error)
    if program.left_out:
        name, operation = program.left_out[0]
        return None, f"metric {name!r}: {operation}"
    return program, ""


def cannot_run(want: Want) -> str | None:
    """The divergence that has no kernels, and the operation that prevents them; None if all can run."""
    for element in dict.fromkeys(f.element for f in want.facts if f.element is not None):
        try:
            printed(((0, element),), 1)
        except Unprintable as error:
            return f"{element}: its kernels have no form of {error}"
    return None
