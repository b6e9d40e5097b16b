"""The sweep of `hl.row_facts`, which finds facts without any loss, and the checks of what it is asked for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor

from headloss.deferred_checks import should_defer
from headloss.derived_teachers import Top, check_top
from headloss.engine.bound_teachers import bind_teachers, restrict_teachers
from headloss.engine.checks import check_elements, check_support, check_targets_wanted, check_teachers
from headloss.engine.plan import KEPT, backend_for
from headloss.engine.product import ProductSweep, why_chunked
from headloss.engine.support_sweep import SupportSweep
from headloss.engine.sweeps import Sweep
from headloss.engine.teachers import name_teachers, named_teachers, sums_hidden
from headloss.facts import FACTS, Fact, Want
from headloss.options import is_number, shown
from headloss.prepared import Prepared
from headloss.rows import bind_rows
from headloss.sources import Linear, Source, Teacher
from headloss.support import Support
from headloss.teachers import SPARSE, TOP
from headloss.trace.call import Call
from headloss.trace.signature import CANDIDATES, COMPARING, UNNAMED, Parameter, Signature, passed_names, suggest, top_of


def facts_sweep(
    source: Source,
    targets: Tensor | Prepared | None,
    want: Sequence[Any],
    teacher: Teacher | Mapping[str, Teacher] | None,
    backend: str,
    host_read: bool,
    top: int | None = None,
    support: Support | None = None,
) -> Sweep:
    """The sweep of `row_facts`."""
    want = _asked(want)
    of_top = [x for x in want if str(x if isinstance(x, str) else next(iter(x))) in TOP]
    if top is not None:
        check_top(top)
        if not of_top:
            raise ValueError(
                f"top: none of the wanted facts takes a number of columns; ask for {', '.join(TOP)}, or leave it out"
            )
    elif of_top:
        raise ValueError(f"top: needed by the fact {of_top[0]!r}; say of how many columns, top=K")
    teachers = name_teachers(_with_top(teacher, want, top), source)
    wanted = [_read_fact(x, teachers) for x in want]
    if not wanted:
        raise ValueError(f"want: wanted at least one of {', '.join(FACTS)}")
    if targets is None:
        check_targets_wanted(wanted)
    chosen = Want(wanted)
    engine = backend_for(backend, source, chosen)
    kept = support is not None
    if kept:
        if top is not None:
            raise ValueError("top: a row may keep fewer columns; leave out top= or support=")
        check_support(support, source)
        check_elements(chosen)
    chunked = KEPT if kept else why_chunked(source, chosen, engine)
    linear = isinstance(source, Linear) and chunked != "" and not kept
    reads = host_read and (linear or source.shard is not None or not should_defer(source.device))
    rows = bind_rows(
        source.leading, targets, None, vocab=source.vocab, device=source.device, host_read=reads,
        count=getattr(engine, "count_targets", None),
    )  # fmt: skip
    if support is not None:
        restricted = restrict_teachers(teachers, support, rows.given, source, engine)
        sweep = SupportSweep(
            source, rows, chosen, engine, bind_teachers(restricted, chosen.teachers, source, rows, engine)
        )
        sweep.keep(support)
        sweep.terms = str(sums_hidden(source))
        return sweep
    teacher_rows = bind_teachers(teachers, chosen.teachers, source, rows, engine)
    program, kind = None, Sweep if chunked else ProductSweep
    if not chosen.teachers and source.shard is None and engine.lower is not None:
        # a program without terms: only facts, in one launch or between a head's own products
        program, _ = engine.lower({}, chosen, {}, (), not chunked)
    whole = kind(source, rows, chosen, engine, teacher_rows, program)
    whole.terms = str(sums_hidden(source))
    return whole


def _asked(want: Any) -> list[Any]:
    """Names, (name, temperature) or (name, temperature, teacher): a list of them."""
    wanted = [want] if isinstance(want, str) or not isinstance(want, Iterable) else list(want)
    for x in wanted:
        if not (isinstance(x, str) or (isinstance(x, tuple | list) and 2 <= len(x) <= 3)):
            hint = f"; a single one goes into a list, [{shown(want)}]" if isinstance(want, tuple) else ""
            raise TypeError(f"want: wanted names of facts or (name, temperature), got {shown(x)}{hint}")
    return wanted


def _with_top(teacher: Any, want: Sequence[Any], top: int | None) -> Any:
    """The teachers and, as one more, the likeliest columns of each row."""
    if top is None:
        return teacher
    teachers = named_teachers(teacher)
    names = [x if isinstance(x, str) else next(iter(x)) for x in want]
    given = passed_names(teachers)
    of = (given[0] if len(given) == 1 else UNNAMED) if "teacher_top_logprob" in names else None
    return {**teachers, top_of(top, of): Top(top, of)}


def _read_fact(want: Any, teachers: Mapping[str, Teacher]) -> Fact:
    """A fact from its name, (name, temperature) or (name, temperature, teacher)."""
    name, temperature, teacher = (*((want,) if isinstance(want, str) else tuple(want)), None, None)[:3]
    if not isinstance(name, str) or name not in FACTS or name in ("divergence", "teacher_tail_logprob"):
        near = suggest(str(name), FACTS) or f"; there are {', '.join(f for f in FACTS if f != 'divergence')}"
        raise ValueError(f"want: {name!r} is not a fact{near}")
    if temperature is not None and not (is_number(temperature) and temperature > 0):
        raise ValueError(f"want: wanted a positive temperature for {name!r}, got {shown(temperature)}")
    if name in COMPARING:
        given = passed_names(teachers)
        only = given[0] if len(given) == 1 else UNNAMED
        teacher = teacher or (CANDIDATES if name in SPARSE and CANDIDATES in teachers else only)
        if name in TOP:
            teacher = next(n for n, x in teachers.items() if isinstance(x, Top))
    elif teacher is not None:
        raise ValueError(f"want: {name!r} is the student's alone, got teacher {teacher!r}")
    fact = Fact(name, None if temperature is None else float(temperature), teacher)
    asked = Call(_read_fact, Signature("want", (Parameter(name, "fact", False, fact),), {}), {})
    check_teachers("want", asked, teachers)
    return fact
