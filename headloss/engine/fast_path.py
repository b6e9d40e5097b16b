"""The fast path of repeated calls in one launch over all their logits: all but the values of tensors is decided once.

Two calls share a fast path if everything is equal that can be known without reading the device: dtypes, sizes, strides,
options, and what their functions read.  The first one is planned and checked; then it and all later ones run here.

Dimension key:  N rows   V vocabulary   D hidden size
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from headloss.bounded_cache import store
from headloss.engine.arguments import CallArguments
from headloss.engine.autograd_contract import refuse_transforms
from headloss.engine.bind import chunked_because, chunks_of, reads_now, rows_of
from headloss.engine.bound_teachers import bind_teachers
from headloss.engine.heads import aligned_parts, make_logits, pull_hidden, pull_weight
from headloss.engine.lookup import FoundPlan, Plans
from headloss.engine.one_launch import by_length
from headloss.engine.plan import Plan
from headloss.engine.run import names_of
from headloss.engine.teachers import teacher_label
from headloss.metrics import dead_rows
from headloss.prepared import Prepared
from headloss.record import Grads
from headloss.reductions import over_segments
from headloss.segments import Segments
from headloss.sources import Linear, Logits, Source, Sparse, Teacher, padded, tensors_in, without_tensors
from headloss.trace.function_reads import defaults
from headloss.trace.signature import TEACHER_INPUTS, UNNAMED

SPARSE_INPUTS = tuple(f"{i} of {UNNAMED}" for i in TEACHER_INPUTS)  # by a sparse teacher, among the inputs
_MOST = 64  # keys: more would mean that sizes change with every call


def needs_of(tensors: Sequence[Tensor], direct: bool) -> tuple[bool, ...]:
    """Which of a source's tensors need a gradient; `direct`: all of them, without autograd."""
    if direct:
        return (True,) * len(tensors)
    recorded = torch.is_grad_enabled()
    return tuple([recorded and x.requires_grad for x in tensors])


# what must be equal of a tensor that a call brings, besides its strides: one call, since every call asks
_layout = operator.attrgetter("dtype", "device", "shape", "requires_grad")


def key_of(arguments: CallArguments, direct: bool) -> tuple[Any, ...] | None:
    """The cache key of a call's fast path; None if such a call has no fast path."""
    source, targets, segments, teacher, options, inputs, support = arguments
    if type(source) is not Logits and type(source) is not Linear:
        return None
    T, (num_items, num_segments, weights, grad_scale, host_read) = source.temperature, options
    if support is not None or type(T) is not float or type(grad_scale) is not float:
        return None
    if num_segments is not None or isinstance(num_items, Tensor) or source.shard is not None:
        return None
    if weights and not _only_weigh(weights):
        return None
    y: Any = targets
    if type(targets) is Prepared:
        if segments is not None:
            return None
        y, segments = targets.targets, targets.segments
    plain = y is targets
    key: list[Any] = [
        direct, torch.is_grad_enabled(), plain, host_read, T, source.scale, source.softcap, source.vocab,
        tuple(weights) if weights else (), *defaults(),
    ]  # fmt: skip
    if type(y) is Tensor:
        key += _layout(y), y.stride()
    elif y is not None:
        return None
    if segments is not None:
        if type(segments) is not Segments or segments.group is not None:
            return None
        ids = segments.ids
        if type(ids) is not Tensor or y is None or (plain and (ids.shape, ids.device) != (y.shape, y.device)):
            return None
        key += _layout(ids), ids.stride(), segments.num_segments
    if isinstance(source, Logits):
        x = source.logits
        if type(x) is not Tensor:
            return None
        key += _layout(x), x.stride(), source.inplace
    elif (y is None or not plain) and source.weight_grad_into is None and _is_plain(source):
        _add_head(key, source)
    else:
        return None
    if type(teacher) is Sparse:
        for x in (teacher.ids, teacher.logprobs):
            if type(x) is not Tensor:
                return None
            key += _layout(x), x.stride()
    elif teacher is not None:
        for name, dense in teacher.items() if type(teacher) is dict else ((UNNAMED, teacher),):
            if type(dense) is Linear and _is_plain(dense):
                _add_head(key, dense)
            elif type(dense) is Logits and type(dense.logits) is Tensor:
                key += _layout(dense.logits), dense.logits.stride()
            else:
                return None
            if type(dense.temperature) is not float:
                return None
            key += name, dense.vocab, dense.temperature, dense.scale, dense.softcap
            key += dense.shard is None, dense.vocab_ids is None
    for name, value in inputs.items():
        if type(value) is not Tensor:
            return None
        key += name, _layout(value), value.stride()
    return tuple(key)


def _is_plain(head: Linear) -> bool:
    """Whether it has no bias, and its tensors are torch's own."""
    return head.bias is None and type(head.hidden) is Tensor and type(head.weight) in (Tensor, Parameter)


def _add_head(key: list[Any], head: Linear) -> None:
    """All that must be equal of a plain head."""
    for x in (head.hidden, head.weight):
        key += _layout(x), x.stride()
    key += (head.gemm_dtype, head.logits_dtype, head.weight_grad_dtype, head.memory)


def _only_weigh(weights: Any) -> bool:
    """Whether a call's weights are finite numbers other than 0, which would switch a term off."""
    return type(weights) is dict and all(type(w) is float and w and math.isfinite(w) for w in weights.values())


def find_fast_path(plans: Plans | None, key: Any, arguments: CallArguments) -> FastPath | None:
    """The fast path that an earlier call made under this key, if it serves this call too."""
    found = None if plans is None or key is None else plans.fast_paths.get(key)
    if found is None:
        return None
    form, paths = found
    path: FastPath | None = paths.get(form.read()[0])
    if path is None:
        return None
    one = path.one_launch
    if one is not None and one != path.backend.takes_one_launch(path.count, arguments.source.vocab):
        return None
    if path.linear and not path.all_count(arguments):
        return None
    refuse_transforms(arguments)
    return path


def make_fast_path(plans: Plans, key: Any, found: FoundPlan) -> FastPath | None:
    """Make the fast path for calls with this key, once the first was planned; None if they are not simple enough."""
    plan, (source, targets, segments, teachers, *_), program = found.plan, found.arguments, found.plan.program
    y = targets.targets if isinstance(targets, Prepared) else targets
    if key is None or program is None or not plan.weights:
        return None
    if plan.by_token is None if plan.kind == "row" else not _counted(plan):
        return None
    if plan.is_fp16 or plan.wants_grad or plans.divergences:
        return None
    if any(call.fn is dead_rows for _, call in plan.metrics):  # which `run` computes
        return None
    x, given = source.tensors[0], found.arguments.inputs
    if isinstance(source, Linear):
        fits = 0 < math.prod(source.leading) <= source.chunk_rows() and not source.weight_grad_dtype
        if not _is_unpadded(source) or not fits or plan.kind != "row" or not chunked_because(plan, source):
            return None
    elif source.inplace or source.vocab != x.shape[-1] or not x.numel():
        return None
    if x.device.type == "meta":
        return None
    if y is not None and (y.dtype is not torch.int64 or y.shape != x.shape[:-1] or y.device != x.device):
        return None
    if any(isinstance(w, Tensor) for w in plan.weights.values()):
        return None
    used: Mapping[str, Any] = {name: teachers[name] for name in plan.want.teachers}  # type: ignore[index]
    if teachers:
        named = plan.named_teachers == plan.want.teachers != ()
        if not named or not all(_is_simple(x, source) for x in teachers.values()):  # type: ignore[union-attr]
            return None
        if any(isinstance(x, Linear) for x in used.values()) and not _in_one_chunk(plan, found.arguments):
            return None
    if segments is not None and (segments.ids.device != x.device or not segments.num_segments):
        return None
    if segments is not None and y is targets and reads_now(key[3], x.device, plan.read_because):
        return None  # the host would read segment lengths, which prepared targets come with
    sparse = SPARSE_INPUTS if type(used.get(UNNAMED)) is Sparse else ()
    taken = [given.get(name) for name in program.inputs if name not in sparse]
    if any(v is None or not v.is_contiguous() or v.device != x.device for v in taken) or "pairs" in given:
        return None
    path = FastPath(
        plan, source, given, used, y is not None, segments is not None, needs_of(source.tensors, key[0]), found.held
    )
    _, paths = plans.fast_paths.get(key) or store(plans.fast_paths, key, (found.form, {}), _MOST)
    store(paths, found.read, path, _MOST)
    return path if not path.linear or path.all_count(found.arguments) else None


def _counted(plan: Plan) -> bool:
    """Whether the weights of rows and segments depend on nothing but counts of rows and segments."""
    plain = all(t.reduction != "weighted_mean" and t.call.share is None for t in plan.terms)
    return plain and tuple(plan.program.terms) == tuple(plan.weights)


def _is_unpadded(head: Linear) -> bool:
    """Whether it has one dtype, and all rows of its weight are columns."""
    dtypes = {head.hidden.dtype, head.weight.dtype, head.gemm_dtype, head.chunk_dtype}
    return len(dtypes) == 1 and not head.is_fp16 and head.vocab == head.weight.shape[0]


def _in_one_chunk(plan: Plan, arguments: CallArguments) -> bool:
    """Whether the logits of student and teachers fit at once; targets are none or prepared."""
    source, teachers = arguments.source, arguments.teachers
    if isinstance(arguments.targets, Tensor):
        return False
    rows = rows_of(plan, arguments, True, chunked_because(plan, source))
    teacher_rows = bind_teachers(teachers, plan.named_teachers, source, rows, plan.backend)
    return len(chunks_of(plan, arguments, rows, teacher_rows) or ()) == 1


def _is_simple(teacher: Any, source: Source) -> bool:
    if type(teacher) is Sparse:
        return not teacher.logprobs.requires_grad and teacher.logprobs.dtype == source.fact_dtype
    if type(teacher) is Linear:
        own = teacher.hidden.dtype != torch.float64 and not teacher.hidden.requires_grad
        return own and teacher.vocab == source.vocab and _is_unpadded(teacher)
    if type(teacher) is not Logits or not source.vocab == teacher.vocab == teacher.logits.shape[-1]:
        return False
    return not teacher.logits.requires_grad and teacher.logits.dtype != torch.float64


class OneChunkHead:
    """The products of linear heads whose rows all count and fit into one chunk.

    Such a head has one dtype, no bias, and no padding in its weight.  Its gradients have the same dtype; nothing is
    accumulated.
    """

    __slots__ = ("flat", "parts", "size", "whole")

    def __init__(self, source: Linear) -> None:
        self.parts = aligned_parts(source.weight)
        self.flat = source.hidden.ndim == 2
        self.size = math.prod(source.leading), padded(source.columns, source.hidden.is_cpu)
        self.whole = len(self.parts) == 1  # no cuts: products allocate their results, which is cheaper than `out=`

    def read(self, source: Linear) -> Tensor:
        """The logits of all rows."""
        hidden_ND, weight_VD = source.hidden, source.weight
        if not self.flat:
            hidden_ND = hidden_ND.reshape(self.size[0], -1)
        if self.whole and self.size[1] == weight_VD.shape[0]:
            return torch.nn.functional.linear(hidden_ND, weight_VD)
        raw_NV = torch.empty(self.size, dtype=hidden_ND.dtype, device=hidden_ND.device)[:, : weight_VD.shape[0]]
        make_logits(hidden_ND, weight_VD, self.parts, raw_NV)
        return raw_NV

    def write(self, source: Linear, grad_NV: Tensor, needs: tuple[bool, ...]) -> Grads:
        """The gradients that are needed, from that of the logits."""
        hidden_ND, weight_VD, dhidden, dweight = source.hidden, source.weight, None, None
        if not self.flat:
            hidden_ND = hidden_ND.reshape(self.size[0], -1)
        if needs[0] and self.whole:
            dhidden = torch.mm(grad_NV, weight_VD)
        elif needs[0]:
            dhidden = torch.empty_like(hidden_ND, memory_format=torch.contiguous_format)
            pull_hidden(grad_NV, weight_VD, self.parts, dhidden)
        if needs[1] and self.whole:
            dweight = torch.mm(grad_NV.t(), hidden_ND)
        elif needs[1]:
            dweight = torch.empty_like(weight_VD, memory_format=torch.contiguous_format)
            pull_weight(grad_NV, hidden_ND, self.parts, dweight)
        return Grads(None, dhidden if self.flat or dhidden is None else dhidden.view(source.hidden.shape), dweight)


class FastPath:
    """What all calls with one key share."""

    __slots__ = (
        "backend", "bare", "by_present", "count", "dense", "device", "each_mean", "flat", "grad", "head", "heads",
        "held", "linear", "means", "names", "needs", "one_launch", "plan", "read", "shape", "shares", "taken", "used",
        "visits", "want", "weights",
    )  # fmt: skip

    def __init__(
        self,
        plan: Plan,
        source: Source,
        inputs: Mapping[str, Tensor],
        teachers: Mapping[str, Teacher],
        targeted: bool,
        segmented: bool,
        needs: tuple[bool, ...],
        held: Any,
    ) -> None:
        self.plan, self.want, self.backend = plan, plan.want, plan.backend
        self.held = held  # what functions of ours read, kept alive so that no id is reused
        self.device, self.grad = source.device, True in needs
        self.shape, self.flat = source.leading, source.tensors[0].ndim == 2
        self.count, self.used = math.prod(self.shape), tuple(inputs)
        self.head = OneChunkHead(source) if isinstance(source, Linear) else None
        self.heads = {name: OneChunkHead(x) for name, x in teachers.items() if isinstance(x, Linear)}
        self.linear = self.head is not None or bool(self.heads)
        # names of the tensors saved for a backward: the source's, targets and the teacher's, which it may reread, ...
        fields = lambda x: ("ids", "logprobs") if isinstance(x, Sparse) else tensors_in(x)
        theirs = [f"{teacher_label(name)}.{field}" for name, x in teachers.items() for field in fields(x)]
        of_targets = ("targets",) if targeted else ()
        again = (*names_of(source.tensors), *of_targets, *theirs)
        self.names, self.read, self.needs = (*again, *inputs, *(("segments",) if segmented else ())), len(again), needs
        self.taken, self.each_mean = plan.program.inputs, plan.kind == "row" and plan.program.by_segment
        # what `takes_one_launch` must say of the rows for this path to serve a call; None if it does not matter
        few = self.each_mean and not teachers
        self.one_launch = False if few else True if plan.in_parts is not None else None
        self.bare = without_tensors(source)
        self.dense = {name: without_tensors(x) for name, x in teachers.items() if not isinstance(x, Sparse)}
        own = lambda name, x: tuple([float(x.temperature if T is None else T) for T in plan.want.temperatures_of(name)])
        how_theirs = [(float(x.scale), x.softcap, own(name, x)) for name, x in self.dense.items()]
        self.weights = tuple([float(w) for w in plan.weights.values()])
        temperatures = tuple([float(source.temperature if T is None else T) for T in plan.want.temperatures])
        how = (plan.program, temperatures, source.scale, source.softcap)
        self.shares: tuple[Any, ...] = ()  # with segments, how each term is reduced
        self.means = tuple([name in (plan.by_token or ()) for name in plan.weights])  # which rows weigh 1 / tokens
        if not plan.program.by_segment:
            self.visits = plan.backend.Visits(*how, self.means, how_theirs)
        elif self.each_mean:
            self.visits = plan.backend.Settles(*how, (False,) * len(self.means), how_theirs)
        else:
            self.shares = tuple([(t.reduction, t.trace.value or "row", t.length) for t in plan.terms])
            self.visits = plan.backend.Settles(*how, tuple([by_length(t) for t in plan.terms]), how_theirs)
        self.by_present = any(over_segments(reduction, kind) for reduction, kind, _ in self.shares)

    def all_count(self, arguments: CallArguments) -> bool:
        """Whether every row counts, so that none is left out of the products, and autocast is off."""
        targets: Any = arguments.targets
        every = targets is None or targets.known().valid == self.count
        return every and not torch._C._is_any_autocast_enabled()

    def put(self, x: Tensor, held: bool) -> Tensor:
        """See `Rows.put`."""
        return x.reshape(self.shape + tuple(x.shape[1:]))
