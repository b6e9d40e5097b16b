"""Recipes: everything about a call except its tensors and sizes, as a JSON string.

An operator of a graph takes tensors, sizes and a string.  The string holds the rest of the call: the objective's
config, the source's options, the names of the tensors in order, and which of them need a gradient.  Equal calls have
equal strings, and if all losses are headloss's own, another process can read the string.

    describe   a call's arguments  ->  tensors, sizes, and the rest as tuples of constants (torch.compile traces this)
    write      the rest            ->  the recipe
    Call       recipe and tensors  ->  the call's arguments again

An objective that no config describes is not copied.  The recipe holds a key of its content and the sizes hold its
number, so what runs is the objective that was called, in its state at that time; nothing here keeps it alive.
"""

from __future__ import annotations

import functools
import json
import operator
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from headloss.config import read_config
from headloss.engine.arguments import CallArguments
from headloss.engine.layout import LAID, Laid, Reading, choose, fits, readings, unfit
from headloss.graph.content import _NUMBERED, Traits, content_key, portable
from headloss.options import constant
from headloss.parallel.shard import VocabShard
from headloss.prepared import SEGMENTS_TWICE, Prepared
from headloss.segments import Segments, integers
from headloss.sources import Linear, Logits, Sparse, Teacher, check_number, is_symbol
from headloss.term import check_weight
from headloss.terms import Terms

OUTPUTS = 2  # version of what the operators return, raised with each change: compilers cache code between processes
_TENSORS: dict[type, tuple[str, ...]] = {
    Logits: ("logits",),
    Linear: ("hidden", "weight", "bias"),
    Sparse: ("ids", "logprobs"),
}
_OPTIONS: dict[type, tuple[str, ...]] = {
    Logits: ("scale", "softcap", "inplace", "vocab"),
    Linear: ("scale", "softcap", "logits_dtype", "weight_grad_dtype", "memory", "_gemm_dtype", "vocab"),
    Sparse: (),
}
_KINDS: dict[str, type] = {kind.__name__: kind for kind in _TENSORS}


class Described:
    """A call taken apart: tensors, each with a name and a place; sizes, each with a name; and the rest.

    A place says how a tensor's shape follows from the call's: ("row", *rest), ("flat",), ("segment", *rest) or
    ("whole", *shape).  An input has ("input", ...) with all that `write` needs to decide among them.  ("number",) is a
    Python number that is symbolic in the graph, passed as a scalar tensor on the host.
    """

    def __init__(self, leading: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> None:
        self.leading, self.device, self.dtype = leading, device, dtype
        self.tensors: list[Tensor] = []
        self.names: list[Any] = []
        self.sizes: list[int] = []
        self.size_names: list[str] = []

    def tensor(self, name: str, x: Tensor, *place: Any) -> None:
        self.tensors.append(x)
        self.names.append((name, x.dtype, *_settled(place)))

    def size(self, name: str, x: int) -> None:
        self.sizes.append(x)
        self.size_names.append(name)

    def scalar(self, name: str, x: Any, dtype: torch.dtype) -> None:
        """Pass a number that may change from call to call as a tensor, which keeps it out of the recipe."""
        x = x if isinstance(x, Tensor) else self.number(x, dtype)
        self.tensor(name, x, "whole", *x.shape)

    def number(self, x: float, dtype: torch.dtype) -> Tensor:
        return torch.ones((), dtype=dtype, device=self.device) * x  # stays symbolic, unlike `full`

    def constant(self, name: str, x: Any) -> Any:
        """An option of a source, for the recipe.  A symbolic one travels as a tensor, and the recipe says "symbol"."""
        if isinstance(x, bool) or not isinstance(x, (int, float)) or not is_symbol(x):
            return constant(x)  # a symbol that a comparison has settled
        if name.endswith((".memory", ".vocab")):
            return operator.index(x)  # type: ignore[arg-type]
        self.tensor(name, torch.ones((), dtype=torch.float64, device="cpu") * x, "number")
        return "symbol"

    def source(self, label: str, source: Teacher, temperatures: Sequence[str] = ()) -> tuple[Any, ...]:
        """Add a source's tensors to the lists; return the rest of it as constants.

        A temperature equal to one of `temperatures` becomes a constant: a term's fact at it is then the source's own.
        """
        kind = type(source)
        for name in _TENSORS[kind]:
            x = getattr(source, name)
            if x is None:
                continue
            if name == "weight":
                self.tensor(f"{label}.{name}", x, "whole", x.shape[0], 1)
            elif name == "bias":
                self.tensor(f"{label}.{name}", x, "whole", x.shape[0])
            else:
                self.tensor(f"{label}.{name}", x, "row", 1 if name == "hidden" else x.shape[-1])
        if isinstance(source, Sparse):
            return (kind.__name__, (), None, None)
        T: Any = source.temperature
        if isinstance(T, Tensor):
            self.tensor(f"{label}.temperature", T, "row" if T.ndim else "whole")
            T = "symbol"
        else:
            for known in temperatures:
                if float(known) == T:
                    T = float(known)
            T = self.constant(f"{label}.temperature", T)
        shard = source.shard
        split = None
        if shard is not None:
            sizes = [None if n is None else operator.index(n) for n in (shard.start, shard.vocab, shard.width)]
            split = (shard.group.group_name, *sizes, shard.partial_hidden)
        whole = shard is not None or source.vocab == _held(source)  # no padding: a dynamic size
        options = [
            None if name == "vocab" and whole else self.constant(f"{label}.{name}", getattr(source, name))
            for name in _OPTIONS[kind]
        ]
        return (kind.__name__, tuple(options), T, split)

    def input(self, name: str, x: Any, num_segments: int | None, vocab: int, pairs: int | None) -> None:
        said = None
        if isinstance(x, Laid):
            said, x = x.kind, x.value
        if isinstance(x, float):
            x = self.number(x, torch.float64)
        elif isinstance(x, (bool, int)):
            x = torch.full((), x, dtype=torch.bool if isinstance(x, bool) else torch.int64, device=self.device)
        if not isinstance(x, Tensor):
            raise TypeError(f"{name}: wanted a tensor or a number, got {type(x).__name__}")
        ways = fits(name, x, said, self.leading, num_segments, vocab, pairs)
        if not ways and said is None:
            raise ValueError(unfit(name, tuple(x.shape), self.leading, num_segments))
        segmented, whole = num_segments is not None, (1, 2) if name == "pairs" else tuple(x.shape)
        rest = tuple(x.shape[len(self.leading) :] if "row" in ways else x.shape[1:])
        table = () if said in ("row", "segment") or ways in (("row",), ("segment",)) else whole
        self.tensor(f"inputs.{name}", x, "input", ways, said, segmented, rest, table)


def _settled(x: Any) -> Any:
    """Turn sizes into constants of the graph: a recipe holds no symbols."""
    if isinstance(x, tuple):
        return tuple([_settled(y) for y in x])
    return operator.index(x) if isinstance(x, int) and not isinstance(x, bool) else x


def describe(
    arguments: CallArguments, direct: bool = False, traits: Traits | None = None, number: int | None = None
) -> tuple[Described, tuple[Any, ...]]:
    """The tensors and sizes of a call, and the rest of it as constants for `write`.

    `traits`: the objective's.  `number`: the objective's, if the recipe cannot contain it.
    """
    source, targets, segments, teacher, options, inputs, _ = arguments
    found = Described(source.leading, source.device, source.fact_dtype)
    said = found.source("source", source, () if traits is None else traits.temperatures)
    if number is not None:
        found.size("objective", number)
    needs = tuple(direct or (x.requires_grad and torch.is_grad_enabled()) for x in source.tensors)
    if isinstance(targets, Prepared):
        if segments is not None and segments is not targets.segments:
            raise ValueError(SEGMENTS_TWICE)
        segments = targets.segments
        found.tensor("numbers", targets.numbers, "whole", 0)
        targets = targets.targets
    if targets is not None:
        found.tensor("targets", targets, "row")
    group = None
    if segments is not None:
        segments = segments.fitted(source.leading, source.device)
        found.tensor("segments", segments.ids, "flat" if segments.ids.ndim == 1 else "row")
        found.size("segments", segments.num_segments)
        group = "" if segments.group is None else segments.group.group_name
    teachers = []
    if isinstance(teacher, Mapping):
        teachers = [(name, *found.source(f"teacher.{name}", x)) for name, x in teacher.items()]
    elif teacher is not None:
        teachers = [(None, *found.source("teacher.", teacher))]
    num_items, num_segments, weights, scale, _ = options
    for name, x in (("num_items", num_items), ("num_segments", num_segments)):
        if isinstance(x, bool):
            raise TypeError(f"{name}: wanted a number or a scalar tensor, got bool")
        if isinstance(x, int):
            found.size(name, x)
        elif x is not None:
            found.scalar(name, x, source.fact_dtype)
    check_weight("grad_scale", scale)
    if isinstance(scale, Tensor) or scale != 1.0:
        found.scalar("grad_scale", scale, source.fact_dtype)
    off = []
    own = {} if traits is None else dict(traits.weights)  # tensor inputs, so that updates inside the graph come first
    for name, weight in {**own, **(weights or {})}.items():
        check_weight(f"weights[{name!r}]", weight)
        if not isinstance(weight, Tensor) and weight == 0:
            off.append(name)
        else:
            found.scalar(f"weights.{name}", weight, source.fact_dtype)
    wanted = []
    plain = {name: x.value if isinstance(x, Laid) else x for name, x in inputs.items() if x is not None}
    pairs = plain.get("pairs")
    P = pairs.shape[0] if isinstance(pairs, Tensor) and pairs.ndim else None
    for name, x in plain.items():
        found.input(name, inputs[name], None if segments is None else segments.num_segments, source.vocab, P)
        if isinstance(x, Tensor) and x.requires_grad and torch.is_grad_enabled():
            wanted.append(name)
    constants = (said, needs, tuple(found.names), tuple(found.size_names), tuple(teachers), tuple(off), tuple(wanted))
    return found, (*constants, group, len(source.leading), source.device.type)


def write(of: Terms | None, constants: tuple[Any, ...], **more: Any) -> str:
    """The recipe of a call."""
    said, needs, names, size_names, teachers, off, wanted, group, ndim, device = constants
    if of is not None:
        reading = readings(of.terms, of.metrics)
        names = tuple((name, dtype, *_place(reading, name, *place)) for name, dtype, *place in names)
    recipe = {
        "source": said, "needs": needs, "tensors": names, "sizes": size_names, "teachers": teachers, "off": off,
        "wanted": wanted, "group": group, "ndim": ndim, "device": device, "outputs": OUTPUTS, **more,
    }  # fmt: skip
    if of is not None:
        recipe["objective"] = portable(of) or content_key(of)
        recipe["backend"] = of.backend
    return json.dumps(recipe, default=str, separators=(",", ":"))


def _place(readings: Mapping[str, Reading], label: str, kind: str, *more: Any) -> tuple[Any, ...]:
    """The place of a tensor; for an input, decide which it is."""
    if kind != "input":
        return (kind, *more)
    ways, said, segmented, rest, table = more
    name = label.split(".", 1)[1]
    chosen = choose(name, ways, said, readings.get(name, Reading()), segmented, "its shape")
    return (chosen, *rest) if chosen in ("row", "segment") else ("whole", *table)


class Recipe(NamedTuple):
    """A recipe, parsed."""

    text: str
    data: Mapping[str, Any]
    terms: Terms | None  # of the objective, if the recipe has its config
    names: tuple[str, ...]  # of the tensors

    @property
    def has_loss(self) -> bool:
        return "objective" in self.data

    def terms_of(self, sizes: Sequence[int]) -> Terms | None:
        """The terms of a call, from the recipe's config or from the living objective; None for `row_facts`."""
        if self.terms is not None or not self.has_loss:
            return self.terms
        found = _NUMBERED.get(int(sizes[self.data["sizes"].index("objective")]))
        if found is None:
            raise RuntimeError(
                "headloss: the objective of this graph is gone: it has a loss or a metric that is not headloss's own, "
                "and was deleted, or made in another process; keep it for as long as the graph and its backward run, "
                "or make the graph again here"
            )
        return found

    @property
    def sources(self) -> int:
        """How many tensors belong to the source and may need a gradient; they come first."""
        return len(self.data["needs"])

    @property
    def reads(self) -> bool:
        """Whether the host reads numbers about the targets, which the backward then gets as a CPU tensor."""
        return "targets" in self.names and (self.data["host_read"] or "numbers" in self.names)

    @property
    def visited(self) -> bool:
        """Whether the visit makes the source's gradients; otherwise the backward makes them from facts' cotangents."""
        return self.data["visited"]


@functools.lru_cache(512)
def read(text: str) -> Recipe:
    data = json.loads(text)
    said = data.get("objective")
    terms = Terms(*read_config(said)) if isinstance(said, Mapping) else None
    return Recipe(text, data, terms, tuple(x[0] for x in data["tensors"]))


class Call:
    """The arguments of a call, rebuilt from its recipe and tensors.  `fake`: the tensors have no values to read."""

    def __init__(self, recipe: Recipe, tensors: Sequence[Tensor], sizes: Sequence[int], fake: bool = False) -> None:
        data = recipe.data
        self.recipe = recipe
        by_name: dict[str, Any] = dict(zip(recipe.names, tensors, strict=True))
        for name, _, kind, *_ in data["tensors"]:
            if kind == "number" and not fake:
                by_name[name] = float(by_name[name])
        size = dict(zip(data["sizes"], sizes, strict=True))
        self.source: Any = _source("source", data["source"], by_name)
        self.targets: Tensor | None = by_name.get("targets")
        if self.targets is not None:
            self.targets = integers("targets", self.targets)
        self.segments: Segments | None = None
        if "segments" in by_name:
            group = _group(data["group"]) if data["group"] else None
            self.segments = Segments(by_name["segments"], size["segments"], group=group)
        self.numbers: Tensor | None = by_name.get("numbers")
        named = {name: _source(f"teacher.{name or ''}", x, by_name) for name, *x in data["teachers"]}
        self.teacher: Any = named.get(None, named or None)
        self.num_items = size.get("num_items", by_name.get("num_items"))
        self.num_segments = size.get("num_segments", by_name.get("num_segments"))
        self.grad_scale: float | Tensor = by_name.get("grad_scale", 1.0)
        self.weights: dict[str, float | Tensor] = dict.fromkeys(data["off"], 0.0)
        self.weights |= {n.split(".", 1)[1]: x for n, x in by_name.items() if n.startswith("weights.")}
        self.inputs = {n.split(".", 1)[1]: x.detach() for n, x in by_name.items() if n.startswith("inputs.")}
        for name in data["wanted"]:
            self.inputs[name] = self.inputs[name].requires_grad_()
        self.needs = tuple(data["needs"])

    @property
    def laid(self) -> dict[str, Laid]:
        """The inputs, each marked with the kind that `describe` and `write` found."""
        kinds = {name: place[0] for name, _, *place in self.recipe.data["tensors"]}
        return {n: LAID[kinds[f"inputs.{n}"]](x) for n, x in self.inputs.items()}

    def prepared(self) -> Prepared | None:
        """The targets with the numbers that the host knows about them."""
        if self.targets is None or self.numbers is None:
            return None
        return Prepared(self.targets, self.segments, self.numbers)


def _source(label: str, said: Sequence[Any], tensors: Mapping[str, Tensor]) -> Any:
    """Rebuild a source without its constructor: it was checked when made, perhaps under another autocast."""
    kind = _KINDS[said[0]]
    _, options, temperature, split = said
    source: Any = object.__new__(kind)
    for name in _TENSORS[kind]:
        object.__setattr__(source, name, tensors.get(f"{label}.{name}"))
    if kind is Sparse:
        return source
    for name, value in zip((*_OPTIONS[kind], "temperature"), (*options, temperature), strict=True):
        if value == "symbol":
            value = tensors[f"{label}.{name}"]
            if isinstance(value, float):
                check_number(name, value)
        elif isinstance(value, str) and value.startswith("torch."):
            value = getattr(torch, value[len("torch.") :])
        object.__setattr__(source, name, value)
    shard = None if split is None else VocabShard(_group(split[0]), *split[1:])
    object.__setattr__(source, "shard", shard)
    if source.vocab is None:
        object.__setattr__(source, "vocab", _held(source) if shard is None else shard.vocab)
    return source


def _held(source: Logits | Linear) -> int:
    """How many columns this rank holds, padding included."""
    return source.logits.shape[-1] if isinstance(source, Logits) else source.weight.shape[0]


def _group(name: str) -> Any:
    return torch.distributed.distributed_c10d._resolve_process_group(name)  # type: ignore[attr-defined, arg-type]
