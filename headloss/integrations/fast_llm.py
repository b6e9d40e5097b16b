"""headloss in Fast-LLM: its `losses:` block as one objective, its keyword inputs, its metric names.

    head = FastLLMLosses({"ce": {"type": "label"}, "rl": {"type": "gspo", "epsilon_low": 3e-4, "epsilon_high": 4e-4}})
    loss, grad_logits = head.forward_backward(logits, kwargs, losses)        # kwargs as Fast-LLM's layers pass them on

It is a module with the three methods that Fast-LLM's head calls on each of `head.losses`; in a config it is
`type: headloss` (`headloss.integrations.fast_llm_plugin`).

All losses of the block share one sweep, in any combination, each at its own `logits_scale_factor` if it has one; a
`monolithic` loss stands for its children.  A row whose label is negative, or that `loss_mask` leaves out, counts in
none.  Token losses divide by `num_labels_in_batch`, gspo by `num_documents_in_batch`.

Follows fast_llm/layers/language_model/{head.py,loss} of Fast-LLM's main branch of July 2026.  Only
`get_loss_definitions` imports Fast-LLM, whose records it returns.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

import headloss as hl
from headloss.deferred_checks import check_zero
from headloss.integrations.fast_llm_terms import blocks_of, options_at, temperature_of, term_of

METRICS = (
    "old_logprobs", "ratio_new_old", "ratio_new_old_sum", "ratio_new_old_squared_sum", "kl_new_old",
    "clipped_ratio_fraction", "advantage", "max_advantage", "min_advantage", "num_tokens",
)  # fmt: skip
DATA = {"train_samples_reward": ("reward", None), "staleness": ("model_version", "documents_seen")}
BY_DISTANCE = ("labels", "loss_mask", "advantages", "old_log_probabilities", "label_counts", "reward", "model_version")


PREPROCESSING: Mapping[str, dict[str, bool]] = {  # what Fast-LLM's data must contain
    "label": {},
    "z_loss": {"return_prediction_mask": True},
    "distillation": {"return_prediction_mask": True},
    "grpo": {"use_grpo_data": True, "return_label_counts": True},
    "gspo": {"use_grpo_data": True, "return_label_counts": True, "return_document_index": True},
    "dpo": {"use_preference_spans": True},
}


class FastLLMLosses(nn.Module):
    """The losses of one head, as `objective`; its methods are those of a loss in Fast-LLM's head.

    losses               the block: a name, then type, weight and options of each loss
    logits_scale_factor  multiplies the logits, the teachers' too; `weight` multiplies every loss
    prediction_distance  which inputs are this head's, where there is one for each distance
    num_splits           the head's cross_entropy_splits: each call gets one part of the rows
    register             append each loss to `losses`; its metrics are appended always
    shard                this rank's part of a vocabulary; `sequence_group`: ranks that share documents
    """

    def __init__(
        self,
        losses: Mapping[str, Mapping[str, Any]],
        *,
        logits_scale_factor: float = 1.0,
        weight: float = 1.0,
        prediction_distance: int = 1,
        num_splits: int = 1,
        register: bool = True,
        shard: hl.VocabShard | None = None,
        sequence_group: Any = None,
    ) -> None:
        super().__init__()
        self.blocks = blocks_of(losses)
        self.scale, self.distance, self.splits = logits_scale_factor, prediction_distance, num_splits
        self.register, self.shard, self.group = register, shard, sequence_group
        kinds = [b["type"] for b in self.blocks.values()]
        if "dpo" in kinds and "gspo" in kinds:
            raise ValueError("losses: dpo and gspo cut the tokens into different segments; use two heads")
        if kinds.count("dpo") > 1:
            raise ValueError("losses: wanted one dpo at most, for there is one pair of spans")
        for kind in {"dpo", "gspo"} & set(kinds):
            if num_splits > 1:
                raise ValueError(f"num_splits: {kind} needs all rows of a document; use cross_entropy_splits = 1")
        if "dpo" in kinds and sequence_group is not None:
            raise ValueError("sequence_group: dpo's spans are those of whole sequences; each rank needs its own")
        if "dpo" in kinds and prediction_distance > 1:
            raise ValueError("prediction_distance: dpo is of the next token; give it to the first head only")
        terms = {name: term_of(name, block, weight) for name, block in self.blocks.items()}
        entropies = {
            f"{name}_entropy": hl.Term(_entropy, **options_at(block))
            for name, block in self.blocks.items()
            if block.get("metrics", "none") not in ("none", "few")
        }
        self.objective = hl.Objective(**terms, metrics=entropies)  # type: ignore[arg-type]
        self.quiet = hl.Objective(**terms)  # type: ignore[arg-type]

    def get_preprocessing_config(self) -> dict[str, Any]:
        """What the losses need of Fast-LLM's data, in the form of its preprocessing config."""
        return {k: v for block in self.blocks.values() for k, v in PREPROCESSING[block["type"]].items()}

    def get_loss_definitions(self) -> list[Any]:
        """A `LossDef` of Fast-LLM for every name that `forward_backward` may append to `losses`."""
        config: Any = importlib.import_module("fast_llm.engine.base_model.config")
        own = {self.name(name): "sum" for name in self.blocks} if self.register else {}
        kinds = {**own, **self._reductions()}
        return [config.LossDef(name=n, reduction=getattr(config.ReductionType, kind)) for n, kind in kinds.items()]

    def forward_backward(
        self,
        logits: Tensor,
        kwargs: Mapping[str, Any],
        losses: dict[str, list[Tensor]] | None = None,
        split_index: int = 0,
        grad_logits: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """(loss, gradient of the logits).  The gradient is multiplied by `grad_output` and added to `grad_logits`; if
        there is no `grad_output`, `grad_logits` is returned as it is.

        Each loss, before its weight, and its metrics are appended to `losses` under Fast-LLM's names.
        """
        if not 0 <= split_index < self.splits:
            raise ValueError(f"split_index: wanted less than num_splits={self.splits}, got {split_index}")
        kwargs = {key: self._mine(key, x, split_index) for key, x in kwargs.items()}
        targets = self._targets(logits, kwargs)
        call = self._call(targets, kwargs, split_index)
        source = hl.Logits(logits, scale=self.scale, shard=self._shard(logits))
        grad_output = kwargs.get("grad_output")
        objective = self.quiet if losses is None else self.objective
        if grad_output is None:
            with torch.no_grad():
                out, grad = objective(source, targets, **call), grad_logits
        else:
            out = objective.forward_backward(source, targets, grad_scale=grad_output, **call)
            assert out.grads is not None and out.grads.logits is not None
            grad = out.grads.logits if grad_logits is None else grad_logits.add_(out.grads.logits)
        if losses is not None:
            own = {self.name(name): x for name, x in out.terms.items()} if self.register else {}
            for name, value in (*own.items(), *self.metrics(out, targets, kwargs).items()):
                losses.setdefault(name, []).append(self._over_rows(name, value))
        return out.loss, grad

    def name(self, name: str) -> str:
        """What Fast-LLM calls a loss of this head."""
        return name if self.distance == 1 else f"{name}_{self.distance}"

    def _mine(self, key: str, x: Any, split: int) -> Any:
        """The part of a keyword input that belongs to this head and to this part of the rows."""
        per_row = key in BY_DISTANCE or key == "global_document_index_q"
        if key in (*BY_DISTANCE, "num_labels_in_batch") and isinstance(x, list | tuple):
            x = x[self.distance - 1]
        if not (per_row and isinstance(x, Tensor)):
            return x
        x = self._local_rows(x)
        return x.chunk(self.splits)[split] if self.splits > 1 else x

    def _local_rows(self, x: Tensor) -> Tensor:
        """This rank's rows, if ranks share them."""
        return x

    def _over_rows(self, name: str, x: Tensor) -> Tensor:
        """A number for `losses`, over the ranks that share rows."""
        return x.detach()

    def _shard(self, logits: Tensor) -> hl.VocabShard | None:
        return self.shard

    def _reductions(self) -> dict[str, str]:
        """The names of the metrics, and how Fast-LLM combines their values from several calls and ranks."""
        found: dict[str, str] = {}
        for name, block in self.blocks.items():
            if block["type"] not in ("grpo", "gspo"):
                continue
            names = ["new_logprobs"]
            if block["metrics"] != "none":
                names += METRICS if block["metrics"] == "few" else (*METRICS, "entropy")
                names += ["num_segments"] if block["type"] == "gspo" else []
                names += [f"{way}{metric}" for metric in DATA for way in ("", "max_", "min_")]
            kinds = {"max_": "maximum", "min_": "minimum"}
            found |= {f"{self.name(name)}_{x}": kinds.get(x[:4], "sum") for x in names}
        return found

    def metrics(self, out: hl.Output, targets: Tensor, kwargs: Mapping[str, Any]) -> dict[str, Tensor]:
        """Fast-LLM's policy metrics, from the facts: sums over documents of their tokens' means."""
        found: dict[str, Tensor] = {}
        for name, block in self.blocks.items():
            if block["type"] not in ("grpo", "gspo"):
                continue
            logprob, name = _fact(out, "logprob", block), self.name(name)
            mask = targets >= 0
            share = mask / kwargs["label_counts"].to(logprob.dtype).clamp(min=1)
            documents = kwargs["num_documents_in_batch"]
            found[f"{name}_new_logprobs"] = (logprob * share).sum() / documents
            if block.get("metrics", "none") == "none":
                continue
            given = (kwargs[k] for k in ("old_log_probabilities", "advantages"))
            old, advantage = (torch.where(mask, x, 0.0) for x in given)
            d, count = (logprob - old).masked_fill(~mask, 0.0), mask.to(logprob.dtype)
            if block["type"] == "gspo":
                segments = self._documents(targets, kwargs)
                d = segments.spread(segments.totals(d * share)).view(d.shape)
                count = share
                found[f"{name}_num_segments"] = share.sum()
            ratio = d.exp()
            clipped = (ratio < 1 - block.get("epsilon_low", 0.2)) | (ratio > 1 + block.get("epsilon_high", 0.2))
            means = {
                "old_logprobs": old,
                "ratio_new_old": ratio,
                "kl_new_old": ratio - d - 1,
                "clipped_ratio_fraction": clipped,
                "advantage": advantage,
            }
            if block["metrics"] != "few":
                means["entropy"] = _fact(out, "entropy", block)
            found |= {f"{name}_{k}": (x * share).sum() / documents for k, x in means.items()}
            found[f"{name}_ratio_new_old_sum"] = (ratio * count).sum()
            found[f"{name}_ratio_new_old_squared_sum"] = (ratio * ratio * count).sum()
            found[f"{name}_max_advantage"] = advantage.masked_fill(~mask, -torch.inf).max()
            found[f"{name}_min_advantage"] = advantage.masked_fill(~mask, torch.inf).min()
            found[f"{name}_num_tokens"] = mask.sum()
            for metric, (key, since) in DATA.items():
                if kwargs.get(key) is None:
                    continue
                x = kwargs[key]
                x = (x if since is None else kwargs[since] - x).to(share.dtype)
                found[f"{name}_{metric}"] = (x * share).sum() / documents
                found[f"{name}_max_{metric}"] = x.masked_fill(~mask, -torch.inf).max()
                found[f"{name}_min_{metric}"] = x.masked_fill(~mask, torch.inf).min()
        return found

    def _targets(self, logits: Tensor, kwargs: Mapping[str, Any]) -> Tensor:
        labels = kwargs.get("labels")
        if labels is None:
            labels = torch.zeros(logits.shape[:-1], dtype=torch.long, device=logits.device)
        ignored = labels < 0
        if kwargs.get("loss_mask") is not None:
            ignored = ignored | ~kwargs["loss_mask"].bool()
        return labels.masked_fill(ignored, -100)

    def _call(self, targets: Tensor, kwargs: Mapping[str, Any], split: int) -> dict[str, Any]:
        call: dict[str, Any] = {"num_items": kwargs.get("num_labels_in_batch")}
        teachers: dict[str, Any] = {}
        for name, block in self.blocks.items():
            kind = block["type"]
            if kind in ("grpo", "gspo"):
                call["advantage"] = _wide(kwargs["advantages"])
                call["old_logprob"] = _wide(kwargs["old_log_probabilities"])
            if kind == "gspo":
                call["segments"] = self._documents(targets, kwargs)
                call["num_segments"] = kwargs["num_documents_in_batch"]
                if "label_counts" in kwargs and call["segments"].group is None:
                    _check_whole(call["segments"], targets, kwargs["label_counts"])
            if kind == "distillation":  # its temperature applies to the teacher alone
                scale = self.scale / float(block.get("temperature", 1.0))
                logits = self._reference(kwargs, block.get("reference_model", "teacher"), split)
                teachers[name] = hl.Logits(logits, scale=scale, shard=self._shard(logits))
            if kind == "dpo":
                logits, T = self._reference(kwargs, block["reference_model"], split).detach(), temperature_of(block)
                reference = hl.Logits(logits, scale=self.scale, temperature=T, shard=self._shard(logits))
                call["ref_logprob"] = hl.row_facts(reference, targets, want=("logprob",)).logprob
                call["segments"] = _spans(targets, kwargs)
                call["pairs"] = torch.tensor([[0, 1]], device=targets.device)
        if teachers:
            call["teacher"] = teachers
        return call

    def _documents(self, targets: Tensor, kwargs: Mapping[str, Any]) -> hl.Segments:
        ids = kwargs["global_document_index_q"].long() - 1  # Fast-LLM counts from 1
        return hl.Segments.from_ids(
            ids.view(targets.shape), kwargs["num_documents_in_sequence"], self._documents_group()
        )

    def _documents_group(self) -> Any:
        return self.group

    def _reference(self, kwargs: Mapping[str, Any], name: str, split: int) -> Tensor:
        """The logits of a reference model, from what it left behind: those of the head with the same name as ours."""
        left: Mapping[str, Tensor] = kwargs[f"reference_{name}_hidden_states"]
        own = getattr(self, "module_name", "").split(".losses.")[0] + ".logits"
        found = [x for key, x in left.items() if key == own] or [x for key, x in left.items() if key.endswith("logits")]
        if len(found) != 1:
            raise ValueError(
                f"reference_{name}_hidden_states: wanted {own!r} or one entry that ends in 'logits', got {list(left)}"
            )
        return found[0].chunk(self.splits)[split] if self.splits > 1 else found[0]


def _fact(out: hl.Output, fact: str, block: Mapping[str, Any]) -> Tensor:
    T = temperature_of(block)
    return out.facts[fact if T == 1.0 else (fact, T)].detach()


def _entropy(entropy: Tensor) -> Tensor:
    return entropy


def _check_whole(segments: hl.Segments, targets: Tensor, counts: Tensor) -> None:
    """Check that all labels of a document are in this call: Fast-LLM divides by all of them, gspo by those present."""
    counted = targets.reshape(-1) >= 0
    here = segments.spread(segments.totals(counted.to(torch.float32)))
    message = (
        "label_counts: {} tokens belong to documents with labels outside this call, and gspo needs whole documents; "
        "use schedule.micro_batch_splits = 1 and one prediction head"
    )
    wrong = ((here != counts.reshape(-1)) & counted).sum()
    check_zero("label_counts: a document has labels outside this call", (wrong, message))


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _spans(targets: Tensor, kwargs: Mapping[str, Any]) -> hl.Segments:
    """Segment 0 is everything chosen, 1 everything rejected, 2 the rest: Fast-LLM compares 0 and 1 in one sigmoid."""
    ids = torch.full_like(targets, 2).view(len(kwargs["chosen_spans"]), -1)
    for segment, name in enumerate(("chosen_spans", "rejected_spans")):
        for sample, spans in enumerate(kwargs[name]):
            for begin, end in spans:
                ids[sample, begin:end] = segment
    return hl.Segments.from_ids(ids.view(targets.shape), 3)
