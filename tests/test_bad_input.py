"""Wrong calls: each is refused with the argument's name, before anything is computed."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

import headloss as hl
from headloss.losses import cpo, cross_entropy, entropy_bonus, grpo, gspo, jsd, simpo, z_loss
from headloss.row_weights import truncate

N, V, D, S = 6, 11, 4, 3
HIDDEN, WEIGHT, LOGITS = torch.randn(N, D), torch.randn(V, D), torch.randn(N, V)
TARGETS, ROW = torch.arange(N), torch.randn(N)
SEGMENTS = hl.Segments.from_ids(torch.tensor([0, 0, 1, 1, 2, 2]))
LINEAR, LOGITS_SOURCE = hl.Linear(HIDDEN, WEIGHT), hl.Logits(LOGITS)
CE, Z = hl.Objective(ce=cross_entropy), hl.Objective(z=z_loss)
RL, SEQ = hl.Objective(rl=grpo), hl.Objective(rl=gspo)


def mine(logprob, my_input, *, my_option=1.0):
    return logprob * my_input * my_option


def dropping(logprob):
    return -logprob[1:]


def masking(logprob):
    return -logprob[logprob < logprob.max()]


def scalar(logprob):
    return logprob.mean()


def matrix(logprob):
    return logprob[:, None] * logprob[None]


def nothing(logprob):
    return None


def simpo_of(pairs: list[list[Any]]) -> Any:
    return hl.Objective(p=simpo)(LINEAR, TARGETS, segments=SEGMENTS, pairs=torch.tensor(pairs))


def bad_targets(value: int) -> torch.Tensor:
    targets = TARGETS.clone()
    targets[2] = value
    return targets


def nan_temperature() -> torch.Tensor:
    return torch.tensor([1.0, 1.0, math.nan, 1.0, 1.0, 1.0])


# what is wrong: (the call, the exception, a pattern that names the argument and says what is wanted)
WRONG: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    # sources
    "logits are no tensor": (lambda: hl.Logits([[1.0]]), TypeError, "logits: wanted a tensor, got list"),
    "logits are integers": (lambda: hl.Logits(torch.zeros(3, 4, dtype=torch.long)), TypeError, "logits: .*floating"),
    "logits are of 8 bits": (
        lambda: hl.Logits(torch.zeros(3, 4, dtype=torch.float8_e4m3fn)),
        TypeError,
        "logits: .*16 bits or more.*float8",
    ),
    "logits are a vector": (lambda: hl.Logits(torch.zeros(4)), ValueError, r"logits: .*two dimensions.*\(4,\)"),
    "logits are nested": (
        lambda: hl.Logits(torch.nested.nested_tensor([LOGITS, LOGITS[:2]], layout=torch.jagged)),
        TypeError,
        r"logits: wanted a dense tensor, .*nested; pass its values\(\)",
    ),
    "weight is sparse": (
        lambda: hl.Linear(HIDDEN, WEIGHT.to_sparse()),
        TypeError,
        r"weight: wanted a dense tensor, .*torch.sparse_coo; pass weight.to_dense\(\)",
    ),
    "prepared targets are nested": (
        lambda: hl.prepare(torch.nested.nested_tensor([TARGETS, TARGETS[:2]], layout=torch.jagged)),
        TypeError,
        "targets: wanted a dense tensor, .*nested",
    ),
    "bias is sparse": (lambda: hl.Linear(HIDDEN, WEIGHT, torch.zeros(V).to_sparse()), TypeError, "bias: .*dense"),
    "temperature is sparse": (
        lambda: hl.Logits(LOGITS, temperature=torch.ones(N).to_sparse()),
        TypeError,
        "temperature: wanted a dense tensor",
    ),
    "log-probabilities of a teacher are sparse": (
        lambda: hl.Sparse(TARGETS[:, None], torch.zeros(N, 1).to_sparse()),
        TypeError,
        "logprobs: wanted a dense tensor",
    ),
    "a mask of kept columns is sparse": (
        lambda: hl.Support.from_mask((LOGITS > 0).to_sparse()),
        TypeError,
        "mask: wanted a dense tensor",
    ),
    "targets are sparse": (
        lambda: hl.Objective(ce=cross_entropy)(hl.Logits(LOGITS), TARGETS.to_sparse()),
        TypeError,
        r"targets: wanted a dense tensor, .*pass targets.to_dense\(\)",
    ),
    "an input is sparse": (
        lambda: hl.Objective(rl=grpo)(hl.Logits(LOGITS), TARGETS, advantage=torch.ones(N).to_sparse()),
        TypeError,
        "advantage: wanted a dense tensor",
    ),
    "an input that is said to go by row is sparse": (
        lambda: hl.Objective(rl=grpo)(hl.Logits(LOGITS), TARGETS, advantage=hl.PerRow(torch.ones(N).to_sparse())),
        TypeError,
        "advantage: wanted a dense tensor",
    ),
    "hidden is no tensor": (lambda: hl.Linear(None, WEIGHT), TypeError, "hidden: wanted a tensor"),
    "weight does not fit": (lambda: hl.Linear(HIDDEN, torch.randn(V, D + 1)), ValueError, r"weight: .*\(11, 5\)"),
    "weight is transposed": (lambda: hl.Linear(HIDDEN, WEIGHT.t()), ValueError, r"weight: wanted \(vocabulary, 4\)"),
    "weight has three dimensions": (lambda: hl.Linear(HIDDEN, WEIGHT[None]), ValueError, "weight: wanted"),
    "weight is empty": (lambda: hl.Linear(HIDDEN, torch.empty(0)), ValueError, "weight: .*ZeRO-3"),
    "weight of another dtype": (lambda: hl.Linear(HIDDEN, WEIGHT.bfloat16()), TypeError, "weight: is torch.bfloat16"),
    "weight on another device": (lambda: hl.Linear(HIDDEN, WEIGHT.to("meta")), ValueError, "weight: is on meta"),
    "bias does not fit": (lambda: hl.Linear(HIDDEN, WEIGHT, torch.zeros(D)), ValueError, r"bias: wanted shape \(11,\)"),
    "bias of another dtype": (lambda: hl.Linear(HIDDEN, WEIGHT, torch.zeros(V).half()), TypeError, "bias: is"),
    "temperature 0": (lambda: hl.Logits(LOGITS, temperature=0), ValueError, "temperature: wanted a positive"),
    "temperature below 0": (lambda: hl.Linear(HIDDEN, WEIGHT, temperature=-1.0), ValueError, "temperature: "),
    "temperature is NaN": (lambda: hl.Logits(LOGITS, temperature=math.nan), ValueError, "temperature: "),
    "temperature is text": (lambda: hl.Logits(LOGITS, temperature="1"), TypeError, "temperature: .*str"),
    "row temperature with a NaN": (
        lambda: hl.Logits(LOGITS, temperature=nan_temperature()),
        ValueError,
        "temperature: ",
    ),
    "row temperature with a 0": (lambda: hl.Logits(LOGITS, temperature=torch.zeros(N)), ValueError, "temperature: "),
    "row temperature does not fit": (
        lambda: hl.Logits(LOGITS, temperature=torch.ones(5)),
        ValueError,
        "temperature: .*5",
    ),
    "learned temperature": (
        lambda: hl.Logits(LOGITS, temperature=torch.ones((), requires_grad=True)),
        ValueError,
        "temperature: requires grad",
    ),
    "softcap 0": (lambda: hl.Logits(LOGITS, softcap=0.0), ValueError, "softcap: wanted a positive"),
    "scale 0": (lambda: hl.Logits(LOGITS, scale=0.0), ValueError, "scale: "),
    "scale is infinite": (lambda: hl.Logits(LOGITS, scale=math.inf), ValueError, "scale: "),
    "scale is a tensor": (lambda: hl.Logits(LOGITS, scale=torch.ones(2)), (ValueError, TypeError), "scale: "),
    "in place on a leaf": (
        lambda: hl.Logits(LOGITS.clone().requires_grad_(), inplace=True),
        ValueError,
        "inplace: .*leaf",
    ),
    "logits_dtype is text": (
        lambda: hl.Linear(HIDDEN, WEIGHT, logits_dtype="bf16"),
        TypeError,
        "logits_dtype: .*'bf16'",
    ),
    "memory is text": (lambda: hl.Linear(HIDDEN, WEIGHT, memory="lots"), ValueError, "memory: .*1GiB.*lots"),
    "memory is 0": (lambda: hl.Linear(HIDDEN, WEIGHT, memory=0), ValueError, "memory: wanted a positive"),
    "memory is a float": (lambda: hl.Linear(HIDDEN, WEIGHT, memory=1.5), TypeError, "memory: "),
    "budget below one row": (
        lambda: CE(hl.Linear(HIDDEN, WEIGHT, memory=40), TARGETS),
        ValueError,
        "memory: one row of 11",
    ),
    "budget below one row, facts": (
        lambda: hl.row_facts(hl.Linear(HIDDEN, WEIGHT, memory=40), TARGETS),
        ValueError,
        "memory: one row of 11",
    ),
    "logits_dtype is an integer": (
        lambda: hl.Linear(HIDDEN, WEIGHT, logits_dtype=torch.int32),
        TypeError,
        "logits_dtype: ",
    ),
    "weight_grad_dtype is an integer": (
        lambda: hl.Linear(HIDDEN, WEIGHT, weight_grad_dtype=torch.int8),
        TypeError,
        "weight_grad_dtype: ",
    ),
    "a bare tensor": (lambda: CE(LOGITS, TARGETS), TypeError, r"source: .*hl.Logits\(\.\.\.\)"),
    "a bare tensor, facts": (lambda: hl.row_facts(LOGITS, TARGETS), TypeError, "source: "),
    # targets
    "targets do not fit": (lambda: CE(LINEAR, TARGETS[:5]), ValueError, r"targets: wanted shape \(6,\).*\(5,\)"),
    "targets of another rank": (lambda: CE(LINEAR, TARGETS.view(2, 3)), ValueError, r"targets: wanted shape \(6,\)"),
    "targets are floats": (lambda: CE(LINEAR, TARGETS.float()), TypeError, "targets: wanted an integer tensor"),
    "targets are bools": (lambda: CE(LINEAR, TARGETS > 2), TypeError, "targets: wanted an integer tensor"),
    "targets are a list": (lambda: CE(LINEAR, [1, 2]), TypeError, "targets: wanted .*got list"),
    "target too large": (lambda: CE(LINEAR, bad_targets(V)), ValueError, r"targets: .*\[0, 11\).*got 11"),
    "target -1": (lambda: CE(LINEAR, bad_targets(-1)), ValueError, "targets: .*got -1; ignored rows are marked -100"),
    "target too large, facts": (lambda: hl.row_facts(LINEAR, bad_targets(99)), ValueError, "targets: .*got 99"),
    "target too large, prepared": (lambda: CE(LINEAR, hl.prepare(bad_targets(V))), ValueError, "targets: .*got 11"),
    "target too large, unread": (
        lambda: CE(LINEAR, bad_targets(V), host_read=False),
        (RuntimeError, ValueError),
        "targets: ",
    ),
    "targets on another device": (lambda: CE(LINEAR, TARGETS.to("meta")), ValueError, "targets: is on meta"),
    "targets are missing": (lambda: CE(LINEAR), ValueError, "targets: needed by the fact 'logprob'"),
    "targets are missing, facts": (lambda: hl.row_facts(LINEAR, want="logprob"), ValueError, "targets: needed"),
    "a loss asks for targets": (
        lambda: hl.Objective(a=lambda lse, targets: lse * targets)(LINEAR),
        ValueError,
        "targets: ",
    ),
    "a metric asks for targets": (
        lambda: hl.Objective(z=z_loss, metrics=["accuracy"])(LINEAR),
        ValueError,
        "targets: ",
    ),
    # facts
    "unknown fact": (
        lambda: hl.row_facts(LINEAR, TARGETS, ("entropi",)),
        ValueError,
        "want: 'entropi'.*mean 'entropy'",
    ),
    "no fact": (lambda: hl.row_facts(LINEAR, TARGETS, ()), ValueError, "want: "),
    "a list for a fact": (lambda: hl.row_facts(LINEAR, TARGETS, [([], 1.0)]), ValueError, "want: .*is not a fact"),
    "fact at temperature 0": (
        lambda: hl.row_facts(LINEAR, TARGETS, [("lse", 0.0)]),
        ValueError,
        "want: .*temperature.*lse",
    ),
    "fact at temperature NaN": (lambda: hl.row_facts(LINEAR, TARGETS, [("lse", math.nan)]), ValueError, "want: .*lse"),
    # inputs
    "missing input": (
        lambda: RL(LINEAR, TARGETS),
        TypeError,
        r"advantage: missing; term 'rl' \(grpo\) asks for logprob",
    ),
    "missing input, others passed": (
        lambda: RL(LINEAR, TARGETS, old_logprob=ROW),
        TypeError,
        "advantage: missing.*passed: old_logprob",
    ),
    "missing input is None": (lambda: RL(LINEAR, TARGETS, advantage=None), TypeError, "advantage: missing"),
    "misspelt optional input": (
        lambda: RL(LINEAR, TARGETS, advantage=ROW, old_logprobs=ROW),
        TypeError,
        "old_logprobs: .*mean 'old_logprob'",
    ),
    "another library's name": (
        lambda: RL(LINEAR, TARGETS, advantage=ROW, old_per_token_logps=ROW),
        TypeError,
        "old_per_token_logps.*'old_logprob'",
    ),
    "plural advantage": (lambda: RL(LINEAR, TARGETS, advantages=ROW), TypeError, "advantages: .*mean 'advantage'"),
    "input that nothing asks for": (lambda: CE(LINEAR, TARGETS, advantage=ROW), TypeError, "advantage: no loss asks"),
    "labels for targets": (lambda: CE(LINEAR, labels=TARGETS), TypeError, "labels: .*mean 'targets'"),
    "misspelt reserved name": (lambda: CE(LINEAR, TARGETS, num_item=3), TypeError, "num_item: .*mean 'num_items'"),
    "input does not fit": (lambda: RL(LINEAR, TARGETS, advantage=ROW[:5]), ValueError, r"advantage: has shape \(5,\)"),
    "input of one more dimension": (
        lambda: RL(hl.Linear(HIDDEN.view(2, 3, D), WEIGHT), TARGETS.view(2, 3), advantage=ROW),
        ValueError,
        "advantage: ",
    ),
    "input is a list": (lambda: RL(LINEAR, TARGETS, advantage=[1.0] * N), TypeError, "advantage: wanted a tensor"),
    "input on another device": (
        lambda: RL(LINEAR, TARGETS, advantage=ROW.to("meta")),
        ValueError,
        "advantage: is on meta",
    ),
    "log-probabilities in bf16": (
        lambda: RL(LINEAR, TARGETS, advantage=ROW, old_logprob=ROW.bfloat16()),
        TypeError,
        "old_logprob: is torch.bfloat16",
    ),
    "log-probabilities in fp16": (
        lambda: RL(LINEAR, TARGETS, advantage=ROW, old_logprob=ROW.half()),
        TypeError,
        "old_logprob: is torch.float16",
    ),
    "input of a row weight": (
        lambda: hl.Objective(ce=hl.Term(cross_entropy, row_weight="w"))(LINEAR, TARGETS),
        TypeError,
        "w: missing",
    ),
    "row weight does not fit": (
        lambda: hl.Objective(ce=hl.Term(cross_entropy, row_weight=lambda lse: lse[:2]))(LINEAR, TARGETS),
        ValueError,
        "row_weight: ",
    ),
    # segments
    "segments are missing": (lambda: SEQ(LINEAR, TARGETS, advantage=ROW), ValueError, "segments: term 'rl'"),
    "reduction without segments": (
        lambda: hl.Objective(ce=hl.Term(cross_entropy, reduction="seq_mean_token_sum"))(LINEAR, TARGETS),
        ValueError,
        "segments: term 'ce' needs them for reduction 'seq_mean_token_sum'",
    ),
    "rows without a segment": (
        lambda: SEQ(LINEAR, TARGETS, advantage=ROW, segments=hl.Segments.from_cu_seqlens(torch.tensor([0, 4]), rows=N)),
        ValueError,
        "segments: 2 rows .* no segment",
    ),
    "segments do not fit": (
        lambda: SEQ(LINEAR, TARGETS, advantage=ROW, segments=hl.Segments.from_ids(torch.zeros(5, dtype=torch.long))),
        ValueError,
        r"segments: ids have shape \(5,\)",
    ),
    "segments are a tensor": (
        lambda: SEQ(LINEAR, TARGETS, advantage=ROW, segments=TARGETS),
        TypeError,
        "segments: wanted",
    ),
    "segments without targets": (lambda: Z(LINEAR, segments=SEGMENTS), ValueError, "targets: needed when segments"),
    "segments given twice": (
        lambda: CE(LINEAR, hl.prepare(TARGETS, SEGMENTS), segments=hl.Segments.from_batch((2, 3))),
        ValueError,
        "segments: ",
    ),
    "segment ids are floats": (lambda: hl.Segments.from_ids(ROW), TypeError, "ids: wanted an integer tensor"),
    "segment id too large": (lambda: hl.Segments.from_ids(torch.tensor([0, 3]), 3), ValueError, r"ids: .*\[-1, 3\)"),
    "segment id below -1": (lambda: hl.Segments.from_ids(torch.tensor([0, -2]), 3), ValueError, "ids: "),
    "offsets that fall": (lambda: hl.Segments.from_cu_seqlens(torch.tensor([0, 3, 2])), ValueError, "cu_seqlens: "),
    "offsets that do not begin at 0": (
        lambda: hl.Segments.from_cu_seqlens(torch.tensor([1, 3])),
        ValueError,
        "cu_seqlens: ",
    ),
    "lines of no batch": (lambda: hl.Segments.from_batch(TARGETS), ValueError, r"like: wanted a \(B, T\)"),
    # terms and objectives
    "no term": (hl.Objective, ValueError, "terms: wanted at least one"),
    "term is text": (lambda: hl.Objective(ce="cross_entropy"), TypeError, "ce: .*from_config"),
    "term is a number": (lambda: hl.Objective(ce=3), TypeError, "ce: wanted a loss function"),
    "unknown option": (lambda: hl.Term(grpo, lo=0.1), TypeError, "grpo: no option 'lo'.*mean 'low'"),
    "options of a loss without any": (
        lambda: hl.Term(z_loss, gamma=1.0),
        TypeError,
        "z_loss: no option 'gamma'; it has none",
    ),
    "host_read is a word": (lambda: CE(LINEAR, TARGETS, host_read="no"), TypeError, "host_read: wanted True or False"),
    "option without a value": (lambda: hl.Term(lambda lse, *, k: lse * k), TypeError, "option 'k' has no default"),
    "option with a reserved name": (lambda: hl.Term(lambda lse, *, weight=1.0: lse), TypeError, "option 'weight'"),
    "variable arguments": (lambda: hl.Term(lambda *facts: facts[0]), TypeError, r"\*facts"),
    "unknown reduction": (lambda: hl.Term(z_loss, reduction="mean"), ValueError, "reduction: wanted one of token_mean"),
    "misspelt reduction": (
        lambda: hl.Term(z_loss, reduction="token_men"),
        ValueError,
        "reduction: .*mean 'token_mean'",
    ),
    "length without its reduction": (lambda: hl.Term(z_loss, length=5), ValueError, "length: "),
    "reduction without its length": (
        lambda: hl.Term(z_loss, reduction="seq_mean_token_sum_norm"),
        ValueError,
        "length: ",
    ),
    "length 0": (lambda: hl.Term(z_loss, reduction="seq_mean_token_sum_norm", length=0), ValueError, "length: "),
    "weight is NaN": (lambda: hl.Term(z_loss, weight=math.nan), ValueError, "weight: wanted a finite"),
    "weight is text": (lambda: hl.Term(z_loss, weight="1"), TypeError, "weight: "),
    "weight is a vector": (lambda: hl.Term(z_loss, weight=torch.ones(2)), ValueError, "weight: .*scalar"),
    "learned weight": (
        lambda: hl.Term(z_loss, weight=torch.ones((), requires_grad=True)),
        ValueError,
        "weight: requires grad",
    ),
    "term temperature 0": (lambda: hl.Term(z_loss, temperature=0.0), ValueError, "temperature: "),
    "row_weight is a number": (lambda: hl.Term(z_loss, row_weight=2.0), TypeError, "row_weight: "),
    "unknown fact of a term": (
        lambda: hl.Term(lambda hot: hot, facts={"hot": ("entropie", 2.0)}),
        ValueError,
        "facts: .*entropy",
    ),
    "fact of a term at temperature 0": (
        lambda: hl.Term(lambda hot: hot, facts={"hot": ("entropy", 0)}),
        ValueError,
        "facts: .*hot",
    ),
    "facts that the loss does not take": (lambda: hl.Term(z_loss, facts={"hot": ("entropy", 2.0)}), TypeError, "hot"),
    "a loss that reduces": (
        lambda: hl.Objective(a=scalar)(LINEAR, TARGETS),
        TypeError,
        "scalar: wanted one real value per row",
    ),
    "a loss that drops some rows": (
        lambda: hl.Objective(a=dropping)(LINEAR, TARGETS),
        TypeError,
        "dropping: wanted one value per row.*its values belong to none.*-100",
    ),
    "a loss that returns a matrix": (
        lambda: hl.Objective(a=matrix)(LINEAR, TARGETS),
        TypeError,
        "matrix: wanted one real value",
    ),
    "a loss that returns nothing": (
        lambda: hl.Objective(a=nothing)(LINEAR, TARGETS),
        TypeError,
        "nothing: wanted one real value",
    ),
    "unknown metric": (
        lambda: hl.Objective(z=z_loss, metrics=["entropi"]),
        ValueError,
        "metrics: no metric 'entropi'.*'entropy'",
    ),
    "metrics are text": (lambda: hl.Objective(z=z_loss, metrics="entropy"), TypeError, "metrics: "),
    "metric is a number": (lambda: hl.Objective(z=z_loss, metrics=[3]), TypeError, "metrics: "),
    "unknown backend": (lambda: hl.Objective(z=z_loss, backend="tpu"), ValueError, "backend: wanted one of"),
    "unknown backend, facts": (lambda: hl.row_facts(LINEAR, TARGETS, backend="cuda"), ValueError, "backend: "),
    # the call
    "weights of no term": (
        lambda: CE(LINEAR, TARGETS, weights={"cee": 1.0}),
        ValueError,
        "weights: no term 'cee'.*mean 'ce'",
    ),
    "weights are text": (lambda: CE(LINEAR, TARGETS, weights={"ce": "1"}), TypeError, "weights"),
    "num_items is text": (lambda: CE(LINEAR, TARGETS, num_items="3"), TypeError, "num_items: "),
    "num_items below 0": (lambda: CE(LINEAR, TARGETS, num_items=-3), ValueError, "num_items: "),
    "num_items is a vector": (lambda: CE(LINEAR, TARGETS, num_items=torch.ones(2)), TypeError, "num_items: "),
    "num_segments is text": (lambda: CE(LINEAR, TARGETS, num_segments="3"), TypeError, "num_segments: "),
    "grad_scale is infinite": (lambda: CE(LINEAR, TARGETS, grad_scale=math.inf), ValueError, "grad_scale: "),
    "one value per segment for a row loss": (
        lambda: RL(LINEAR, TARGETS, advantage=torch.randn(S), segments=SEGMENTS),
        ValueError,
        r"advantage: .*'rl' \(grpo\).*segments.spread\(advantage\)",
    ),
    "one value per segment where gspo wants one per row": (
        lambda: SEQ(LINEAR, TARGETS, advantage=torch.randn(S), segments=SEGMENTS),
        ValueError,
        "advantage: .*spread",
    ),
    "as many rows that count as segments": (
        lambda: RL(LINEAR, torch.tensor([1, -100, 2, -100, 3, -100]), advantage=torch.randn(S), segments=SEGMENTS),
        ValueError,
        "advantage: .*spread",
    ),
    "learned row weight": (
        lambda: hl.Objective(a=hl.Term(cross_entropy, row_weight="w"))(LINEAR, TARGETS, w=ROW.clone().requires_grad_()),
        ValueError,
        "w: requires grad.*row weight",
    ),
    "rows without a segment, unread": (
        lambda: SEQ(
            LINEAR, TARGETS, advantage=ROW, segments=hl.Segments.from_ids(SEGMENTS.ids - 1, S), host_read=False
        ),
        ValueError,
        "segments: 2 rows .*no segment",
    ),
    "pairs beyond the segments": (lambda: simpo_of([[0, S]]), ValueError, rf"pairs: .*\[0, {S}\).*{S}"),
    "a pair of no segment": (lambda: simpo_of([[0, -1]]), ValueError, "pairs: .*-1"),
    "pairs lie the other way": (lambda: simpo_of([[0, 1, 0], [1, 2, 2]]), ValueError, r"pairs: wanted \(pairs, 2\)"),
    "pairs are floats": (lambda: simpo_of([[0.0, 1.0]]), TypeError, "pairs: wanted an integer tensor, got"),
    "batch loss without a host read": (
        lambda: hl.Objective(b=lambda logprob: logprob - logprob.mean())(LINEAR, TARGETS, host_read=False),
        ValueError,
        "host_read: term 'b' mixes rows",
    ),
    # configs
    "config is a list": (lambda: hl.Objective.from_config([]), TypeError, "config: "),
    "config without terms": (lambda: hl.Objective.from_config({"metrics": []}), ValueError, "config: .*terms"),
    "unknown key of a config": (
        lambda: hl.Objective.from_config({"term": {}}),
        ValueError,
        "config: .*'term'.*'terms'",
    ),
    "unknown loss of a config": (
        lambda: hl.Objective.from_config({"terms": {"a": "cross_entropi"}}),
        ValueError,
        "config: term 'a'.*mean 'cross_entropy'",
    ),
    "term of a config without a loss": (
        lambda: hl.Objective.from_config({"terms": {"a": {"weight": 1}}}),
        ValueError,
        "config: .*'a'",
    ),
    "unknown option of a config": (
        lambda: hl.Objective.from_config({"terms": {"a": {"loss": "grpo", "lo": 1}}}),
        TypeError,
        "config: term 'a': .*'lo'",
    ),
    "unknown reduction of a config": (
        lambda: hl.Objective.from_config({"terms": {"a": {"loss": "grpo", "reduction": "sum"}}}),
        ValueError,
        "config: term 'a': reduction",
    ),
    "metrics of a config are text": (
        lambda: hl.Objective.from_config({"terms": {"a": "grpo"}, "metrics": "entropy"}),
        TypeError,
        "config: .*metrics.*'entropy'",
    ),
    "a number of a config is text": (
        lambda: hl.Objective.from_config({"terms": {"a": {"loss": "gspo", "low": "3e-4"}}}),
        TypeError,
        "config: term 'a': .*'low'.*number.*3.0e-4",
    ),
    "a metric that a config cannot hold": (
        lambda: hl.Objective(a=grpo, metrics=[hl.Term(jsd, beta=0.3)]).to_config(),
        ValueError,
        "metrics: 'jsd'.*beta=0.3",
    ),
    "a metric with a reduction": (
        lambda: hl.Objective(a=grpo, metrics={"m": hl.Term(z_loss, reduction="token_sum")}),
        ValueError,
        "metrics: 'm' is a Term with reduction=",
    ),
    "a metric with a row weight": (
        lambda: hl.Objective(a=grpo, metrics=[hl.Term(z_loss, row_weight="mask")]),
        ValueError,
        "metrics: 'z_loss' is a Term with row_weight=",
    ),
    # the rest
    "head of no linear layer": (lambda: hl.FusedLMHead.from_linear(torch.nn.Identity()), TypeError, "linear: "),
    "head of a layer": (
        lambda: hl.FusedLMHead(torch.nn.Linear(D, V)),
        TypeError,
        "wanted two sizes, got Linear; over the parameters of a layer that exists, hl.FusedLMHead.from_linear",
    ),
    "head of one size": (lambda: hl.FusedLMHead(D), TypeError, "in_features and out_features: wanted two sizes"),
    "unknown option of a head": (lambda: hl.FusedLMHead(D, V, softcaps=1.0), TypeError, "softcaps: "),
    "head without an objective": (lambda: hl.FusedLMHead(D, V)(HIDDEN, targets=TARGETS), ValueError, "objective: "),
    "head with another objective": (
        lambda: hl.FusedLMHead(D, V)(HIDDEN, targets=TARGETS, objective=z_loss),
        TypeError,
        "objective: ",
    ),
    "a meter of numbers": (lambda: hl.Meter().add({"a": 3.0}), TypeError, "metrics: 'a'"),
    "a meter of a record": (lambda: hl.Meter().add(hl.Inputs), TypeError, "metrics: wanted out.metrics"),
    "a number of segments": (lambda: hl.count(TARGETS, 4), TypeError, "segments: wanted hl.Segments, got int"),
    "labels are floats": (lambda: hl.shift_labels(ROW), TypeError, "integer tensor"),
    "counting over the name of a group": (
        lambda: hl.count(TARGETS, group="dp"),
        TypeError,
        "group: wanted a ProcessGroup or a 1-D DeviceMesh, got str",
    ),
    "segments over a number": (
        lambda: hl.Segments.from_batch((1, N), group=3),
        TypeError,
        "group: wanted a ProcessGroup or a 1-D DeviceMesh, got int",
    ),
    "a meter over a tensor": (lambda: hl.Meter().compute(torch.ones(2)), TypeError, "group: wanted a ProcessGroup"),
    "counting floats": (lambda: hl.count(ROW), TypeError, "targets: "),
}


@pytest.fixture
def no_sweeps(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Which sweeps were begun."""
    from headloss.backends import choose

    seen: list[str] = []
    backend = choose("torch", torch.device("cpu"))
    real = backend.sums

    def sums(*args: Any, **kwargs: Any) -> Any:
        seen.append("sums")
        return real(*args, **kwargs)

    monkeypatch.setattr(backend, "sums", sums)
    return seen


@pytest.mark.parametrize("what", WRONG)
def test_refused(what: str, no_sweeps: list[str]) -> None:
    call, error, pattern = WRONG[what]
    with pytest.raises(error, match=pattern):
        call()
    assert not no_sweeps, "something was computed before the refusal"


def test_the_counter_of_sweeps_counts(no_sweeps: list[str]) -> None:
    CE(LINEAR, TARGETS)
    assert no_sweeps


def test_a_metric_of_all_rows_without_a_host_read() -> None:
    """Ignored rows are then masked, not dropped: their zeros would be part of the number."""
    targets = bad_targets(-100)

    def entropy_median(entropy):
        return entropy.median()

    def with_mean(logprob):
        return -logprob, {"mean": logprob.mean()}

    for objective in (hl.Objective(ce=cross_entropy, metrics=[entropy_median]), hl.Objective(a=with_mean)):
        with pytest.raises(ValueError, match="host_read: metric"):
            objective(LINEAR, targets, host_read=False)
        objective(LINEAR, targets)
        objective(LINEAR, hl.prepare(targets), host_read=False)
    hl.Objective(a=lambda logprob: (-logprob, {"constant": 3.0}))(LINEAR, targets, host_read=False)


def test_right_calls_that_look_wrong() -> None:
    """On-policy GRPO, an optional input that is None, integers where floats are meant, a scalar advantage."""
    RL(LINEAR, TARGETS, advantage=ROW)
    RL(LINEAR, TARGETS, advantage=ROW, old_logprob=None)
    RL(LINEAR, TARGETS, advantage=1.0)
    RL(LINEAR, TARGETS, advantage=torch.ones(N, dtype=torch.long))
    hl.Objective(a=hl.Term(mine, my_option=2))(LINEAR, TARGETS, my_input=ROW.bfloat16())
    hl.Objective(h=entropy_bonus, z=z_loss)(LINEAR)
    CE(LINEAR, hl.prepare(TARGETS, SEGMENTS), host_read=False)
    hl.Objective(b=lambda logprob: logprob - logprob.mean())(LINEAR, hl.prepare(TARGETS), host_read=False)
    SEQ(LINEAR, TARGETS, advantage=torch.randn(S).repeat_interleave(2), segments=SEGMENTS)
    CE(LINEAR, TARGETS, num_items=torch.tensor(7), num_segments=3)
    CE(LOGITS_SOURCE, TARGETS.to(torch.int32))


def test_a_config_cannot_hold_a_row_weight_with_numbers_of_its_own() -> None:
    objective = hl.Objective(rl=hl.Term(hl.losses.grpo, row_weight=truncate(2.0)))
    with pytest.raises(ValueError, match="row_weight: 'trunc"):
        objective.to_config()


def test_rows_dropped_by_their_numbers_are_refused_when_they_are_known() -> None:
    with pytest.raises(TypeError, match=r"masking: wanted one value per row.*its \d+ values belong to none.*-100"):
        hl.Objective(a=masking)(LINEAR, TARGETS)


def test_names_and_weights_that_are_none():
    """Each is named: no error of Python's own."""
    x, y = torch.randn(4, 7), torch.arange(4)
    kl, ce = hl.Objective(kd=hl.losses.forward_kl), hl.Objective(ce=hl.losses.cross_entropy)
    with pytest.raises(TypeError, match="teacher: wanted teachers by name, got 1 of type int for a name"):
        kl(hl.Logits(x), y, teacher={1: hl.Logits(x)})
    with pytest.raises(TypeError, match="weights: wanted weights by the names of terms, a dict, got list"):
        ce(hl.Logits(x), y, weights=[1.0])
    own = hl.Objective(ce=hl.Term(hl.losses.cross_entropy, targets="own"))
    with pytest.raises(TypeError, match="weights: wanted weights by the names of terms, a dict, got list"):
        own(hl.Logits(x), y, own=y, weights=[1.0])
    segments = hl.Segments.from_ids(y // 2)
    mean = hl.Objective(ce=hl.Term(hl.losses.cross_entropy, reduction="seq_mean_token_mean"))
    with pytest.raises(ValueError, match=r"segments: given to the call, but its targets are prepared; give them to hl"):
        mean(hl.Logits(x), hl.prepare(y), segments=segments)
    with pytest.raises(TypeError, match="advantage: missing") as told:
        hl.Objective(rl=hl.losses.reinforce)(hl.Logits(x), y, advantage=None)
    assert "did you mean 'advantage'" not in str(told.value)


@pytest.mark.parametrize("smoothing", [1.5, -0.1])
def test_label_smoothing_is_a_share(smoothing: float) -> None:
    pairs = {"segments": SEGMENTS, "pairs": torch.tensor([[0, 1]])}
    message = rf"label_smoothing: wanted 0 <= label_smoothing <= 1, got {smoothing}"
    for loss, more in ((cross_entropy, {}), (simpo, pairs), (cpo, pairs)):
        with pytest.raises(ValueError, match=message):
            hl.Objective(it=hl.Term(loss, label_smoothing=smoothing))(LINEAR, TARGETS, **more)


def test_a_later_call_with_a_sparse_input_is_refused_too() -> None:
    objective = hl.Objective(rl=grpo)
    for _ in range(2):
        objective(hl.Logits(LOGITS), TARGETS, advantage=torch.ones(N))
    with pytest.raises(TypeError, match="advantage: wanted a dense tensor"):
        objective(hl.Logits(LOGITS), TARGETS, advantage=torch.ones(N).to_sparse())
