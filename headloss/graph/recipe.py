"""Recipes: a call without its tensors and sizes, as a JSON string that `compiled` writes and `ops` and `spec` read.

An operator of a graph takes tensors, sizes and a string.  The string holds the rest of the call: the objective's
config, the source's options, the names of the tensors in order, and which of them need a gradient.  Equal calls have
equal strings, and if all losses are headloss's own, another process can read the string.

    split_call     a call's arguments  ->  tensors, sizes, and the rest as constants (torch.compile traces this)
    write_recipe   the constants       ->  the recipe
    RebuiltCall    recipe and tensors  ->  the call's arguments again

An objective that no config can hold is not copied.  The recipe holds a key of its content and the sizes hold its
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
from headloss.engine.layout import MARKS, Marked, Reading, choose, fits, readings, unfit
from headloss.graph.content import _BY_NUMBER, Traits, content_key, portable_config
from headloss.options import constant
from headloss.parallel.shard import VocabShard
from headloss.prepared import SEGMENTS_TWICE, Prepared
from headloss.segments import Segments, integers
from headloss.sources import Linear, Logits, Sparse, Teacher, check_number, is_symbol
from headloss.term import check_weight
from headloss.terms import Terms

# version of what the operators return; raise it with each change, since compilers keep code on disk, and users graphs
OUTPUTS = 3
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


class CallParts:
    """The tensors of a call, each with a name and a layout, and its sizes, each with a name.

    A layout says how a tensor's shape follows from the call's: ("row", *inner), ("flat",), ("segment", *inner) or
    ("whole", *shape).  An input has ("input", ...) with all that `write_recipe` needs to choose one of these.
    ("number",) is a Python number that is symbolic in the graph, passed as a scalar tensor on the host.
    """

    def __init__(self, leading: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> None:
        self.leading, self.device, self.dtype = leading, device, dtype
        self.tensors: list[Tensor] = []
        self.names: list[Any] = []
        self.sizes: list[int] = []
        self.size_names: list[str] = []

    def tensor(self, name: str, x: Tensor, *layout: Any) -> None:
        self.tensors.append(x)
        self.names.append((name, x.dtype, *_as_constants(layout)))

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
            return constant(x)  # perhaps a symbol whose value a comparison has fixed
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
            for of_term in temperatures:
                if float(of_term) == T:
                    T = float(of_term)
            T = self.constant(f"{label}.temperature", T)
        shard = source.shard
        split = None
        if shard is not None:
            sizes = [None if n is None else operator.index(n) for n in (shard.start, shard.vocab, shard.width)]
            split = (shard.group.group_name, *sizes, shard.partial_hidden)
        unpadded = shard is not None or source.vocab == _columns_held(source)  # then it may be a dynamic size
        options = [
            None if name == "vocab" and unpadded else self.constant(f"{label}.{name}", getattr(source, name))
            for name in _OPTIONS[kind]
        ]
        return (kind.__name__, tuple(options), T, split)

    def input(self, name: str, x: Any, num_segments: int | None, vocab: int, pairs: int | None) -> None:
        declared = None
        if isinstance(x, Marked):
            declared, x = x.kind, x.value
        if isinstance(x, float):
            x = self.number(x, torch.float64)
        elif isinstance(x, (bool, int)):
            x = torch.full((), x, dtype=torch.bool if isinstance(x, bool) else torch.int64, device=self.device)
        if not isinstance(x, Tensor):
            raise TypeError(f"{name}: wanted a tensor or a number, got {type(x).__name__}")
        kinds = fits(name, x, declared, self.leading, num_segments, vocab, pairs)
        if not kinds and declared is None:
            raise ValueError(unfit(name, tuple(x.shape), self.leading, num_segments))
        segmented, shape = num_segments is not None, (1, 2) if name == "pairs" else tuple(x.shape)
        inner = tuple(x.shape[len(self.leading) :] if "row" in kinds else x.shape[1:])
        whole = () if declared in ("row", "segment") or kinds in (("row",), ("segment",)) else shape
        self.tensor(f"inputs.{name}", x, "input", kinds, declared, segmented, inner, whole)


def _as_constants(x: Any) -> Any:
    """Sizes as constants of the graph: a recipe holds no symbols."""
    if isinstance(x, tuple):
        return tuple([_as_constants(y) for y in x])
    return operator.index(x) if isinstance(x, int) and not isinstance(x, bool) else x


def split_call(
    arguments: CallArguments, direct: bool = False, traits: Traits | None = None, number: int | None = None
) -> tuple[CallParts, tuple[Any, ...]]:
    """The tensors and sizes of a call, and the rest of it as constants for `write_recipe`.

    `traits`: the objective's.  `number`: the objective's, if the recipe cannot contain it.
    """
    source, targets, segments, teacher, options, inputs, _ = arguments
    parts = CallParts(source.leading, source.device, source.fact_dtype)
    source_constants = parts.source("source", source, () if traits is None else traits.temperatures)
    if number is not None:
        parts.size("objective", number)
    needs = tuple(direct or (x.requires_grad and torch.is_grad_enabled()) for x in source.tensors)
    if isinstance(targets, Prepared):
        if segments is not None and segments is not targets.segments:
            raise ValueError(SEGMENTS_TWICE)
        segments = targets.segments
        parts.tensor("numbers", targets.numbers, "whole", 0)
        targets = targets.targets
    if targets is not None:
        parts.tensor("targets", targets, "row")
    group = None
    if segments is not None:
        segments = segments.fitted(source.leading, source.device)
        parts.tensor("segments", segments.ids, "flat" if segments.ids.ndim == 1 else "row")
        parts.size("segments", segments.num_segments)
        group = "" if segments.group is None else segments.group.group_name
    teachers = []
    if isinstance(teacher, Mapping):
        teachers = [(name, *parts.source(f"teacher.{name}", x)) for name, x in teacher.items()]
    elif teacher is not None:
        teachers = [(None, *parts.source("teacher.", teacher))]
    num_items, num_segments, weights, scale, _ = options
    for name, x in (("num_items", num_items), ("num_segments", num_segments)):
        if isinstance(x, bool):
            raise TypeError(f"{name}: wanted a number or a scalar tensor, got bool")
        if isinstance(x, int):
            parts.size(name, x)
        elif x is not None:
            parts.scalar(name, x, source.fact_dtype)
    check_weight("grad_scale", scale)
    if isinstance(scale, Tensor) or scale != 1.0:
        parts.scalar("grad_scale", scale, source.fact_dtype)
    off = []
    own_weights = {} if traits is None else dict(traits.weights)  # tensors, which the graph may update before the call
    for name, weight in {**own_weights, **(weights or {})}.items():
        check_weight(f"weights[{name!r}]", weight)
        if not isinstance(weight, Tensor) and weight == 0:
            off.append(name)
        else:
            parts.scalar(f"weights.{name}", weight, source.fact_dtype)
    wanted = []
    plain = {name: x.value if isinstance(x, Marked) else x for name, x in inputs.items() if x is not None}
    pairs = plain.get("pairs")
    P = pairs.shape[0] if isinstance(pairs, Tensor) and pairs.ndim else None
    for name, x in plain.items():
        parts.input(name, inputs[name], None if segments is None else segments.num_segments, source.vocab, P)
        if isinstance(x, Tensor) and x.requires_grad and torch.is_grad_enabled():
            wanted.append(name)
    names, size_names = tuple(parts.names), tuple(parts.size_names)
    constants = (source_constants, needs, names, size_names, tuple(teachers), tuple(off), tuple(wanted))
    return parts, (*constants, group, len(source.leading), source.device.type)


def write_recipe(of: Terms | None, constants: tuple[Any, ...], **more: Any) -> str:
    """The recipe of a call."""
    source, needs, names, size_names, teachers, off, wanted, group, ndim, device = constants
    if of is not None:
        reading = readings(of.terms, of.metrics)
        names = tuple((name, dtype, *_layout(reading, name, *layout)) for name, dtype, *layout in names)
    recipe = {
        "source": source, "needs": needs, "tensors": names, "sizes": size_names, "teachers": teachers, "off": off,
        "wanted": wanted, "group": group, "ndim": ndim, "device": device, "outputs": OUTPUTS, **more,
    }  # fmt: skip
    if of is not None:
        recipe["objective"] = portable_config(of) or content_key(of)
        recipe["backend"] = of.backend
    return json.dumps(recipe, default=str, separators=(",", ":"))


def _layout(readings: Mapping[str, Reading], label: str, kind: str, *more: Any) -> tuple[Any, ...]:
    """The layout of a tensor; that of an input is chosen here."""
    if kind != "input":
        return (kind, *more)
    kinds, declared, segmented, inner, whole = more
    name = label.split(".", 1)[1]
    chosen = choose(name, kinds, declared, readings.get(name, Reading()), segmented, "its shape")
    return (chosen, *inner) if chosen in ("row", "segment") else ("whole", *whole)


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
        terms = _BY_NUMBER.get(int(sizes[self.data["sizes"].index("objective")]))
        if terms is None:
            raise RuntimeError(
                "headloss: the objective of this graph is gone: it has a loss or a metric that is not headloss's own, "
                "and was deleted, or made in another process; keep it for as long as the graph and its backward run, "
                "or make the graph again here"
            )
        return terms

    @property
    def source_tensors(self) -> int:
        """How many tensors belong to the source and may need a gradient; they come first."""
        return len(self.data["needs"])

    @property
    def host_reads(self) -> bool:
        """Whether the host reads numbers about the targets, which the backward then takes as a CPU tensor."""
        return "targets" in self.names and (self.data["host_read"] or "numbers" in self.names)

    @property
    def visited(self) -> bool:
        """Whether the visit makes the source's gradients; else the backward makes them from the facts' cotangents."""
        return self.data["visited"]


@functools.lru_cache(512)
def read_recipe(text: str) -> Recipe:
    data = json.loads(text)
    if data.get("outputs") != OUTPUTS:
        raise RuntimeError(
            "headloss: this graph was exported with another version of headloss, whose operators return other tensors; "
            "export it again"
        )
    config = data.get("objective")
    terms = Terms(*read_config(config)) if isinstance(config, Mapping) else None
    return Recipe(text, data, terms, tuple(x[0] for x in data["tensors"]))


class RebuiltCall:
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
        teachers = {name: _source(f"teacher.{name or ''}", x, by_name) for name, *x in data["teachers"]}
        self.teacher: Any = teachers.get(None, teachers or None)
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
    def marked_inputs(self) -> dict[str, Marked]:
        """The inputs, each marked with the kind that the recipe gives it."""
        kinds = {name: layout[0] for name, _, *layout in self.recipe.data["tensors"]}
        return {n: MARKS[kinds[f"inputs.{n}"]](x) for n, x in self.inputs.items()}

    def prepared(self) -> Prepared | None:
        """The targets with the numbers that the host knows about them."""
        if self.targets is None or self.numbers is None:
            return None
        return Prepared(self.targets, self.segments, self.numbers)


def _source(label: str, constants: Sequence[Any], tensors: Mapping[str, Tensor]) -> Any:
    """Rebuild a source without its constructor: it was checked when made, perhaps under another autocast."""
    kind_name, options, temperature, split = constants
    kind = _KINDS[kind_name]
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
        object.__setattr__(source, "vocab", _columns_held(source) if shard is None else shard.vocab)
    return source


def _columns_held(source: Logits | Linear) -> int:
    """How many columns this rank holds, padding included."""
    return source.logits.shape[-1] if isinstance(source, Logits) else source.weight.shape[0]


def _group(name: str) -> Any:
    return torch.distributed.distributed_c10d._resolve_process_group(name)  # type: ignore[attr-defined, arg-type]
