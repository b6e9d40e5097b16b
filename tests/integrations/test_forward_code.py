"""What a model's forward does to its logits: a source does it too, or `patch` refuses the model by that line."""

from __future__ import annotations

import ast
import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
import tiny_models as tiny
import transformers

import headloss as hl
from headloss.integrations.transformers import patch

MODULE = """
import torch
from transformers import LlamaForCausalLM as Llama
from transformers.modeling_outputs import CausalLMOutput

class LlamaForCausalLM(Llama):
    strength, limit = 0.0, None

    def forward(self, input_ids=None, attention_mask=None, labels=None, **kwargs):
        outputs = self.model(input_ids=input_ids, attention_mask=attention_mask)
        hidden = outputs.last_hidden_state
{first}
        logits = self.lm_head(hidden)
        limit = self.limit
{before}
        loss = self.loss_function(logits=logits, labels=labels, vocab_size=logits.shape[-1])
{after}
        return CausalLMOutput(loss=loss, logits=logits)
"""


def made(folder: Path, before: str = "pass", after: str = "pass", first: str = "pass") -> Any:
    """A small model whose forward has these lines between its head and its loss, after that, and before the head."""
    indented = {"before": before, "after": after, "first": first}
    indented = {name: "\n".join(f"        {line}" for line in x.splitlines()) for name, x in indented.items()}
    path = folder / "model.py"
    path.write_text(MODULE.format(**indented))
    spec = importlib.util.spec_from_file_location("a_model", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    plain = tiny.model("llama")
    model = module.LlamaForCausalLM(plain.config)
    model.load_state_dict(plain.state_dict())
    return model


REFUSED = {
    "a z-loss": ("pass", "loss = loss + 0.1 * logits.logsumexp(-1).pow(2).mean()"),
    "columns cut off": ("logits = logits[..., :20]", "pass"),
    "columns cut off by all indices": ("logits = logits[:, :, :20]", "pass"),
    "columns cut off under another name": ("wide = logits\nlogits = wide[..., :20]", "pass"),
    "columns in another order": ("logits = logits[..., torch.arange(9)]", "pass"),
    "columns that never come": ("logits[:, :, 5] = -1e9", "pass"),
    "a bias": ("logits = logits + 1", "pass"),
    "a bias in place": ("logits += 1", "pass"),
    "a floor": ("logits = logits.clamp(min=-5)", "pass"),
    "a mean": ("logits = logits - logits.mean(-1, keepdim=True)", "pass"),
    "something else made of them": ("size = torch.linalg.norm(logits)", "loss = loss + size"),
    "a test that is true": ("pass", "if self.strength == 0:\n    loss = loss + logits.mean()"),
    "a test of more than the model": ("pass", "if labels is not None:\n    loss = loss + logits.mean()"),
}
FINE = {
    "a cast": ("logits = logits.float()", "pass"),
    "rows": ("logits = logits[:, :, :]", "pass"),
    "tokens": ("logits = logits[:, 0:]", "pass"),
    "a function": ("logits = torch.mul(logits, 1.0)", "pass"),
    "sizes": ("assert logits.shape[0] and logits.dtype and logits is not None", "pass"),
    "a test that is false": ("pass", "if self.strength > 0:\n    loss = loss + logits.mean()"),
    "a name that is None": (
        "if limit is not None and limit < logits.shape[-1]:\n    logits = logits[..., :limit]",
        "pass",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_no_head_does_is_refused_by_its_line(name: str, tmp_path: Path) -> None:
    model = made(tmp_path, *REFUSED[name])
    with pytest.raises(TypeError, match=r"^model: LlamaForCausalLM.forward has `.*logits.*`, but a patched head"):
        patch(model)
    assert "headloss" not in vars(model)


@pytest.mark.parametrize("name", FINE)
def test_what_a_head_does_too_is_fine(name: str, tmp_path: Path) -> None:
    model, batch = made(tmp_path, *FINE[name]), tiny.batch()
    wanted = model(**batch).loss
    patch(model)
    for _ in range(2):
        torch.testing.assert_close(model(**batch).loss, wanted)


def test_a_padded_head(tmp_path: Path) -> None:
    batch = tiny.batch()
    few = int(max(batch["input_ids"].max(), batch["labels"].max())) + 1
    model = made(tmp_path, f"logits = logits[..., :{few}]")
    assert few < model.config.vocab_size
    wanted = model(**batch).loss
    wanted.backward()
    grad, model.lm_head.weight.grad = model.lm_head.weight.grad, None
    loss = patch(model, vocab=few)(**batch).loss
    loss.backward()
    torch.testing.assert_close(loss, wanted)
    torch.testing.assert_close(model.lm_head.weight.grad, grad)


def test_a_config_says_how_many_columns_are_padding() -> None:
    from headloss.integrations.causal_lm import logits_transform

    config = transformers.LlamaConfig(vocab_size=64, unpadded_vocab_size=50)
    assert logits_transform(config) == {"vocab": 50}
    assert logits_transform(transformers.LlamaConfig(vocab_size=64)) == {}


FACTORS = {
    "pass": 1.0,
    "hidden = hidden[:, 0:]": 1.0,
    "hidden = hidden.float()": 1.0,
    "hidden = outputs[0]": 1.0,
    "hidden = hidden / self.config.logits_scaling": 0.25,
    "hidden *= self.width": 3.0,
    "wide = hidden * self.width\nhidden = wide.float() / self.config.logits_scaling": 0.75,
    "if labels is not None:\n    hidden = 2.0 * hidden\nelse:\n    hidden = 2.0 * hidden": None,
    "hidden = self.model.norm(hidden)": None,
    "hidden = hidden + 1": None,
    "hidden = torch.relu(hidden)": None,
    "hidden = hidden * attention_mask[..., None]": None,
}


@pytest.mark.parametrize("first", FACTORS, ids=range(len(FACTORS)))
def test_what_stands_before_the_head(first: str, tmp_path: Path) -> None:
    """A patched head gets what the model gives it; where a trainer goes from backbone to head, a factor is followed."""
    from headloss.integrations.causal_lm import transform_of

    model, batch = made(tmp_path, first=first), tiny.batch()
    model.width = 3.0
    if "logits_scaling" in first:
        model.config.logits_scaling = 4.0
    wanted, out = model(**batch).loss, model.model(batch["input_ids"], batch["attention_mask"]).last_hidden_state
    if FACTORS[first] is None:
        line = re.escape(first.splitlines()[0]) if "\n" not in first else "hidden = 2.0 [*] hidden"
        with pytest.raises(TypeError, match=f"has `{line}` between backbone and head, .*; do something else"):
            transform_of(model, True, "do something else")
    else:
        source = hl.Linear(out, model.lm_head.weight, **transform_of(model, True))
        loss = hl.Objective(ce=hl.losses.cross_entropy)(source, hl.shift_labels(batch["labels"])).loss
        torch.testing.assert_close(loss, wanted)
    torch.testing.assert_close(patch(model)(**batch).loss, wanted)


@pytest.mark.parametrize("name, line", [
    ("ModernBertDecoder", "self.decoder(self.lm_head(hidden_states))"), ("Roberta", "self.lm_head(hidden_states)"),
])  # fmt: skip
def test_a_module_between_backbone_and_head(name: str, line: str) -> None:
    """A dense layer and a norm of the head's own, called around it or by a module that holds it."""
    from headloss.integrations.causal_lm import transform_of

    config = getattr(transformers, f"{name}Config")(
        vocab_size=61, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
        max_position_embeddings=32, pad_token_id=0, bos_token_id=1, eos_token_id=2, cls_token_id=1, sep_token_id=2,
        is_decoder=True,
    )  # fmt: skip
    model, batch = getattr(transformers, f"{name}ForCausalLM")(config).eval(), tiny.batch()
    with pytest.raises(TypeError, match=f"has `{re.escape(line)}` between backbone and head, .*; do something else"):
        transform_of(model, True, "do something else")
    wanted = model(**batch).loss
    torch.testing.assert_close(patch(model)(**batch).loss, wanted)


CAPPED = "    logits = torch.tanh(logits / cap) * cap"
TOLD = {
    "pass": True,
    "logits = logits.float()": True,
    "logits = self.lm_head(hidden)": True,
    "logits = 2.0 * torch.tanh(logits / 2.0)": False,
    "logits = logits.clamp(-5, 5)": False,
    "logits[:, 1:] = torch.clamp(logits[:, 1:], -5, 5)": False,
    "logits = logits * self.width": False,
    "logits *= self.width": False,
    "logits = self.lm_head(hidden) * 3.0": False,
    "logits = torch.sinh(self.lm_head(hidden))": False,
    f"cap = getattr(self.config, 'final_logit_softcapping', None)\nif cap is not None:\n{CAPPED}": True,
    f"if (cap := self.config.get_text_config().final_logit_softcapping) is not None:\n{CAPPED}": True,
    f"if (cap := self.width) is not None:\n{CAPPED}": False,
}


@pytest.mark.parametrize("before", TOLD, ids=range(len(TOLD)))
def test_what_stands_behind_the_head_where_no_number_goes_through_the_model(before: str, tmp_path: Path) -> None:
    from headloss.integrations.causal_lm import transform_of

    model = made(tmp_path, before)
    model.width, model.config.final_logit_softcapping = 3.0, None
    if TOLD[before]:
        assert transform_of(model, True, "do something else") == {}
    else:
        line = re.escape(ast.unparse(ast.parse(before.splitlines()[-1].strip())))
        with pytest.raises(TypeError, match=f"has `{line}`, which its config does not tell, .*; do something else"):
            transform_of(model, True, "do something else")
    if "tanh" in before and not TOLD[before]:
        model.config.final_logit_softcapping = 3.0 if "width" in before else 2.0
        assert transform_of(model, True) == {"softcap": model.config.final_logit_softcapping}


@pytest.mark.parametrize("name", ["RecurrentGemma", "xLSTM"])
def test_what_configs_call_a_softcap(name: str) -> None:
    from headloss.integrations.causal_lm import logits_transform

    if not hasattr(transformers, f"{name}Config"):
        pytest.skip(f"a Transformers without {name}")
    assert logits_transform(getattr(transformers, f"{name}Config")()) == {"softcap": 30.0}


def test_logits_that_are_kept_may_be_anything(tmp_path: Path) -> None:
    from headloss.integrations.transformers import loss_function

    model, batch = made(tmp_path, *REFUSED["a z-loss"]), tiny.batch()
    wanted = model(**batch).loss
    model.loss_function = loss_function(hl.Objective(ce=hl.losses.cross_entropy))
    torch.testing.assert_close(model(**batch).loss, wanted)
