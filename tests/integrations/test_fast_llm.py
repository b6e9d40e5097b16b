"""Fast-LLM's adapter against its formulas, written down densely in float64.

Fast-LLM is on no package index, so its formulas stand in for it.  They and the keyword inputs follow its main branch of
2026 (fast_llm/layers/language_model/loss: `LanguageModelLossKwargs`, `policy_gradient.py`, `entropy_loss.py`, `dpo.py`,
`monolithic.py`).
"""

from __future__ import annotations

import importlib
import sys
import types
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import stand_in_fast_llm as fast_llm
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import logsigmoid

sys.path.append(str(Path(__file__).parent.parent / "ranks"))
from spawn import Ranks

from headloss.integrations.fast_llm import FastLLMLosses

N, V, MODEL_SCALE = 14, 17, 0.7
LENGTHS = [5, 6, 3]


def keywords(grad_output: float | None = 3.0) -> tuple[Tensor, dict[str, Any]]:
    random = torch.Generator().manual_seed(0)
    normal = lambda *shape: torch.randn(*shape, generator=random, dtype=torch.float64)
    labels = torch.randint(V, (N,), generator=random)
    labels[[0, 5, 6]] = torch.tensor([-1, -100, -7])
    document = torch.repeat_interleave(torch.arange(3), torch.tensor(LENGTHS))
    counts = torch.zeros(3, dtype=torch.long).index_add(0, document, (labels >= 0).long())
    return normal(N, V), {
        "labels": labels,
        "advantages": normal(3)[document] + 0.1 * normal(N),
        "old_log_probabilities": -2 + 0.3 * normal(N),
        "label_counts": counts[document],
        "num_labels_in_batch": 20,
        "num_documents_in_batch": 6,
        "num_documents_in_sequence": 3,
        "global_document_index_q": document + 1,
        "reference_teacher_hidden_states": {"head.logits": 2 * normal(N, V), "head.hidden": normal(N, 2)},
        "grad_output": grad_output,
    }


def value(kind: str, logits: Tensor, kw: dict[str, Any], **o: Any) -> Tensor:
    """One loss before its weight, as Fast-LLM computes it."""
    mask = kw["labels"] >= 0
    SCALE = MODEL_SCALE * o.get("logits_scale_factor", 1.0)
    logp = (SCALE * logits / o.get("temperature", 1.0)).log_softmax(-1) if kind in ("grpo", "gspo") else None
    whole = (SCALE * logits).log_softmax(-1)
    pick = lambda x: x.gather(-1, kw["labels"].clamp(min=0)[:, None])[:, 0]
    if kind == "label":
        each = -pick(whole)
    elif kind == "z_loss":
        each = (SCALE * logits).logsumexp(-1) ** 2
    elif kind == "distillation":
        T = o.get("temperature", 1.0)
        logq = (SCALE / T * kw["reference_teacher_hidden_states"]["head.logits"]).log_softmax(-1)
        each = {
            "cross_entropy": -(logq.exp() * whole).sum(-1),
            "forward_kl": (logq.exp() * (logq - whole)).sum(-1),
            "reverse_kl": (whole.exp() * (whole - logq)).sum(-1),
        }[o.get("loss_type", "cross_entropy")]
    else:
        assert logp is not None
        d, A = (pick(logp) - kw["old_log_probabilities"]).masked_fill(~mask, 0.0), kw["advantages"]
        if kind == "gspo":
            document = kw["global_document_index_q"] - 1
            share = kw["label_counts"].clamp(min=1)
            over = lambda x: torch.zeros(3, dtype=d.dtype).index_add(0, document, x / share)[document]
            d, A = over(d), over(A.masked_fill(~mask, 0.0))
        ratio = d.exp()
        low, high = o.get("epsilon_low", 0.2), o.get("epsilon_high", 0.2)
        each = -torch.minimum(ratio * A, ratio.clamp(1 - low, 1 + high) * A)
    divisor = kw["num_documents_in_batch"] if kind == "gspo" else kw["num_labels_in_batch"]
    return each[mask].sum() / divisor


BLOCKS: dict[str, dict[str, dict[str, Any]]] = {
    "label": {"ce": {"type": "label"}},
    "z_loss": {"z": {"type": "z_loss", "weight": 1e-2}},
    "cross-entropy": {"kd": {"type": "distillation", "temperature": 2.0, "weight": 0.5}},
    "reverse": {"kd": {"type": "distillation", "loss_type": "reverse_kl", "temperature": 0.5}},
    "grpo": {"rl": {"type": "grpo", "epsilon_low": 0.1, "epsilon_high": 0.3, "use_triton": None}},
    "grpo warm": {"rl": {"type": "grpo", "temperature": 0.7}},
    "gspo": {"rl": {"type": "gspo", "epsilon_low": 0.05, "epsilon_high": 0.1}},
    "scaled": {
        "ce": {"type": "label", "logits_scale_factor": 1.5},
        "z": {"type": "z_loss", "logits_scale_factor": 0.5},
        "kd": {"type": "distillation", "loss_type": "reverse_kl", "temperature": 1.4, "logits_scale_factor": 2.0},
        "rl": {"type": "gspo", "logits_scale_factor": 1.25},
        "token": {"type": "grpo", "logits_scale_factor": 1.25, "temperature": 0.9},
    },
    "tokens": {"ce": {"type": "label"}, "kd": {"type": "distillation"}, "rl": {"type": "grpo", "epsilon_low": 0.1}},
    "all": {
        "ce": {"type": "label", "weight": 0.3},
        "z": {"type": "z_loss", "weight": 1e-3},
        "kd": {"type": "distillation", "loss_type": "forward_kl"},
        "other": {"type": "distillation", "loss_type": "reverse_kl", "temperature": 1.5, "weight": 0.2},
        "rl": {"type": "gspo", "weight": 2.0},
        "token": {"type": "grpo", "weight": 0.1},
    },
}


@pytest.mark.parametrize("block", BLOCKS.values(), ids=list(BLOCKS))
def test_losses_and_gradients(block: dict[str, dict[str, Any]]) -> None:
    logits, kw = keywords()
    leaf = logits.clone().requires_grad_()
    values = {n: value(b["type"], leaf, kw, **{k: x for k, x in b.items() if k != "type"}) for n, b in block.items()}
    truth = sum(b.get("weight", 1.0) * values[n] for n, b in block.items())
    (wanted,) = torch.autograd.grad(3.0 * truth, leaf)
    losses: dict[str, list[Tensor]] = {}
    already = torch.ones_like(logits)
    loss, grad = FastLLMLosses(block, logits_scale_factor=MODEL_SCALE).forward_backward(
        logits, kw, losses, grad_logits=already
    )
    torch.testing.assert_close(loss, truth.detach())
    torch.testing.assert_close(grad, wanted + 1)
    assert grad is already
    for name, x in values.items():
        torch.testing.assert_close(losses[name][0], x.detach())


@pytest.mark.parametrize("kind", ["label", "z_loss", "distillation", "grpo", "gspo"])
@pytest.mark.parametrize("alone", [True, False])
def test_a_loss_of_weight_0_is_made_and_logged(kind: str, alone: bool) -> None:
    logits, kw = keywords()
    block: dict[str, dict[str, Any]] = {"it": {"type": kind, "weight": 0.0}}
    if not alone:
        block["ce"] = {"type": "label"}
    leaf = logits.clone().requires_grad_()
    truth = value(kind, leaf, kw)
    losses: dict[str, list[Tensor]] = {}
    loss, grad = FastLLMLosses(block, logits_scale_factor=MODEL_SCALE).forward_backward(logits, kw, losses)
    torch.testing.assert_close(losses["it"][0], truth.detach())
    rest = 0 * truth if alone else value("label", leaf, kw)
    torch.testing.assert_close(loss, rest.detach())
    torch.testing.assert_close(grad, torch.autograd.grad(3.0 * rest, leaf)[0])


def test_gspo_is_of_whole_documents() -> None:
    """Fast-LLM divides by a document's labels wherever they are, the loss by those that are in the call."""
    logits, kw = keywords()
    head = FastLLMLosses(BLOCKS["gspo"], logits_scale_factor=MODEL_SCALE)
    kw["label_counts"] = kw["label_counts"] + (kw["global_document_index_q"] == 2)
    with pytest.raises(ValueError, match=r"label_counts: \d+ tokens belong to documents with labels outside this call"):
        head.forward_backward(logits, kw)


@pytest.mark.parametrize("kind", ["grpo", "gspo"])
def test_metrics_have_fast_llms_names_and_numbers(kind: str) -> None:
    logits, kw = keywords(grad_output=None)
    kw |= {"model_version": 3 * kw["global_document_index_q"], "documents_seen": 100}
    losses: dict[str, list[Tensor]] = {}
    head = FastLLMLosses({"rl": {"type": kind}})
    _, grad = head.forward_backward(logits, kw, losses)
    assert grad is None
    names = "old_logprobs ratio_new_old ratio_new_old_sum ratio_new_old_squared_sum kl_new_old clipped_ratio_fraction "
    names += "advantage max_advantage min_advantage num_tokens entropy new_logprobs "
    names += "staleness max_staleness min_staleness"
    expected = {f"rl_{n}" for n in names.split()} | ({"rl_num_segments"} if kind == "gspo" else set()) | {"rl"}
    assert set(losses) == expected
    mask = kw["labels"] >= 0
    logp = logits.log_softmax(-1)
    new = logp.gather(-1, kw["labels"].clamp(min=0)[:, None])[:, 0]
    means = lambda x: sum(x[mask & (kw["global_document_index_q"] == i + 1)].mean() for i in range(3)) / 6
    got = {n: float(x[0]) for n, x in losses.items()}
    assert got["rl_new_logprobs"] == pytest.approx(float(means(new)))
    assert got["rl_entropy"] == pytest.approx(float(means(-(logp.exp() * logp).sum(-1))))
    assert got["rl_num_tokens"] == int(mask.sum())
    assert got["rl_max_advantage"] == pytest.approx(float(kw["advantages"][mask].max()))
    ratio = (new - kw["old_log_probabilities"]).exp()
    assert got["rl_staleness"] == pytest.approx(float(means(100.0 - kw["model_version"])))
    assert got["rl_max_staleness"] == pytest.approx(float((100 - kw["model_version"])[mask].max()))
    if kind == "grpo":
        assert got["rl_ratio_new_old"] == pytest.approx(float(means(ratio)))
        assert got["rl_ratio_new_old_squared_sum"] == pytest.approx(float(ratio[mask].square().sum()))
    else:
        d = new - kw["old_log_probabilities"]
        whole = [d[mask & (kw["global_document_index_q"] == i + 1)].mean().exp() for i in range(3)]
        assert got["rl_ratio_new_old_sum"] == pytest.approx(float(sum(whole)))
        assert got["rl_num_segments"] == pytest.approx(3)


def test_dpo_compares_all_spans_in_one_sigmoid() -> None:
    random = torch.Generator().manual_seed(1)
    logits, reference = (torch.randn(2, 8, V, generator=random, dtype=torch.float64) for _ in range(2))
    labels = torch.randint(V, (2, 8), generator=random)
    kw = {
        "labels": labels,
        "chosen_spans": [[(0, 3)], [(1, 2)]],
        "rejected_spans": [[(4, 8)], [(5, 7)]],
        "reference_ref_hidden_states": {"head.logits": reference},
        "grad_output": 1.0,
    }
    block = {"dpo": {"type": "dpo", "beta": 0.5, "reference_model": "ref"}}
    leaf = logits.clone().requires_grad_()
    gain = [x.log_softmax(-1).gather(-1, labels[..., None])[..., 0] for x in (leaf, reference)]
    gain = gain[0] - gain[1]
    margin = gain[0, :3].sum() + gain[1, 1:2].sum() - gain[0, 4:].sum() - gain[1, 5:7].sum()
    truth = -logsigmoid(0.5 * margin)
    loss, grad = FastLLMLosses(block).forward_backward(logits, kw)
    torch.testing.assert_close(loss, truth.detach())
    torch.testing.assert_close(grad, torch.autograd.grad(truth, leaf)[0])


def test_labels_may_come_one_for_each_prediction_distance_and_a_mask_leaves_out_more() -> None:
    logits, kw = keywords()
    mask = torch.arange(N) % 3 > 0
    loss, _ = FastLLMLosses({"ce": {}}, logits_scale_factor=MODEL_SCALE).forward_backward(
        logits, kw | {"labels": [kw["labels"]], "loss_mask": mask, "num_labels_in_batch": [20]}
    )
    kw["labels"] = kw["labels"].masked_fill(~mask, -1)
    torch.testing.assert_close(loss, value("label", logits, kw))


@pytest.mark.parametrize(
    ("block", "says"),
    [
        ({"type": "labels"}, "did you mean"),
        ({"type": "grpo", "epsilon": 0.2}, "epsilon_low"),
        ({"type": "grpo", "metrics": "all"}, "with_entropy"),
        ({"type": "label", "loss_type": "reverse_kl"}, "infinite"),
        ({"type": "dpo"}, "reference_model"),
    ],
)
def test_what_is_not_understood_is_refused(block: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        FastLLMLosses({"x": block})


def test_a_monolithic_loss_is_its_children() -> None:
    logits, kw = keywords()
    children = {"ce": {"type": "label", "weight": 0.3}, "rl": {"type": "gspo"}}
    whole = {"type": "monolithic", "weight": 2.0, "logits_scale_factor": 1.5, "losses": children, "use_triton": True}
    flat = {"ce": {"type": "label", "weight": 0.6, "logits_scale_factor": 1.5}}
    flat["rl"] = {"type": "gspo", "weight": 2.0, "logits_scale_factor": 1.5}
    got, wanted = (FastLLMLosses(block).forward_backward(logits, kw) for block in ({"all": whole}, flat))
    torch.testing.assert_close(got, wanted)
    with pytest.raises(ValueError, match="fusion"):
        FastLLMLosses({"all": {**whole, "fusion": True}})
    for twice in ({"ce": {"type": "label"}, "all": whole}, {"all": whole, "more": whole}):
        with pytest.raises(ValueError, match="ce: two losses have this name, and one would be lost"):
            FastLLMLosses(twice)


def test_the_entropy_is_the_loss_own() -> None:
    logits, kw = keywords(grad_output=None)
    losses: dict[str, list[Tensor]] = {}
    FastLLMLosses({"rl": {"type": "grpo", "logits_scale_factor": 2.0}}).forward_backward(logits, kw, losses)
    logp = (2.0 * logits).log_softmax(-1)
    share = (kw["labels"] >= 0) / kw["label_counts"].clamp(min=1)
    wanted = (-(logp.exp() * logp).sum(-1) * share).sum() / 6
    assert float(losses["rl_entropy"][0]) == pytest.approx(float(wanted))


def test_the_older_spelling_of_gspo() -> None:
    head = FastLLMLosses({"rl": {"type": "grpo", "policy_loss": "gspo", "compute_extra_metrics": True}})
    assert head.blocks["rl"] == {"type": "gspo", "metrics": "few"}


# In Fast-LLM's head ---------------------------------------------------------------------------------------------------

D = 5


def plugin() -> Any:
    fast_llm.install()
    return importlib.import_module("headloss.integrations.fast_llm_plugin")


def problem() -> tuple[Tensor, Tensor, dict[str, Any]]:
    """Hidden states, a weight, and keyword inputs as Fast-LLM's data gives them: one for each prediction distance."""
    _, kw = keywords()
    random = torch.Generator().manual_seed(2)
    hidden, weight = (torch.randn(n, D, generator=random, dtype=torch.float64) for n in (N, V))
    kw["labels"] = kw["labels"].masked_fill(kw["labels"] < 0, -100)
    kw |= {"loss_mask": kw["labels"] >= 0, "reward": kw["advantages"] / 2, "documents_seen": 100}
    kw["model_version"] = 3 * kw["global_document_index_q"]
    listed = ("labels", "loss_mask", "advantages", "old_log_probabilities", "label_counts", "reward", "model_version")
    later = {"labels": kw["labels"].roll(1), "advantages": kw["advantages"].flip(0)}
    kw |= {key: [kw[key], later.get(key, kw[key])] for key in listed}
    kw["loss_mask"][1] = kw["labels"][1] >= 0
    return hidden, weight, {**kw, "num_labels_in_batch": [20, 23]}


def of_distance(kw: dict[str, Any], distance: int) -> dict[str, Any]:
    return {key: x[distance - 1] if isinstance(x, list) else x for key, x in kw.items()}


def truth(block: Any, hidden: Tensor, weight: Tensor, kw: dict[str, Any], factor: float) -> tuple[Tensor, Any]:
    leaves = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    own = lambda b: {k: x for k, x in b.items() if k != "type"}
    values = {n: value(b["type"], leaves[0] @ leaves[1].T, kw, **own(b)) for n, b in block.items()}
    total = factor * sum(b.get("weight", 1.0) * values[n] for n, b in block.items())
    return total.detach(), (torch.autograd.grad(3.0 * total, leaves), values)


HEADS: dict[str, tuple[str, dict[str, Any]]] = {
    "label": ("label", {}),
    "all": ("all", {}),
    "splits": ("tokens", {"splits": 2}),
    "second": ("tokens", {"distance": 2, "heads": 2, "coefficient": 0.5}),
}


@pytest.mark.parametrize("name", HEADS)
def test_two_steps_of_fast_llms_head(name: str) -> None:
    """`type: headloss` among its losses: what its head finds is what its own losses would."""
    plugin()
    which, options = HEADS[name]
    block, (hidden, weight, kw) = BLOCKS[which], problem()
    head = fast_llm.LMHead(
        {"ours": {"type": "headloss", "losses": block}}, weight.clone(), scale=MODEL_SCALE, **options
    )
    mine = of_distance(kw, options.get("distance", 1))
    for _ in range(2):
        wanted, (grads, values) = truth(block, hidden, weight, mine, options.get("coefficient", 1.0))
        total, grad, logged = head.step(hidden, kw)
        torch.testing.assert_close(total, wanted)
        torch.testing.assert_close((grad, head.output_weights.grad), grads)
        for key, x in values.items() if len(block) > 1 else ():
            torch.testing.assert_close(sum(logged[head.full(key)]), x.detach())
        hidden, weight = hidden - 0.1 * grads[0], weight - 0.1 * grads[1]
        head.output_weights.data -= 0.1 * head.output_weights.grad
    names = {definition.name for definition in head.get_loss_definitions()}
    assert set(logged) == names - {head.full("lm_head_loss")}
    assert ("ce" in names) == (name in ("all", "splits"))  # alone it is the total
    for d in head.get_loss_definitions():
        assert d.reduction == ("maximum" if "_max_" in d.name else "minimum" if "_min_" in d.name else "sum"), d


def test_a_loss_tells_fast_llm_what_it_needs() -> None:
    plugin()
    head = fast_llm.LMHead({"all": {"type": "headloss", "losses": BLOCKS["all"]}}, torch.zeros(V, D))
    assert head.get_preprocessing_config() == {
        "return_prediction_mask": True, "use_grpo_data": True, "return_label_counts": True,
        "return_document_index": True,
    }  # fmt: skip
    assert head.losses[0].config.get_reference_models() == {"teacher"}
    few = fast_llm.LMHead({"all": {"type": "headloss", "losses": {"ce": {"type": "label"}}}}, torch.zeros(V, D))
    assert few.get_preprocessing_config() == {} and len(few.get_loss_definitions()) == 1
    with pytest.raises(ValueError, match="losses: headloss needs at least one"):
        fast_llm.LMHead({"all": {"type": "headloss", "losses": {}}}, torch.zeros(V, D))
    with pytest.raises(ValueError, match="num_splits: gspo needs all rows"):
        fast_llm.LMHead({"all": {"type": "headloss", "losses": BLOCKS["gspo"]}}, torch.zeros(V, D), splits=2)
    piped = fast_llm.DistributedConfig(pipeline_parallel=2)
    quiet = fast_llm.LMHead({"all": {"type": "headloss", "losses": {"rl": {"type": "grpo"}}}}, torch.zeros(V, D), piped)
    assert [d.name for d in quiet.get_loss_definitions()] == ["lm_head_loss", "rl_new_logprobs"]
    level = {"rl": {"type": "grpo", "metrics": "basic"}}
    with pytest.raises(ValueError, match=r"losses\.rl\.metrics: not with pipeline_parallel > 1"):
        fast_llm.LMHead({"all": {"type": "headloss", "losses": level}}, torch.zeros(V, D), piped)


def over_ranks(vocab_parallel: bool) -> None:
    """The vocabulary in shards, or the rows: totals, gradients and what is logged as on one rank."""
    plugin()
    block = {"ours": {"type": "headloss", "losses": BLOCKS["all"]}}
    hidden, weight, kw = problem()
    kw["labels"][0][6], kw["loss_mask"][0][6] = 3, True  # the second document counts on both ranks
    kw["label_counts"][0][5:11] += 1
    left = kw["reference_teacher_hidden_states"]
    weight = torch.nn.functional.pad(weight, (0, 0, 0, 1))  # Fast-LLM's shards are of one width
    teacher = torch.nn.functional.pad(left["head.logits"], (0, 1))
    whole = lambda x: {**kw, "reference_teacher_hidden_states": {**left, "head.logits": x}}
    wanted, grad, logged = fast_llm.LMHead(block, weight.clone(), scale=MODEL_SCALE).step(hidden, whole(teacher))
    rank, half = dist.get_rank(), N // 2
    parallel = fast_llm.DistributedConfig(fast_llm.Dim(2, rank, "not yet"), sequence_tensor_parallel=not vocab_parallel)
    mine = weight.chunk(2)[rank] if vocab_parallel else weight
    head = fast_llm.LMHead(block, mine.clone(), parallel, scale=MODEL_SCALE, vocab_parallel=vocab_parallel)
    store = dist.PrefixStore(f"fast-llm {vocab_parallel}", dist.distributed_c10d._get_default_store())
    parallel.tensor._group = dist.ProcessGroupGloo(store, rank, 2, timedelta(seconds=20))
    if vocab_parallel:
        total, found, numbers = head.step(hidden, whole(teacher.chunk(2, -1)[rank].contiguous()))
        dist.all_reduce(found)
    else:
        rows = slice(half * rank, half * (rank + 1))
        total, found, numbers = head.step(hidden[rows], whole(teacher[rows]))
        grad = grad[rows]
        dist.all_reduce(total)
    torch.testing.assert_close(total, wanted)
    torch.testing.assert_close(found, grad)
    assert set(numbers) == set(logged)
    for name, x in logged.items():
        torch.testing.assert_close(numbers[name][0], x[0], msg=lambda m: f"{name}: {m}")


def test_over_two_ranks() -> None:
    ranks = Ranks(2)
    try:
        for vocab_parallel in (True, False):
            ranks.run(over_ranks, vocab_parallel)
    finally:
        ranks.stop()


@pytest.mark.parametrize("sequence_tensor_parallel", [True, False])
def test_dpo_needs_whole_sequences(sequence_tensor_parallel: bool) -> None:
    """Its spans count from the start of a sequence, of which a rank would have a part."""
    block = {"type": "dpo", "reference_model": "ref"}
    with pytest.raises(ValueError, match="sequence_group: dpo"):
        FastLLMLosses({"dpo": block}, sequence_group=object())
    two, one = fast_llm.Dim(2, 0, "not yet"), fast_llm.Dim()
    dims = (two, one) if sequence_tensor_parallel else (one, two)
    parallel = fast_llm.DistributedConfig(*dims, sequence_tensor_parallel=sequence_tensor_parallel)
    dpo = types.SimpleNamespace(dynamic_type_name="dpo", weight=1.0, beta=0.1, **block)
    config = types.SimpleNamespace(losses={"dpo": dpo}, logits_scale_factor=1.0, weight=1.0)
    with pytest.raises(ValueError, match="dpo's spans are those of whole sequences"):
        plugin().HeadlossLoss(config, parallel, name="all")
