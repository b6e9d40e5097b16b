"""Decide how each input of a call is laid out: one value per row, one per segment, or whole.

Dimension key:  N rows   V vocabulary   S segments   P pairs

The shape decides if only one layout fits: the targets' shape means one value per row, (S,) one per segment, and (V,),
(P,) or an integer table are whole.  If several fit, we do not guess.  A function may declare it,

    kto.per_segment = ("desirable", "kl")     all its other inputs of the targets' shape then have one value per row

or the caller may, with `PerRow`, `PerSegment` or `Whole` around the input; otherwise the call raises and names what
fits.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from headloss.deferred_checks import check_later, readable, should_defer
from headloss.immutable import Immutable
from headloss.segments import Segments, check_dense, check_device, integers
from headloss.sources import Source
from headloss.term import Term
from headloss.trace.call import Call
from headloss.trace.signature import Signature
from headloss.trace.trace import PAIRS, InputSpec


class Marked(Immutable):
    """An input marked with its layout.  Immutable, and like `Inputs` opaque to wrappers that cast loose tensors."""

    __slots__ = ("value",)
    value: Tensor
    kind: ClassVar[str]

    def __init__(self, value: Tensor) -> None:
        if not isinstance(value, Tensor):
            raise TypeError(f"{type(self).__name__}: wanted a tensor, got {type(value).__name__}")
        self._set(value=value)

    def __reduce__(self) -> Any:
        return type(self), (self.value,)

    def to(self, *args: Any, **kwargs: Any) -> Marked:
        """The same input with `Tensor.to` applied to its tensor."""
        return type(self)(self.value.to(*args, **kwargs))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({tuple(self.value.shape)}, {self.value.dtype})"


class PerRow(Marked):
    """An input with one value per row, in the targets' shape; more dimensions may follow.

    >>> objective(source, targets, segments=segments, reward=hl.PerRow(reward))
    """

    __slots__ = ()
    kind = "row"


class PerSegment(Marked):
    """An input with one value per segment: (S,); more dimensions may follow.

    >>> objective(source, targets, segments=segments, reward=hl.PerSegment(reward))
    """

    __slots__ = ()
    kind = "segment"


class Whole(Marked):
    """An input that belongs to no row, such as a table; functions get it unchanged.

    >>> objective(source, targets, class_weight=hl.Whole(class_weight))
    """

    __slots__ = ()
    kind = "whole"


MARKS: Mapping[str, type[Marked]] = {x.kind: x for x in (PerRow, PerSegment, Whole)}


class Reading(NamedTuple):
    """What the functions of an objective declare about one of its inputs."""

    row: tuple[str, ...] = ()  # functions that declare one value per row
    segment: tuple[str, ...] = ()  # functions that declare one value per segment
    likely: str | None = None  # for a row weight: the layout of the values that it weighs
    segments: tuple[str, ...] = ()  # functions that take it and segments, and declare nothing
    pairs: bool = False  # whether a function that takes it takes pairs


def readings(terms: Mapping[str, Term], metrics: Iterable[tuple[str, Call]]) -> dict[str, Reading]:
    """The `Reading` of every input that these terms and metrics take."""
    found: dict[str, Reading] = {}

    def undeclared(old: Reading, s: Signature) -> Reading:
        pairs = old.pairs or any(p.name == "pairs" for p in s.parameters)
        return old._replace(segments=(*old.segments, *([s.name] if s.wants("segments") else [])), pairs=pairs)

    calls = [(f"term {name!r}", term.call(None, {})) for name, term in terms.items()]
    for label, call in (*calls, *((f"metric {name!r}", call) for name, call in metrics)):
        for s in call.signatures:
            for p in s.parameters:
                if p.kind != "input" or p.teacher is not None:
                    continue
                old = found.get(p.key, Reading())
                if s.per_segment is None:
                    old = undeclared(old, s)
                elif p.name in s.per_segment:
                    old = old._replace(segment=(*old.segment, f"{label} ({s.name})"))
                else:
                    old = old._replace(row=(*old.row, f"{label} ({s.name})"))
                found[p.key] = old
        if call.share is not None:
            found[call.share] = Reading(row=(label,))
        for name in call.weight_names:
            s, old = call.signature, found.get(name, Reading())
            may = undeclared(Reading(), s)
            likely = s.returns or (None if may.segments or may.pairs else "row")
            found[name] = (undeclared(old, s) if likely is None else old)._replace(likely=likely)
    return found


def fits(
    name: str,
    x: Tensor,
    marked: str | None,
    leading: tuple[int, ...],
    num_segments: int | None,
    vocab: int,
    pairs: int | None,
) -> tuple[str, ...]:
    """What an input of this shape can be: "scalar", or some of "row", "segment", "whole" and "pair"."""
    shape = tuple(x.shape)
    if not shape:
        return ("scalar",)
    if name == "pairs":
        return ("whole",)
    row = shape[: len(leading)] == leading
    if row and (marked == "row" or (marked is None and len(leading) > 1)):
        return ("row",)  # (B, T, ...): nothing else shares two sizes with the rows
    ways = ["row"] if row else []
    if num_segments is not None and _same(shape[0], num_segments):
        ways.append("segment")
    if shape[0] == vocab or (len(shape) > 1 and not x.dtype.is_floating_point):
        ways.append("whole")
    elif pairs is not None and shape[0] == pairs:
        ways.append("pair")
    return tuple(ways)


def _same(size: int, count: int) -> bool:
    """Whether they are equal; a count that a graph reads from a tensor is equal to no size of another."""
    if not torch.compiler.is_compiling():
        return size == count
    from torch.fx.experimental.symbolic_shapes import guard_or_false  # loads sympy, as a compiler has already

    return guard_or_false(size == count)


_MEANINGS = {
    "row": "one value per row (hl.PerRow({0}))",
    "segment": "one per segment (hl.PerSegment({0}))",
    "whole": "a table that belongs to no row (hl.Whole({0}))",
    "pair": "one value per pair (hl.Whole({0}))",
}


def choose(name: str, ways: tuple[str, ...], marked: str | None, reading: Reading, segmented: bool, shape: str) -> str:
    """Choose an input's layout among those that fit; raise if neither shape, function nor caller decides it.

    `marked`: the layout that the caller marked it with, if any.  `shape`: the input's shape in words, for an error.
    """
    if ways == ("scalar",):
        if marked in ("row", "segment"):
            raise ValueError(f"{name}: hl.{MARKS[marked].__name__} of a scalar; pass the scalar itself")
        return "scalar"
    per_segment = reading.segment if segmented else ()
    if reading.row and per_segment:
        raise ValueError(
            f"{name}: {reading.row[0]} takes one value per row, and {per_segment[0]} one per segment; "
            f"give them under two names"
        )
    if marked is not None:
        if marked not in ways and marked != "whole":
            what = {"row": "one value per row, in the targets' shape", "segment": "one per segment, (S,)"}[marked]
            raise ValueError(f"{name}: hl.{MARKS[marked].__name__} means {what}; {shape} does not fit")
        chosen = marked
    else:
        declared = "row" if reading.row else "segment" if per_segment else reading.likely
        chosen = declared if declared in ways else _only(name, ways, reading, shape)
    if per_segment and chosen != "segment":
        got = shape if marked is None else f"hl.{MARKS[marked].__name__}"
        raise ValueError(f"{name}: {per_segment[0]} takes one value per segment, (S,), got {got}")
    if reading.row and chosen == "segment":
        raise ValueError(
            f"{name}: has one value per segment, where {reading.row[0]} takes one per row; pass segments.spread({name})"
        )
    return chosen


def _only(name: str, ways: tuple[str, ...], reading: Reading, shape: str) -> str:
    """The one layout left of those that fit the shape; raise if there are more."""
    possible = {"segment": bool(reading.segments), "pair": reading.pairs}
    left = tuple(way for way in ways if possible.get(way, True)) or ways
    if len(left) > 1:
        named = " and ".join(_MEANINGS[way].format(name) for way in left)
        also = ""
        if "segment" in left:
            also = f", or in the function: {(*reading.segments, 'loss')[0]}.per_segment = ({name!r},), or () for rows"
        raise ValueError(f"{name}: {shape} fits {named}; say which in the call{also}")
    return left[0]


def _check_declared(name: str, leading: tuple[int, ...], reading: Reading) -> None:
    """If ranks share segments, raise unless the layout is declared: a shape could fit one layout on this rank and two
    on another, which would raise alone while this one waits."""
    if reading.segments and not (reading.row or reading.segment or reading.likely or len(leading) > 1):
        fn = reading.segments[0]
        raise ValueError(
            f"{name}: ranks share the segments, and one of them may hold as many rows as there are segments; say what "
            f"it is in the call, hl.PerRow({name}) or hl.PerSegment({name}), or in the function: "
            f"{fn}.per_segment = ({name!r},), or () for rows"
        )


def lay_out(
    declared: Mapping[str, Reading], inputs: Mapping[str, Any], source: Source, segments: Segments | None
) -> dict[str, tuple[Tensor, InputSpec]]:
    """Every input of a call as a tensor, and how it is laid out."""
    P = count_pairs(inputs)
    return {
        name: layout(name, x, source.leading, segments, source.vocab, P, declared[name], source.device)
        for name, x in inputs.items()
        if x is not None
    }


def count_pairs(inputs: Mapping[str, Any]) -> int | None:
    pairs = inputs.get("pairs")
    pairs = pairs.value if isinstance(pairs, Marked) else pairs
    return len(pairs) if isinstance(pairs, Tensor) and pairs.ndim else None


def layout(
    name: str,
    x: Any,
    leading: tuple[int, ...],
    segments: Segments | None,
    vocab: int,
    pairs: int | None,
    reading: Reading,
    device: torch.device,
) -> tuple[Tensor, InputSpec]:
    """An input as a tensor, and how it is laid out; raise if no layout fits, or several do."""
    marked = None
    if isinstance(x, Marked):
        marked, x = x.kind, x.value
    if isinstance(x, (bool, int, float)):
        dtype = torch.float64 if isinstance(x, float) and device.type != "mps" else None
        if isinstance(x, int) and abs(x) >= 1 << 63:
            raise ValueError(f"{name}: {x} does not fit 64 bits; give it as a float")
        x = torch.full((), x, dtype=dtype, device=device)  # not on the host: clamp takes no scalar from there
    if not isinstance(x, Tensor):
        raise TypeError(f"{name}: wanted a tensor or a number, got {type(x).__name__}")
    check_dense(name, x)
    if getattr(type(x).__torch_function__, "__func__", _DISABLED) not in (_DISABLED, _TORCHS):
        raise TypeError(
            f"{name}: is a {type(x).__name__}, whose operations run code of its own that a trace cannot follow; "
            f"wanted a plain tensor ({name}.as_subclass(torch.Tensor))"
        )
    if "logprob" in name and x.dtype.is_floating_point and x.dtype.itemsize < 4:
        raise TypeError(
            f"{name}: is {x.dtype}, wanted float32 or better: a log-probability of -10 in bfloat16 can be off by 0.03 "
            f"(FSDP casts loose inputs; wrap them in hl.Inputs)"
        )
    if x.ndim:
        check_device(name, x, device)
    if name == "pairs":
        x = _check_pairs(x, segments)
    S = None if segments is None else segments.num_segments
    ways = fits(name, x, marked, leading, S, vocab, pairs)
    if not ways and marked is None:
        raise ValueError(unfit(name, tuple(x.shape), leading, S))
    kind = choose(name, ways, marked, reading, S is not None, f"shape {tuple(x.shape)}")
    if segments is not None and segments.group is not None and marked is None and kind in ("row", "segment"):
        _check_declared(name, leading, reading)
    after = {"row": len(leading), "segment": 1}.get(kind, 0)
    if kind == "row" and marked is None and reading.row and tuple(x.shape[after:]) == (1,):
        raise ValueError(
            f"{name}: has shape {tuple(x.shape)}; wanted {leading}, one value per row, for {reading.row[0]}: "
            f"{name}.squeeze(-1) (hl.PerRow({name}) if a column is meant)"
        )
    rest = tuple(x.shape[after:])
    if kind in ("whole", "pair"):
        kind, rest = "whole", (PAIRS, *rest[1:]) if rest[0] == pairs else rest
    return x, InputSpec(kind, x.dtype, rest, x.requires_grad and torch.is_grad_enabled())


_DISABLED = torch._C._disabled_torch_function_impl
_TORCHS = Tensor.__torch_function__.__func__  # type: ignore[attr-defined]


def unfit(name: str, shape: tuple[int, ...], leading: tuple[int, ...], num_segments: int | None) -> str:
    """The error for an input whose shape fits nothing."""
    per_segment = f", ({num_segments},) for one per segment" if num_segments is not None else ""
    lines = len(leading) == 2 and shape in (leading[:1], (leading[0], 1))
    spread = f"; {name}.view(-1, 1).expand{leading} gives each row its line's value" if lines else ""
    return (
        f"{name}: has shape {shape}; wanted {leading} for one value per row{per_segment}, or a scalar "
        f"(hl.Whole({name}) may have any shape){spread}"
    )


def _check_pairs(pairs: Tensor, segments: Segments | None) -> Tensor:
    pairs = integers("pairs", pairs)
    if pairs.ndim != 2 or pairs.shape[1] != 2:
        raise ValueError(f"pairs: wanted (pairs, 2), chosen and rejected, got shape {tuple(pairs.shape)}")
    if segments is not None and readable(pairs) and pairs.numel():
        _check_range(segments.num_segments, torch.stack(pairs.aminmax()))
    elif segments is not None and pairs.numel() and should_defer(pairs.device):
        check_later(torch.stack(pairs.aminmax()), functools.partial(_check_range, segments.num_segments))
    return pairs


def _check_range(count: int, ends: Tensor) -> None:
    low, high = ends.tolist()
    if low < 0 or high >= count:
        raise ValueError(f"pairs: wanted numbers of segments, in [0, {count}), got {low if low < 0 else high}")
