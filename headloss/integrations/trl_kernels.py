"""The functions on heads and logits that TRL's trainers call, computed by headloss; see `headloss.integrations.trl`.

add_fused_lm_head                    model(..., labels=..., fused_lm_head=True) returns log-probabilities and the like
selective_log_softmax, ...           functions on logits that exist
swap_kernels                         puts these in place of TRL's, inside a `with`
"""

from __future__ import annotations

import functools
import sys
import types
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import trl
from torch import Tensor, nn
from transformers import Trainer, TrainerCallback

import headloss as hl
from headloss.integrations.adapter import HERE, Adapter, Expected, Head
from headloss.integrations.causal_lm import check_head, check_model, transform_of, unwrapped
from headloss.integrations.early_targets import prepared
from headloss.metrics import copied_metrics, read_metrics
from headloss.record import with_fields

VERSIONS = ("1.16",)
FACTS: Mapping[str, tuple[str, ...]] = {  # what TRL calls the outputs of a fused head, and the facts behind them
    "log_probs": ("logprob",),
    "entropy": ("entropy",),
    "log_sum_sq_probs": ("sum_p2",),
    "mean_logits": ("mean_logprob", "lse"),
    "is_top1": ("argmax",),
}
Metrics = Sequence[str | Callable[..., Any]]


def check_version() -> None:
    if trl.__version__.rsplit(".", 1)[0] not in VERSIONS:
        raise RuntimeError(
            f"trl: this is {trl.__version__}, but headloss supports only {', '.join(VERSIONS)}, whose "
            f"internals it relies on; pip install 'trl=={VERSIONS[-1]}.*', or use Trainer of Transformers with "
            f"headloss.integrations.transformers.patch(model, objective)"
        )


check_version()  # before anything is looked up that other versions have elsewhere
from trl.trainer import distillation_trainer as distillation_trainer  # noqa: E402
from trl.trainer import dpo_trainer as dpo_trainer  # noqa: E402
from trl.trainer import grpo_trainer as grpo_trainer  # noqa: E402
from trl.trainer import sft_trainer as sft_trainer  # noqa: E402
from trl.trainer import utils as trl_utils  # noqa: E402


def add_fused_lm_head(
    model: nn.Module,
    temperature: float = 1.0,
    cast_lm_head_to_fp32: bool = False,
    outputs: Sequence[str] = ("log_probs",),
    *,
    metrics: Metrics = (),
    memory: str | int = "1GiB",
) -> None:
    """TRL's function of this name: `model(..., labels=labels, fused_lm_head=True)` returns the outputs asked for.

    `metrics` are metrics of headloss made from the same sweep, kept in `model.headloss.log`.
    """
    check_version()
    base = unwrapped(model)
    # TRL has given the head a forward in float32, which calls without labels still use
    plain = vars(base.get_output_embeddings()).pop("forward", None) if cast_lm_head_to_fp32 else None
    head = check_model(base, takes_loss=False, instead="use TRL's own trainer")
    options = {"memory": memory, "temperature": temperature, **transform_of(base)}
    FusedHead(base, head, options, outputs, cast_lm_head_to_fp32, metrics).plain = plain
    USED.heads += 1
    base.headloss.take_forward(base, _fused_forward)


class FusedHead(Adapter):
    """The adapter of a model in a TRL trainer: what its head has to compute."""

    def __init__(
        self,
        model: nn.Module,
        head: nn.Linear,
        options: Mapping[str, Any],
        outputs: Sequence[str],
        cast: bool,
        metrics: Metrics,
    ) -> None:
        if isinstance(outputs, str):
            raise TypeError(f"outputs: wanted a list of names, got {outputs!r}")
        for name in outputs:
            if name not in FACTS:
                raise ValueError(f"outputs: {name!r} is not known; there are {', '.join(FACTS)}")
        self.metrics = list(read_metrics(copied_metrics(metrics)))
        for name, call in self.metrics:
            if call.input_names or call.signature.wants("segments"):
                raise ValueError(f"metrics: {name!r} asks for more than facts and targets, which only an objective has")
        super().__init__(model, head, options)
        self.outputs, self.cast = ("log_probs", *outputs), cast
        facts = [fact for name in self.outputs for fact in FACTS[name]]
        facts += [fact.name for _, call in self.metrics for fact in call.signature.facts]
        self.want = tuple(dict.fromkeys(facts))
        self.wanted: tuple[hl.Objective, dict[str, Any], Tensor | None] | None = None  # a loss to compute in the visit

    def evaluate(
        self, head: Head, hidden: Tensor, targets: Tensor | hl.Prepared, inputs: Mapping[str, Any]
    ) -> tuple[Any, list[Tensor]]:
        USED.call()
        with torch.autocast(hidden.device.type, enabled=False) if self.cast else nullcontext():
            source = source_of(head, hidden.float(), self.options) if self.cast else head._source(hidden)
            if self.wanted is not None:
                objective, call, _ = self.wanted
                out = objective(source, targets, **call)
                self.log.add(with_fields(out, metrics=shown(out.metrics)), head.training)
                return {name: out.facts[name].detach() for name in self.want}, [out.loss]
            facts = hl.row_facts(source, targets, want=self.want)
        self._measure(facts, targets.targets if isinstance(targets, hl.Prepared) else targets, head.training)
        return dict(facts), [facts[name] for name in ("logprob", "entropy") if name in self.want]

    def _measure(self, facts: Mapping[Any, Tensor], targets: Tensor, training: bool) -> None:
        found: dict[str, hl.Metric] = {}
        keep = targets != -100
        for name, call in self.metrics:
            given = {
                p.name: targets if p.fact is None else facts[p.fact.name].detach() for p in call.signature.parameters
            }
            found[name] = hl.Metric.of(name, call.fn(**given), keep.reshape(-1), "token")
        self.log.meter(found, training)


UNSEEN = "fact "  # begins the name of a metric that only asks for its fact


def shown(metrics: Mapping[str, hl.Metric]) -> dict[str, hl.Metric]:
    return {name: x for name, x in metrics.items() if not name.startswith(UNSEEN)}


def source_of(head: nn.Linear, hidden: Tensor, options: Mapping[str, Any]) -> hl.Linear:
    weight: Tensor = head.weight
    bias: Tensor | None = head.bias
    if hidden.dtype != weight.dtype and not torch.is_autocast_enabled(hidden.device.type):
        weight, bias = weight.to(hidden.dtype), None if bias is None else bias.to(hidden.dtype)
    return hl.Linear(hidden, weight, bias, **options)


def _fused_forward(
    self: Any,
    *args: Any,
    fused_lm_head: bool = False,
    labels: Tensor | None = None,
    shift_labels: Tensor | None = None,
    num_items_in_batch: int | Tensor | None = None,
    **kwargs: Any,
) -> Any:
    adapter: FusedHead = self.headloss
    given = {"labels": labels, "shift_labels": shift_labels, "num_items_in_batch": num_items_in_batch}
    HERE.now.ran = True
    if not fused_lm_head:
        return adapter.inner(self, *args, **kwargs, **{name: x for name, x in given.items() if x is not None})
    check_head(self, adapter.head)
    if labels is None and shift_labels is None:
        raise ValueError("labels: needed with fused_lm_head=True")
    targets = hl.shift_labels(labels) if shift_labels is None else shift_labels  # type: ignore[arg-type]
    keep, alone = None, True
    if adapter.wanted is not None:
        keep, alone = adapter.wanted[2], "segments" not in adapter.wanted[1]
    counted = targets if keep is None else targets.masked_fill(~keep, -100)
    with adapter.expecting(Expected(prepared(counted) if alone else counted, adapter.evaluate)) as call:
        outputs = adapter.inner(self, *args, **{**kwargs, "use_cache": False})
        facts, live = adapter.collect(call, outputs.logits)
    if adapter.wanted is None:
        facts.update(zip([name for name in ("logprob", "entropy") if name in facts], live, strict=True))
    targets = targets.to(facts["logprob"].device)
    cut = slice(None, -1) if shift_labels is None else slice(None)
    facts, targets = {name: x[:, cut] for name, x in facts.items()}, targets[:, cut]
    mask = targets != -100
    derived: dict[str, Callable[[], Tensor]] = {
        "log_probs": lambda: facts["logprob"],
        "entropy": lambda: facts["entropy"],
        "log_sum_sq_probs": lambda: facts["sum_p2"].detach().masked_fill(~mask, 1.0).log(),
        "mean_logits": lambda: facts["mean_logprob"].detach() + facts["lse"].detach(),
        "is_top1": lambda: (facts["argmax"] == targets) & mask,
    }
    fields = {name: make() if name in adapter.outputs else None for name, make in derived.items()}
    items = mask.sum().clamp(min=1) if num_items_in_batch is None else num_items_in_batch
    loss = -facts["logprob"].sum() / items if adapter.wanted is None else live[0]
    aux_loss = getattr(outputs, "aux_loss", None)
    if aux_loss is not None and adapter.wanted is None:
        loss = loss + getattr(self.config.get_text_config(), "router_aux_loss_coef", 0.0) * aux_loss
    return trl_utils.FusedCausalLMOutput(loss=loss, label_mask=mask, aux_loss=aux_loss, **fields)


def selective_log_softmax(
    logits: Tensor, index: Tensor, temperature: float = 1.0, row_mask: Tensor | None = None
) -> Tensor:
    """log p at `index`, one per row (several per row stay with TRL's function)."""
    if index.ndim == logits.ndim:
        return NATIVE["selective_log_softmax"](logits, index, temperature, row_mask)
    return selective_log_softmax_and_entropy(logits, index, temperature=temperature, row_mask=row_mask, entropy=False)[
        0
    ]


def entropy_from_logits(logits: Tensor, chunk_size: int = 128) -> Tensor:
    USED.call()
    return hl.row_facts(hl.Logits(logits), want=("entropy",)).entropy


def selective_log_softmax_and_entropy(
    logits: Tensor,
    index: Tensor,
    entropy_requires_grad: bool = True,
    temperature: float = 1.0,
    row_mask: Tensor | None = None,
    *,
    entropy: bool = True,
) -> tuple[Tensor, Any]:
    if temperature <= 0:
        raise ValueError("temperature must be positive")
    USED.call()
    targets = index if row_mask is None else index.masked_fill(row_mask == 0, -100)
    want = ("logprob", "entropy") if entropy else ("logprob",)
    facts = hl.row_facts(hl.Logits(logits, temperature=temperature), targets, want=want)
    if not entropy:
        return facts.logprob, None
    return facts.logprob, facts.entropy if entropy_requires_grad else facts.entropy.detach()


_KERNELS: Mapping[str, Callable[..., Any]] = {
    "add_fused_lm_head": add_fused_lm_head,
    "selective_log_softmax": selective_log_softmax,
    "entropy_from_logits": entropy_from_logits,
    "selective_log_softmax_and_entropy": selective_log_softmax_and_entropy,
}
NATIVE = {name: getattr(trl_utils, name) for name in _KERNELS}


@contextmanager
def swap_kernels(*, metrics: Metrics = (), memory: str | int = "1GiB") -> Iterator[None]:
    """Inside it, TRL's functions on heads and logits are headloss's, in every module of TRL.

    >>> with swap_kernels():
    ...     trainer = trl.DPOTrainer(...)
    ...     trainer.train()
    """
    check_version()
    ours: dict[str, Callable[..., Any]] = {
        **_KERNELS,
        "add_fused_lm_head": functools.partial(add_fused_lm_head, metrics=metrics, memory=memory),
    }
    before, train = (USED.heads, USED.calls), Trainer.train
    Trainer.train = _watched(train)
    try:
        with replaced({NATIVE[name]: fn for name, fn in ours.items()}):
            yield
    finally:
        Trainer.train = train
    if (USED.heads, USED.calls) == before:
        warnings.warn(
            "swap_kernels: nothing inside asked for a function of headloss; make the trainer inside, and run it there",
            stacklevel=3,
        )


class _Used:
    """How often headloss computed something in TRL's place; calls inside a graph are not counted."""

    heads = calls = 0
    compiled = False

    def call(self) -> None:
        if torch.compiler.is_compiling():
            self.compiled = True
        else:
            self.calls += 1


USED = _Used()


class _Watch(TrainerCallback):
    """Raises after a step without a call of headloss: it has computed its softmax elsewhere."""

    def __init__(self, name: str) -> None:
        self.name, self.calls = name, -1

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.calls = USED.calls

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if USED.calls == self.calls and not USED.compiled:
            raise RuntimeError(
                f"swap_kernels: {self.name} has made a step without any function of headloss: it computes its softmax "
                f"itself, or by another kernel; run it outside of swap_kernels"
            )


def _watched(train: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(train)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        ours = any(kind.__module__.startswith("headloss.") for kind in type(self).__mro__)  # which need not call one
        watch = None if ours else _Watch(type(self).__name__)
        if watch is not None:
            self.add_callback(watch)
        try:
            return train(self, *args, **kwargs)
        finally:
            if watch is not None:
                self.remove_callback(watch)

    return run


STANDING: dict[Callable[..., Any], Callable[..., Any]] = {}  # what currently replaces each function of TRL's


@contextmanager
def replaced(functions: Mapping[Callable[..., Any], Callable[..., Any]]) -> Iterator[None]:
    """Replace each function, or its current replacement, wherever a module of TRL holds it; then put it back."""
    outer = {native: STANDING.get(native, native) for native in functions}
    _exchange({outer[native]: new for native, new in functions.items()})
    STANDING.update(functions)
    try:
        yield
    finally:
        _exchange({new: outer[native] for native, new in functions.items()})
        STANDING.update(outer)


def _exchange(functions: Mapping[Callable[..., Any], Callable[..., Any]]) -> None:
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] == "trl" and module is not None:
            for key, value in list(vars(module).items()):
                if isinstance(value, types.FunctionType | functools.partial) and value in functions:
                    setattr(module, key, functions[value])
