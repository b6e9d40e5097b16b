"""Between a model of Transformers and its head: what a call expects of the head, and what the head found.

A call of a patched model leaves a note for its head (`Call`, one for each thread); the head evaluates the objective
inside its own forward and returns an empty placeholder; the model's loss function exchanges that for the loss.  Hooks
on the model notice when something has taken the place of its forward since.
"""

from __future__ import annotations

import copy
import functools
import inspect
import math
import threading
import types
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import headloss as hl
from headloss.deferred_checks import check_later, should_defer
from headloss.integrations.causal_lm import KEEP_LOGITS, bypassed, check_shape, count_of, logits_transform, targets_of
from headloss.integrations.log import Log
from headloss.integrations.loss_function_check import LossCall, by_name, check_loss_call
from headloss.module import check_source_options, own_hook

# Sent through the model once, where its logits would go: a scale shows in the small one, a softcap or a clamp in the
# large ones.
PROBES = (1.5, -30.0, 300.0)
TAKEN = ("forward", "_loss_function", "accepts_loss_kwargs")  # of a model, while it is patched


class NoLogits(Tensor):
    """Stands where the logits would be, without columns; whoever computes with it is told how to get them."""

    harmless = frozenset({
        "__get__", "__len__", "__repr__", "size", "dim", "numel", "stride", "is_floating_point", "is_complex",
        "get_device", "element_size", "requires_grad_", "is_contiguous", "detach", "to", "float", "half", "bfloat16",
        "double", "data_ptr", "untyped_storage", "storage_offset", "clone", "contiguous", "cpu", "cuda", "type",
    })  # fmt: skip

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.__name__ not in cls.harmless:
            raise RuntimeError(
                f"outputs.logits: {func.__name__} of logits that were never made: the head of a patched model returns "
                f"the loss instead.  patch(model, ..., eval_logits=True) keeps them in evaluation mode, for "
                f"compute_metrics and predict; a call without labels returns them always"
            )
        return super().__torch_function__(func, types, args, kwargs or {})

    def __repr__(self) -> str:  # type: ignore[override]
        return f"NoLogits(shape={tuple(self.shape)}; patch(model, ..., eval_logits=True) keeps them in evaluation)"


class Expected(NamedTuple):
    """What the head does with the hidden states when they come: `evaluate(head, hidden, targets, inputs)`.

    It returns a result, and those tensors of it that carry gradients.
    """

    targets: Tensor | hl.Prepared
    evaluate: Callable[[Head, Tensor, Any, Mapping[str, Any]], tuple[Any, list[Tensor]]]
    asked: LossCall | None = None  # what the targets were made from, where the model asks for a loss itself


class Call:
    """One call of a patched model.  `expected` is None where the logits are kept."""

    def __init__(self, adapter: Adapter, expected: Expected | None, inputs: Mapping[str, Any]) -> None:
        self.adapter, self.expected, self.inputs = adapter, expected, inputs
        self.found: tuple[Any, list[Tensor]] | None = None
        self.collected = False


class Now:
    """What a thread is in the middle of."""

    def __init__(self) -> None:
        self.calls: tuple[Call, ...] = ()  # the innermost last
        self.ran = False  # a forward of ours, since the model was called


class _Here(threading.local):
    def __init__(self) -> None:
        self.now = Now()  # whose attributes a graph can follow, where those of a thread's own object get lost


HERE = _Here()


def call_of(adapter: Adapter) -> Call | None:
    """The call of this adapter's model that this thread is in."""
    for call in reversed(HERE.now.calls):  # torch 2.8 compiles no `next` with a default
        if call.adapter is adapter:
            return call
    return None


class Head(hl.FusedLMHead):
    """The output embedding of a patched model; a linear layer unless its model expects a loss."""

    adapter: Adapter

    def forward(self, hidden: Tensor, **given: Any) -> Any:  # type: ignore[override]
        call = call_of(self.adapter)
        if given or call is None or call.expected is None:
            plain = self.adapter.plain
            return super().forward(hidden, **given) if plain is None else plain(hidden, **given)
        return self.adapter.visit(hidden, call, call.expected)


def patched_class(kind: type[nn.Linear]) -> type[nn.Linear]:
    """A head of this class that may compute the loss; what else the class does (FSDP2's, for one) stays."""
    if issubclass(Head, kind):
        return Head
    made = _PATCHED.get(kind)
    if made is None:
        # pickle cannot find a class that was made here; it can find `kind`, and then reaches the adapter's refusal
        reduce = lambda head, protocol: (_unfilled, (kind,), object.__reduce_ex__(head, protocol)[2])
        made = _PATCHED[kind] = type(
            f"{kind.__name__}Head", (kind, Head), {"forward": Head.forward, "__reduce_ex__": reduce}
        )
    return made


_PATCHED: weakref.WeakValueDictionary[type, type[nn.Linear]] = weakref.WeakValueDictionary()


def _unfilled(kind: type[nn.Linear]) -> nn.Linear:
    """A patched head of this class whose state is still to be set: for `copy.deepcopy`."""
    head: nn.Linear = object.__new__(patched_class(kind))
    return head


class Adapter:
    """What a patched model carries: its head, its log, and how to undo it all."""

    objective: hl.Objective
    plain: Any = None  # a forward that the head had been given

    def __init__(self, model: nn.Module, head: nn.Linear, options: Mapping[str, Any]) -> None:
        self.head, self.head_class = head, type(head)
        self.before: dict[str, Any] = {k: x for k, x in vars(model).items() if k in TAKEN}
        self.head_options = vars(head).get("source_options")
        self.options = check_source_options({**(self.head_options or {}), **options}, head.out_features)
        self.log = Log()
        self.probed, self.transform, self.config = False, transform_said(**self.options), logits_transform(model.config)
        head.__class__ = self.patched_class = patched_class(type(head))
        head.source_options, head.adapter = self.options, self  # type: ignore[assignment]
        model.headloss = self  # type: ignore[assignment]

    def __deepcopy__(self, memo: dict[int, Any]) -> Adapter:
        other = memo[id(self)] = object.__new__(type(self))
        vars(other).update(copy.deepcopy(vars(self), memo))
        return other

    def __reduce__(self) -> Any:
        raise TypeError(
            "model: it is patched, and unpickling would restore its own forward, without the objective; save its "
            "state_dict, or unpatch(model) first and patch the loaded model"
        )

    @property
    def last(self) -> hl.Output | None:
        """The record of the last call that had labels, detached."""
        return self.log.last

    def guard(self, model: nn.Module) -> None:
        """Notice from now on when a call of the model does not come through our forward."""
        model.register_forward_pre_hook(_before, with_kwargs=True)
        model.register_forward_hook(_after, with_kwargs=True)

    def take_forward(self, model: nn.Module, forward: Callable[..., Any]) -> None:
        """Let `forward` run in place of the model's own, whose name and signature it shows: Trainer goes by those."""
        own = type(model).forward

        def run(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            return forward(self, *args, **kwargs)

        functools.update_wrapper(run, own)
        del run.__wrapped__  # type: ignore[attr-defined]  # through which accelerate would go back to it
        run.__signature__ = inspect.signature(own)  # type: ignore[attr-defined]
        model.forward = types.MethodType(run, model)
        self.guard(model)

    def restore(self, model: nn.Module) -> None:
        if type(self.head) is not self.patched_class:
            raise ValueError(
                f"model: the class of its head is {type(self.head).__name__} since it was patched (fully_shard?), and "
                f"unpatch would take that away; unpatch(model) before it is wrapped"
            )
        for name in (*TAKEN, "headloss"):
            vars(model).pop(name, None)
        vars(model).update(self.before)
        for hooks, ours in ((model._forward_pre_hooks, _before), (model._forward_hooks, _after)):
            for key in [key for key, hook in hooks.items() if hook is ours]:
                del hooks[key]
        self.head.__class__ = self.head_class
        for name in ("source_options", "adapter"):
            vars(self.head).pop(name, None)
        if self.head_options is not None:
            self.head.source_options = self.head_options
        if self.plain is not None:
            self.head.forward = self.plain  # type: ignore[method-assign]

    def inner(self, model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """The forward that was there before."""
        now = self.config if torch.compiler.is_compiling() else logits_transform(model.config)
        if now != self.config:  # the model may do something else to its logits: look again
            self.probed, self.config = False, now
        before = self.before.get("forward")
        return type(model).forward(model, *args, **kwargs) if before is None else before(*args, **kwargs)

    @contextmanager
    def expecting(self, expected: Expected | None, **inputs: Any) -> Iterator[Call]:
        now, call = HERE.now, Call(self, expected, inputs)
        around = now.calls
        now.calls = (*around, call)
        try:
            yield call
        finally:
            now.calls = around

    def visit(self, hidden: Tensor, call: Call, expected: Expected) -> Tensor:
        """Inside the head's forward: evaluate, and return a placeholder for gradients to pass on their way back."""
        head = self.head
        if head._forward_hooks or head._backward_hooks or head._backward_pre_hooks:
            _check_hooks(head)
        if call.found is not None:
            raise TypeError(
                f"model: its forward calls the head twice, but a patched head makes one loss and no logits; "
                f"{KEEP_LOGITS}"
            )
        targets = expected.targets.to(hidden.device)
        check_shape(targets.targets if isinstance(targets, hl.Prepared) else targets, hidden)
        result, live = expected.evaluate(self.head, hidden, targets, call.inputs)  # type: ignore[arg-type]
        look = torch.compiler.is_compiling() or not self.probed  # a graph always looks, or it is made anew afterwards
        placeholder, *tied = _Tie.apply(hidden.detach(), len(PROBES) if look else 0, *live)
        call.found = result, tied
        return placeholder

    def collect(self, call: Call, logits: Tensor) -> tuple[Any, list[Tensor]]:
        """What the head found, in exchange for the placeholder as it left the model."""
        if call.found is None:
            raise RuntimeError("headloss: the model made its loss without calling its head; unpatch(model)")
        call.collected = True
        result, tied = call.found
        anchor = (logits * 0).sum()  # what pulls on the loss pulls on the head's output: FSDP waits for that
        if logits.shape[-1] and logits.numel():
            anchor = anchor + self._check_probes(range_of(logits.detach()))
        return result, [x + anchor.to(x.dtype) for x in tied]

    def loss_function(self, logits: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        call = call_of(self)
        given = by_name(args, kwargs)
        if call is not None and call.expected is not None:
            if call.collected:
                raise TypeError(
                    f"model: its forward calls self.loss_function twice, but a patched head makes one loss; "
                    f"{KEEP_LOGITS}"
                )
            checked = 0.0 if call.expected.asked is None else check_loss_call(call.expected.asked, given)
            return self.collect(call, logits)[1][0] + checked
        targets = targets_of(given.get("labels"), given.get("shift_labels"), given.get("ignore_index"))
        inputs = {"num_items": count_of(given.get("num_items_in_batch"))} if call is None else call.inputs
        if call is not None:
            call.collected = True
        how = {name: self.options[name] for name in ("temperature", "vocab") if name in self.options}
        return self.log.run(self.objective, logits, targets, inputs, self.head.training, **how)

    def evaluate(
        self, head: Head, hidden: Tensor, targets: Tensor | hl.Prepared, inputs: Mapping[str, Any]
    ) -> tuple[Any, list[Tensor]]:
        out = hl.FusedLMHead.forward(head, hidden, targets=targets, objective=self.objective, inputs=inputs)
        assert isinstance(out, hl.Output)
        self.log.add(out, head.training)
        return out, [out.loss]

    def _check_probes(self, got: Tensor) -> Tensor | float:
        """Check on a few numbers that the model does to its logits what the source does: at the first call or, in a
        graph, which cannot read them, by the operator at every call."""
        if torch.compiler.is_compiling():
            return _same_transform(got, self.transform)
        check_transform(got, self.transform)
        self.probed = True
        return 0.0


HARMLESS = ("torch", "accelerate", "deepspeed", "transformers", "wandb", "headloss")  # whose hooks change no logits


def _check_hooks(head: nn.Module) -> None:
    hook = own_hook(head, HARMLESS, ("_forward_hooks", "_backward_hooks", "_backward_pre_hooks"))
    if hook is not None:
        raise TypeError(
            f"model: its head has {hook} on its output or its gradient, but a patched head returns a loss and no "
            f"logits; remove it, or {KEEP_LOGITS}"
        )


def transform_said(scale: float = 1.0, softcap: float | None = None, **_: Any) -> str:
    """What these options of a source make of `PROBES`, in words."""
    scaled = [scale * x for x in PROBES]
    wanted = scaled if softcap is None else [softcap * math.tanh(x / softcap) for x in scaled]
    numbers = ", ".join(f"{x:.6g}" for x in wanted)  # as text: a graph would take numbers for some that vary
    return f"scale={scale} and softcap={softcap} give {numbers}"


SAY_IT = (
    "pass patch(model, ..., scale=, softcap=) as the model applies them, or keep the logits with "
    "model.loss_function = loss_function(objective)"
)


def probes(like: Tensor, width: int = len(PROBES)) -> Tensor:
    """A row of `PROBES`, or of its first `width`, for each row of `like`."""
    rows = like.shape[:-1]
    columns = [like.new_full((*rows, 1), x) for x in PROBES[:width]]
    return torch.cat(columns, -1) if columns else like.new_empty((*rows, 0))


def range_of(logits: Tensor) -> Tensor:
    """(2, columns): the least and the largest of each column, which are equal unless the model tells rows apart."""
    rows = logits.reshape(-1, logits.shape[-1])
    return torch.stack([rows.amin(0), rows.amax(0)])


def check_transform(got: Tensor, said: str, instead: str = SAY_IT) -> None:
    """`got`: the range of what the model made of `PROBES`."""
    wanted = [float(x) for x in said.rpartition(" give ")[2].split(", ")]
    if got.shape[-1] != len(wanted):
        raise ValueError(f"model: it makes {got.shape[-1]} columns of {len(wanted)} logits; {KEEP_LOGITS}")
    for probe, want, found in zip(PROBES, wanted, got.float().T.tolist(), strict=True):
        for x in found:
            if not abs(x - want) <= 0.02 * abs(want):
                raise ValueError(f"model: it turns a logit of {probe:g} into {x:.4g}, but {said}; {instead}")


@torch.library.custom_op("headloss::same_transform", mutates_args=())
def _same_transform(got: Tensor, transform: str) -> Tensor:
    if got.device.type != "cuda":
        check_transform(got, transform)
    elif should_defer(got.device):
        check_later(got, lambda numbers: check_transform(numbers, transform))
    return got.new_zeros(())


@_same_transform.register_fake
def _(got: Tensor, transform: str) -> Tensor:
    return got.new_zeros(())


class _Tie(torch.autograd.Function):
    """tensors -> (placeholder, tensors): their gradients wait for the placeholder's."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, width: int, *tensors: Tensor) -> Any:
        ctx.set_materialize_grads(False)
        return (probes(hidden, width), *(x.view_as(x) for x in tensors))

    @staticmethod
    def backward(ctx: Any, _: Tensor | None, *grads: Tensor | None) -> Any:
        return (None, None, *grads)


def without_logits(outputs: Any) -> Any:
    """The model's outputs, with nothing that could be taken for logits."""
    shape = (*outputs.logits.shape[:-1], 0)
    empty = torch.empty(shape, dtype=outputs.logits.dtype, device=outputs.logits.device)
    outputs["logits"] = empty if torch.compiler.is_compiling() else empty.as_subclass(NoLogits)
    return outputs


def _before(model: nn.Module, args: Any, kwargs: Any) -> None:
    if getattr(model, "_is_replica", False):
        raise TypeError(
            "model: nn.DataParallel (which Trainer uses by itself where one process sees several GPUs) copies a "
            "patched model, and the copies would all run the first one's forward; launch with torchrun or accelerate "
            "for DistributedDataParallel, or show the process one GPU with CUDA_VISIBLE_DEVICES"
        )
    HERE.now.ran = False


def _after(model: Any, args: Any, kwargs: Mapping[str, Any], outputs: Any) -> None:
    if not HERE.now.ran and any(kwargs.get(name) is not None for name in ("labels", "shift_labels")):
        raise bypassed(model.forward)
