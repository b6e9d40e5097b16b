"""docs/trainers.md: each line of its tables against the trainer's own function, or a formula written from its source.

Dimension key:  B sequences   T tokens   V vocabulary

The right side of a line is run as it stands on the page.  The functions of TRL and verl are taken out of their files
and run alone: importing the packages takes longer than all of this file.
"""

from __future__ import annotations
import __future__

import ast
import functools
import importlib.util
import math
import re
import sys
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import headloss as hl
from headloss import row_weights
from headloss.losses import LOSSES

PAGE = Path(__file__).parents[1] / "docs" / "trainers.md"
B, T, V = 6, 7, 23
PAIRS = torch.tensor([[0, 3], [1, 4], [2, 5]])
ROWS = [
    (section.splitlines()[0], *line)
    for section in PAGE.read_text().split("\n## ")[1:]
    for line in re.findall(r"^\| (.+?) \| (.+?) \|$", section, re.MULTILINE)
    if line[1] != "headloss"
]


def lift(path: Path, *names: str, **space: Any) -> SimpleNamespace:
    """Functions and constants of a file, by name, without their decorators; `Class.method` is a method's function."""
    tree, wanted = ast.parse(path.read_text()), []
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            wanted += [x for x in node.body if isinstance(x, ast.FunctionDef) and f"{node.name}.{x.name}" in names]
        elif isinstance(node, ast.FunctionDef) and node.name in names:
            wanted.append(node)
        elif isinstance(node, ast.AnnAssign | ast.Assign):
            target = node.target if isinstance(node, ast.AnnAssign) else node.targets[0]
            wanted += [node] if isinstance(target, ast.Name) and target.id in names else []
    for node in wanted:
        if isinstance(node, ast.FunctionDef):
            node.decorator_list = []
    space = {"torch": torch, "F": F, "math": math, **space}
    flags = __future__.annotations.compiler_flag
    exec(compile(ast.Module(wanted, []), str(path), "exec", flags=flags, dont_inherit=True), space)
    return SimpleNamespace(**space)


class Numbers:
    """A batch as trainers lay it out: padded responses, one advantage per sequence, the chosen before the rejected."""

    def __init__(self) -> None:
        torch.manual_seed(2)
        wide = lambda *shape: torch.randn(*shape, dtype=torch.float64)
        self.logits = (2 * wide(B, T, V)).requires_grad_()
        self.ids = torch.randint(V, (B, T))
        self.mask = (torch.arange(T) < torch.tensor([7, 3, 2, 6, 5, 4])[:, None]).double()
        self.logp = self.logits.log_softmax(-1)
        self.lp = self.logp.gather(-1, self.ids[..., None])[..., 0] * self.mask
        near = lambda s: (self.lp.detach() + s * wide(B, T)).clamp(max=-1e-3) * self.mask
        self.old, self.ref, self.sampler = near(0.2), near(0.3), near(0.25)
        self.A = torch.tensor([1.2, -0.7, 0.4, -1.5, 0.9, -0.3], dtype=torch.float64)[:, None].expand(B, T).contiguous()
        self.value = wide(B, T).requires_grad_()
        self.old_value, self.returns = wide(B, T), wide(B, T)
        self.draw = torch.rand(B, T, dtype=torch.float64)
        self.desirable, self.kl = torch.tensor([1, 0, 1, 0, 0, 1]) > 0, torch.tensor(0.2, dtype=torch.float64)
        self.target = wide(B)
        self.is_chosen = (torch.arange(B) < 3).double()[:, None].expand(B, T).contiguous()
        self.length_weight: Tensor | None = None
        self.teacher: Any = None
        self.foreign: Tensor | None = None
        self.without: tuple[str, ...] = ()

    def mean(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        mask = self.mask if mask is None else mask
        return (x * mask).sum() / mask.sum()

    def seq(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """(B,): the mean over each sequence."""
        mask = self.mask if mask is None else mask
        return (x * mask).sum(-1) / mask.sum(-1)

    def inputs(self) -> dict[str, Any]:
        found = {
            "advantage": self.A, "old_logprob": self.old, "ref_logprob": self.ref, "sampler_logprob": self.sampler,
            "value": self.value, "old_value": self.old_value, "returns": self.returns, "draw": self.draw,
            "pairs": PAIRS, "desirable": self.desirable, "kl": self.kl, "optimal_advantage": self.target,
            "is_chosen": self.is_chosen, "is_correct": self.is_chosen, "length_weight": self.length_weight,
            "foreign_logprob": self.foreign,
        }  # fmt: skip
        return {n: x for n, x in found.items() if x is not None and n not in self.without}


FOUND: dict[Any, tuple[Tensor, list[Tensor]]] = {}  # many lines say the same


def here(code: str, x: Numbers) -> tuple[Tensor, list[Tensor]]:
    """Loss and gradients of a line of the page."""
    key = code, x.without, x.length_weight is None, x.teacher is None
    if key not in FOUND:
        FOUND[key] = _here(code, x)
    return FOUND[key]


def _here(code: str, x: Numbers) -> tuple[Tensor, list[Tensor]]:
    names = {n: f for n, f in vars(row_weights).items() if callable(f)}
    term = eval(code, {"hl": hl, "math": math, **names, **LOSSES})
    objective = hl.Objective(it=term, backend="torch")
    asked = set(objective.terms["it"].call(None, {}).input_names)
    given = {n: v for n, v in x.inputs().items() if n in asked}
    logits, value = x.logits.detach().requires_grad_(), x.value.detach().requires_grad_()
    if "value" in given:
        given["value"] = value
    if x.teacher is not None:
        given["teacher"] = x.teacher
    targets = x.ids.masked_fill(x.mask == 0, -100)
    out = objective(hl.Logits(logits), targets, segments=hl.Segments.from_batch(targets), **given)
    return out.loss, list(torch.autograd.grad(out.loss, (logits, value), allow_unused=True))


# verl

STACKS = Path(sys.prefix) / "stacks" / "verl"


class Config(SimpleNamespace):
    """verl's ActorConfig, as far as its losses look at it."""

    def get(self, name: str, default: Any = None) -> Any:
        return getattr(self, name, default)


def verl(mode: str, agg: str = "token-mean", **settings: Any) -> Callable[[Numbers], Tensor]:
    def loss(x: Numbers) -> Tensor:
        policy = {k: settings.pop(k) for k in list(settings) if k.split("_")[0] in ("clip", "kl", "ppo", "dro")}
        bounds = {"clip_ratio": 0.2, "clip_ratio_low": 0.2, "clip_ratio_high": 0.28, **policy}
        ratios = {k: v for k, v in bounds.items() if k.startswith("clip_ratio")}
        config = Config(**ratios, **settings, policy_loss=SimpleNamespace(**bounds), global_batch_info={})
        fn = getattr(of_verl(), f"compute_policy_loss_{mode}")
        return fn(x.old, x.lp, x.A, x.mask, agg, config)[0]

    return loss


@functools.cache
def of_verl() -> SimpleNamespace:
    if not STACKS.exists():
        pytest.skip("verl is not in .venv/stacks")
    inner = lift(STACKS / "utils" / "torch_functional.py", "masked_sum", "masked_mean", "clip_by_value")
    path = STACKS / "trainer" / "ppo" / "core_algos.py"
    modes = "vanilla gspo sapo gpg clip_cov kl_cov geo_mean dro cispo dppo_tv dppo_kl"
    names = [f"compute_policy_loss_{mode}" for mode in modes.split()]
    return lift(
        path, *names, "agg_loss", "compute_value_loss", "kl_penalty_forward",
        verl_F=inner, ActorConfig=Config, AlgoConfig=type("AlgoConfig", (), {}),
    )  # fmt: skip


def verl_rejection(option: str, threshold: Any) -> Callable[[Numbers], Tensor]:
    def loss(x: Numbers) -> Tensor:
        inner = of_verl().verl_F
        found = lift(
            STACKS / "trainer" / "ppo" / "rollout_corr_helper.py",
            "SAFETY_BOUND", "SUPPORTED_ROLLOUT_RS_OPTIONS", "TOKEN_LEVEL_ROLLOUT_RS_OPTIONS",
            "_parse_rollout_rs_thresholds", "compute_rollout_rejection_mask",
            verl_F=inner, compute_rs_metrics=lambda **_: {},
        )  # fmt: skip
        mask, _ = found.compute_rollout_rejection_mask(x.old - x.sampler, x.mask, option, threshold)
        assert 0 < mask.sum() < x.mask.sum()
        kept, x.mask = x.mask, mask
        try:
            return verl("vanilla", clip_ratio_c=3.0)(x)
        finally:
            x.mask = kept

    return loss


def ppo(x: Numbers, low: float = 0.2, high: float = 0.28, dual: float | None = 3.0) -> Tensor:
    r = torch.exp(x.lp - x.old)
    loss = torch.max(-x.A * r, -x.A * r.clamp(1 - low, 1 + high))
    return loss if dual is None else torch.where(x.A < 0, torch.min(loss, -dual * x.A), loss)


def value(x: Numbers) -> Tensor:
    held = x.old_value + (x.value - x.old_value).clamp(-0.5, 0.5)
    return 0.5 * x.mean(torch.max((x.value - x.returns) ** 2, (held - x.returns) ** 2))


def tis(x: Numbers) -> Tensor:
    return torch.exp(x.old - x.sampler)


def geometric(x: Numbers, d: Tensor) -> Tensor:
    return torch.exp(x.seq(d))[:, None].expand(B, T)


def masked_tis(x: Numbers) -> Tensor:
    whole = geometric(x, x.old - x.sampler)
    kept = ((whole >= 0.95) & (whole <= 1.05)).double()
    assert 0 < x.mean(kept) < 1
    return x.mean(kept * tis(x) * ppo(x))


def banded(x: Numbers) -> Tensor:
    w = tis(x)
    return x.mean(torch.where((w >= 0.8) & (w <= 1.2), w, 0.0) * ppo(x))


def gspo_clip(x: Numbers) -> Tensor:
    s = geometric(x, x.lp - x.old)
    return torch.max(-x.A * s, -x.A * s.clamp(0.98, 1.03))


# TRL


@functools.cache
def of_trl(file: str, *names: str) -> SimpleNamespace:
    found = importlib.util.find_spec("trl")
    if found is None or not found.submodule_search_locations:
        pytest.skip("TRL is not installed")
    return lift(Path(found.submodule_search_locations[0]) / file, *names)


def trl_dpo(loss_type: str = "sigmoid", **settings: Any) -> Callable[[Numbers], Tensor]:
    def loss(x: Numbers) -> Tensor:
        pad = lambda y: F.pad(y, (1, 0))
        ref, ld = x.ref, settings.get("ld_alpha")
        if ld is not None:
            place, lengths = x.mask.cumsum(1), x.mask.sum(1)
            shorter = torch.minimum(lengths[:3], lengths[3:]).repeat(2)[:, None]
            x.length_weight = torch.where(place <= shorter, 1.0, ld)
            ref = x.ref * x.length_weight
        same = lambda y: y
        outputs = SimpleNamespace(
            log_probs=x.lp, entropy=x.lp.detach(), mean_logits=x.lp.detach(), is_top1=x.mask > 0,
            log_sum_sq_probs=x.logp.exp().square().sum(-1).log(),
        )  # fmt: skip
        trainer = SimpleNamespace(
            model=SimpleNamespace(training=True), aux_loss_enabled=False, precompute_ref_logps=True, ld_alpha=ld,
            accelerator=SimpleNamespace(device="cpu", gather=same, gather_for_metrics=same), use_weighting=False,
            f_divergence_type="reverse_kl", f_alpha_divergence_coef=0.5, loss_types=[loss_type], loss_weights=[1.0],
            beta=0.3, label_smoothing=0.1, args=SimpleNamespace(discopop_tau=0.05), _total_train_tokens=0, _tp_size=1,
            _metrics={"train": defaultdict(list)},
        )  # fmt: skip
        vars(trainer).update(settings)
        inputs = {
            "input_ids": pad(x.ids), "completion_mask": pad(x.mask.long()), "attention_mask": pad(x.mask.long()),
            "ref_chosen_logps": ref[:3].sum(1), "ref_rejected_logps": ref[3:].sum(1),
        }  # fmt: skip
        found = of_trl("trainer/dpo_trainer.py", "DPOTrainer._compute_loss")
        return found._compute_loss(trainer, lambda **_: outputs, inputs, False)

    return loss


def trl_cpo(loss_type: str, average: bool, **settings: Any) -> Callable[[Numbers], Tensor]:
    def loss(x: Numbers) -> Tensor:
        said = {"beta": 0.3, "alpha": 0.0, "simpo_gamma": 0.5, "label_smoothing": 0.0, **settings}
        trainer = SimpleNamespace(loss_type=loss_type, accelerator=SimpleNamespace(device="cpu"), **said)
        y = x.seq(x.lp) if average else x.lp.sum(1)
        found = of_trl("experimental/cpo/cpo_trainer.py", "CPOTrainer.cpo_loss")
        return found.cpo_loss(trainer, y[:3], y[3:])[0].mean()

    return loss


def trl_uld(x: Numbers) -> Tensor:
    u = 2 * torch.randn(B, T, V + 3, dtype=torch.float64)
    x.foreign = u.log_softmax(-1)
    labels = x.ids.masked_fill(x.mask == 0, -100)
    found = of_trl(
        "experimental/gold/gold_trainer.py",
        "ULDLoss._compute_distillation_loss", "ULDLoss._get_start_and_size_answers",
    )  # fmt: skip
    loss = SimpleNamespace(
        ignore_index=-100, skip_student_eos=False, skip_teacher_eos=False, token_merge_strategy="observed",
        student_temperature=1.0, teacher_temperature=1.0, use_extended_uld=False, use_hybrid_loss=False,
        distillation_weight=1.0,
    )  # fmt: skip
    loss._get_start_and_size_answers = functools.partial(found._get_start_and_size_answers, loss)
    return found._compute_distillation_loss(loss, x.logits, u, labels, labels, x.ids, x.ids)


def kto(x: Numbers, kl: Tensor | float) -> Tensor:
    gain = (x.lp - x.ref).sum(1)
    good, bad = 1 - torch.sigmoid(0.3 * (gain - kl)), 1 - torch.sigmoid(0.3 * (kl - gain))
    return torch.where(x.desirable, 1.3 * good, 0.7 * bad).mean()


def unpaired(x: Numbers) -> Tensor:
    x.without = ("kl",)
    return kto(x, 0.0)


def alpha_divergence(x: Numbers) -> Tensor:
    """TRL's has no float64."""
    u = torch.exp((x.lp - x.ref).sum(1))
    score = (u**-0.5 - 1) / -0.5
    return -F.logsigmoid(0.3 * (score[:3] - score[3:])).mean()


def rloo(x: Numbers) -> Tensor:
    w, A = torch.exp(x.lp.sum(1) - x.old.sum(1)), x.A[:, 0]
    return -torch.min(w * A, w.clamp(0.8, 1.2) * A).mean()


def dpo(x: Numbers, link: Callable[[Tensor], Tensor], average: bool = False) -> Tensor:
    gain = x.seq(x.lp - x.ref) if average else (x.lp - x.ref).sum(1)
    return link(gain[:3] - gain[3:]).mean()


def orpo(x: Numbers) -> Tensor:
    y = x.seq(x.lp)
    odds = y - torch.log1p(-torch.exp(y))
    return x.mean(-x.lp, x.mask * x.is_chosen) - 0.3 * F.logsigmoid(odds[:3] - odds[3:]).mean()


def low_var(x: Numbers) -> Tensor:
    return x.mean(of_verl().kl_penalty_forward(x.lp, x.ref, "low_var_kl"))


def opsm(x: Numbers) -> Tensor:
    x.without = ("sampler_logprob",)
    far = (x.A < 0) & (x.seq(x.old - x.lp.detach())[:, None] > 0.02)
    assert 0 < x.mean(far.double()) < 1
    return x.mean(ppo(x) * ~far)


def k3(d: Tensor) -> Tensor:
    return torch.exp(d) - 1 - d


def areal_rejection(x: Numbers) -> Tensor:
    whole = x.seq(k3(x.sampler - x.old))[:, None]
    assert 0 < (whole <= 0.05).double().mean() < 1
    return x.mean((whole <= 0.05) * tis(x) * ppo(x, dual=None))


def areal_m2(x: Numbers) -> Tensor:
    inside = x.mask.flatten() > 0
    m2 = ((x.sampler - x.old) ** 2).flatten()
    order = sorted(torch.nonzero(inside).flatten().tolist(), key=lambda i: -float(m2[i]))
    while len(order) > 1 and m2[order].mean() >= 0.01:
        order.pop(0)
    kept = torch.zeros(B * T, dtype=torch.float64)
    kept[order] = 1
    return x.mean(ppo(x, dual=None), kept.view(B, T))


def areal_sapo(x: Numbers) -> Tensor:
    s = geometric(x, x.lp - x.old)
    gates = [torch.sigmoid(tau * (s - 1)) * 4 / tau for tau in (1.0, 1.05)]
    return x.mean(-torch.where(x.A > 0, *gates) * x.A)


def prime(x: Numbers, both: bool) -> Tensor:
    gap = torch.exp(x.lp) - torch.exp(x.old)
    out = gap.abs() > 0.02 if both else torch.where(x.A > 0, gap > 0.03, gap < -0.02)
    assert 0 < x.mean(out.double()) < 1
    return x.mean(-(~out).double() * x.A * torch.exp(x.lp - x.old))


def prime_ref_kl(x: Numbers) -> Tensor:
    kept = (torch.exp(x.lp) - torch.exp(x.old) >= -0.2).double()
    return x.mean(-kept * (x.ref - x.lp).detach() * torch.exp(x.lp - x.old))


def areal_huber(x: Numbers) -> Tensor:
    x.returns = 12 * x.returns
    error = lambda v: F.huber_loss(v, x.returns, reduction="none", delta=10.0)
    held = x.old_value + (x.value - x.old_value).clamp(-0.5, 0.5)
    assert ((x.value - x.returns).abs() > 10).any()
    return x.mean(torch.max(error(x.value), error(held)))


def axolotl_eaft(x: Numbers, k: int = V) -> Tensor:
    p = torch.softmax(x.logits.topk(k).values, -1)
    gate = torch.pow(-(p * torch.log(p)).sum(-1), 0.5).detach()
    return x.mean(-gate * x.lp)


def axolotl_kd(x: Numbers) -> Tensor:
    logq, ids = torch.randn(B, T, V, dtype=torch.float64).log_softmax(-1).topk(4)
    x.teacher = hl.Sparse(ids, logq)
    return x.mean((logq.exp() * (logq - x.logp.gather(-1, ids))).sum(-1))


def factory_eaft(x: Numbers) -> Tensor:
    inside = x.logits.detach().topk(20).values.log_softmax(-1)
    doubt = -(inside.exp() * inside).sum(-1)
    return x.mean(-((doubt / 3.0) ** 0.5) * x.lp)


def factory_kl(x: Numbers) -> Tensor:
    u = torch.randn(x.logits.shape, dtype=torch.float64)
    x.teacher = hl.Logits(u)
    return 0.1 * x.mean(F.kl_div(x.logp, u.softmax(-1), reduction="none").sum(-1))


def profit(x: Numbers, low: float, high: float = 1.0) -> Tensor:
    p = x.lp.detach().exp()
    kept = ((p >= low) & (p <= high)).double()
    assert 0 < x.mean(kept) < 1 and (high == 1.0 or x.mean((p > high).double()) > 0)
    return (kept * -x.lp * x.mask).sum() / x.mask.sum()


def eksft(x: Numbers, fraction: float, union: bool) -> Tensor:
    u = torch.randn(x.logits.shape, dtype=torch.float64)
    x.teacher = hl.Logits(u)
    entropy, kl = -(x.logp.exp() * x.logp).sum(-1), (x.logp.exp() * (x.logp - u.log_softmax(-1))).sum(-1)
    masks = []
    for score in (entropy, kl):
        score = score.detach().masked_fill(x.mask == 0, -math.inf).flatten()
        masks.append(torch.zeros(B * T, dtype=torch.bool))
        masks[-1][score.topk(int(x.mask.sum() * fraction)).indices] = True
    out = (masks[0] | masks[1]) if union else (masks[0] & masks[1])
    assert 0 < out.sum() < x.mask.sum()
    return x.mean(-x.lp, x.mask * ~out.view(B, T))


def cispo_clip(x: Numbers) -> Tensor:
    return -torch.exp(x.lp - x.old).clamp(0.8, 1.28).detach() * x.A * x.lp


# Liger


def of_liger(file: str, *names: str, **space: Any) -> SimpleNamespace:
    folder = Path(sys.prefix) / "stacks" / "liger_kernel" / "chunked_loss"
    if not folder.exists():
        pytest.skip("Liger is not in .venv/stacks")
    return lift(folder / file, *names, **space)


def liger_pairs(kind: str, average: bool, ref: bool = False, **settings: Any) -> Callable[[Numbers], Tensor]:
    """The preference part of one of Liger's losses of pairs."""

    def loss(x: Numbers) -> Tensor:
        found = of_liger(f"{kind.lower()}_loss.py", f"LigerFusedLinear{kind}Function.preference_loss_fn")
        logps = x.seq(x.lp) if average else x.lp.sum(1)
        own = {"ref_chosen_logps": x.ref[:3].sum(1), "ref_rejected_logps": x.ref[3:].sum(1)} if ref else {}
        return found.preference_loss_fn(logps[:3], logps[3:], x.ids, beta=0.3, **own, **settings)[0]

    return loss


def liger_kto(x: Numbers) -> Tensor:
    found = of_liger("kto_loss.py", "LigerFusedLinearKTOFunction.preference_loss_fn")
    return found.preference_loss_fn(x.lp.sum(1), x.desirable, x.ids, x.ref.sum(1), beta=0.3, kl=x.kl)[0]


def liger_teacher(kind: str, T: float = 1.0, weight: float = 1.0, **settings: Any) -> Callable[[Numbers], Tensor]:
    def loss(x: Numbers) -> Tensor:
        u = torch.randn(x.logits.shape, dtype=torch.float64)
        x.teacher = hl.Logits(u)
        found = of_liger(f"{kind}_loss.py", f"LigerFusedLinear{KINDS[kind]}Function.distillation_loss_fn")
        rows = x.mask > 0
        return found.distillation_loss_fn(x.logits[rows] / T, u[rows] / T, **settings) / x.mask.sum()

    return loss


KINDS = {"jsd": "JSD", "cosine_similarity": "CosineSimilarity"}


def liger_tvd(x: Numbers) -> Tensor:
    u = torch.randn(x.logits.shape, dtype=torch.float64)
    x.teacher = hl.Logits(u)
    return x.mean(0.5 * (x.logp.exp() - u.softmax(-1)).abs().sum(-1))


def liger_grpo(loss_type: str = "dapo", **settings: Any) -> Callable[[Numbers], Tensor]:
    def loss(x: Numbers) -> Tensor:
        base = SimpleNamespace(_compute_dapo_normalizer=lambda mask, num_items_in_batch: mask.sum())
        helpers = ("k3_loss_fn", "get_gamma_weights", "sapo_loss_fn", "clip_coef_fn")
        fn = "LigerFusedLinearGRPOFunction.ppo_loss_fn"
        found = of_liger("grpo_loss.py", fn, *helpers, LigerFusedLinearPPOBase=base).ppo_loss_fn
        space = found.__globals__
        space["get_gamma_weights"] = torch.no_grad()(space["get_gamma_weights"])  # a decorator of theirs
        own = {"epsilon_low": 0.2, "epsilon_high": 0.28, "beta": 0.0, **settings}
        if own.pop("is_ratio", False):
            own["vllm_is_ratio"] = tis(x)
        given = (x.lp, x.mask, x.A[:, 0], x.mask)
        return found(*given, ref_per_token_logps=x.ref, old_per_token_logps=x.old, loss_type=loss_type, **own)[0]

    return loss


def liger_kl(**settings: Any) -> Callable[[Numbers], Tensor]:
    return lambda x: liger_grpo(beta=1.0, **settings)(x) - liger_grpo()(x)


plain = lambda x: x.mean(ppo(x))
by_sequence = lambda x: x.seq(ppo(x)).mean()
chosen_nll = lambda x: x.mean(-x.lp, x.mask * x.is_chosen)
gspo_mean = lambda x: x.seq(gspo_clip(x)).mean()
truncated = lambda x: x.mean(tis(x).clamp(0.5, 1.2) * ppo(x))
log_sigmoid = lambda m: -F.logsigmoid(0.3 * m)
PEERS: dict[str, dict[str, Callable[[Numbers], Tensor]]] = {
    "verl": {
        '"vanilla"': verl("vanilla", clip_ratio_c=3.0),
        '"gspo"': verl("gspo", "seq-mean-token-mean", clip_ratio_low=0.02, clip_ratio_high=0.03),
        '"sapo"': verl("sapo", tau_pos=1.0, tau_neg=1.05),
        '"gpg"': verl("gpg"),
        '"clip_cov"': verl("clip_cov", clip_cov_ratio=1.0, clip_cov_lb=0.1, clip_cov_ub=5.0),
        '"kl_cov"': verl("kl_cov", kl_cov_ratio=0.2, ppo_kl_coef=0.5),
        '"geo_mean"': verl("geo_mean", clip_ratio_low=0.3, clip_ratio_high=0.4),
        '"dro"': verl("dro", dro_beta=0.3),
        '"cispo"': verl("cispo"),
        '"dppo_tv"': verl("dppo_tv", clip_ratio_low=0.02, clip_ratio_high=0.03),
        '"dppo_kl"': verl("dppo_kl", clip_ratio_low=0.02, clip_ratio_high=0.03),
        'sum"`': verl("vanilla", "seq-mean-token-sum", clip_ratio_c=3.0),
        "sum-norm": verl("vanilla", "seq-mean-token-sum-norm", clip_ratio_c=3.0),
        "rollout_is=": lambda x: x.mean(tis(x).clamp(max=2.0) * ppo(x)),
        "token_k1": verl_rejection("token_k1", "0.8_1.3"),
        "token_k2": verl_rejection("token_k2", 0.05),
        "seq_mean_k3": verl_rejection("seq_mean_k3", 0.05),
        "seq_sum_k2": verl_rejection("seq_sum_k2", 0.2),
        "seq_max_k3": verl_rejection("seq_max_k3", 0.2),
        "low_var_kl": low_var,
        "compute_value_loss": lambda x: of_verl().compute_value_loss(x.value, x.returns, x.old_value, x.mask, 0.5)[0],
    },
    "TRL": {
        **{f'DPO `loss_type="{name}"': trl_dpo(name) for name in (
            "sigmoid", "hinge", "ipo", "exo_pair", "nca_pair", "robust", "bco_pair", "sppo_hard", "aot",
            "aot_unpaired", "apo_zero", "apo_down", "discopop", "sigmoid_norm", "sft",
        )},
        "forward_kl": trl_dpo(f_divergence_type="forward_kl"),
        "js_divergence": trl_dpo(f_divergence_type="js_divergence"),
        "alpha_divergence": alpha_divergence,
        "use_weighting": trl_dpo(use_weighting=True),
        "ld_alpha": trl_dpo(ld_alpha=0.4),
        'CPO `loss_type="sigmoid"': trl_cpo("sigmoid", False, label_smoothing=0.1),
        'CPO `loss_type="hinge"': trl_cpo("hinge", False, beta=0.03),
        'CPO `loss_type="ipo"': trl_cpo("ipo", True),
        '"simpo"': trl_cpo("simpo", True, label_smoothing=0.1),
        '"alphapo"': trl_cpo("simpo", True, alpha=0.25),
        "cpo_alpha": chosen_nll,
        '"kto"': lambda x: kto(x, x.kl),
        "apo_zero_unpaired": unpaired,
        "RLOO": rloo,
        "use_uld_loss": trl_uld,
        "A2PO": lambda x: ((0.01 * (x.lp - x.ref).sum(1) - x.target) ** 2).mean(),
    },
    "NeMo-RL": {
        "ratio_clip_c": plain,
        "token_level_loss": by_sequence,
        "sequence_level": gspo_mean,
        "disable_ppo_ratio": lambda x: x.mean(-x.A * x.lp),
        "use_cispo": lambda x: x.mean(cispo_clip(x)),
        '"tis"': truncated,
        '"icepop"': banded,
        "seq-mask-tis": masked_tis,
        "on_policy_kl": lambda x: x.mean((torch.exp(x.lp - x.sampler) * k3(x.ref - x.lp)).clamp(-10, 10)),
        "positive_example": chosen_nll,
        "preference_average": lambda x: dpo(x, log_sigmoid, average=True),
        "MseValueLoss": value,
    },
    "slime": {
        "eps_clip_c": by_sequence,
        '"gspo"': gspo_mean,
        '"cispo"': lambda x: x.seq(cispo_clip(x)).mean(),
        "calculate_per_token_loss": plain,
        "use_tis": truncated,
        "IcePop": banded,
        "use_opsm": opsm,
        "low_var_kl": lambda x: x.mean((torch.exp(x.lp - x.old) * k3(x.ref - x.lp)).clamp(-10, 10)),
        "value_clip": lambda x: 2 * value(x),
    },
    "OpenRLHF": {
        "dual_clip": plain,
        '"gspo"': gspo_mean,
        '"tis"': truncated,
        '"icepop"': banded,
        "seq-mask-tis": masked_tis,
        "ValueLoss": value,
        "label_smoothing": lambda x: dpo(x, lambda m: -0.9 * F.logsigmoid(0.3 * m) - 0.1 * F.logsigmoid(-0.3 * m)),
        "ipo=True": lambda x: dpo(x, lambda m: (m - 1 / 0.6) ** 2),
    },
    "AReaL": {
        "c_clip": plain,
        '| `importance_sampling_level': lambda x: x.mean(gspo_clip(x)),
        "use_sapo_loss": areal_sapo,
        '"kl_k3"': areal_rejection,
        '"ratio"': lambda x: x.mean(tis(x).clamp(0.5, 1.2) * ppo(x, dual=None)),
        "m2_threshold": areal_m2,
        "ppo_critic_loss_fn": value,
        '"huber"': areal_huber,
    },
    "prime-rl": {
        "default loss": lambda x: prime(x, False),
        '"ipo"': lambda x: prime(x, True),
        "kl_tau": lambda x: x.mean(0.001 * (x.lp - x.old) ** 2),
        "ce component": chosen_nll,
        "ref_kl": prime_ref_kl,
    },
    "axolotl": {
        "use_eaft": axolotl_eaft,
        "eaft_k=5": lambda x: axolotl_eaft(x, 5),
        "rl: simpo": lambda x: -F.logsigmoid(0.3 * (x.seq(x.lp)[:3] - x.seq(x.lp)[3:]) - 0.5).mean(),
        "rl: ipo": lambda x: dpo(x, lambda m: (m - 1 / 0.6) ** 2, average=True),
        "rl: orpo": orpo,
        "rl: kto": lambda x: kto(x, x.kl),
        "kd_*": axolotl_kd,
    },
    "LLaMA-Factory": {
        "use_dft_loss": lambda x: x.mean(-x.lp.detach().exp() * x.lp),
        "use_asft_loss": factory_kl,
        "use_eaft_loss": factory_eaft,
        '"higher"': lambda x: profit(x, 0.05),
        '"middle"': lambda x: profit(x, 0.02, 0.1),
        "eksft_top_k_ratio": lambda x: eksft(x, 0.2, True),
        "eksft_is_union_mask=False": lambda x: eksft(x, 0.4, False),
    },
    "Liger": {
        "CrossEntropyLoss(label_smoothing": lambda x: F.cross_entropy(
            x.logits[x.mask > 0], x.ids[x.mask > 0], label_smoothing=0.1
        ),
        "lse_square_scale": lambda x: 1e-4 * x.mean(x.logits.logsumexp(-1) ** 2),
        "use_token_scaling": lambda x: x.mean(-x.lp.detach().exp() * x.lp),
        "JSDLoss(beta=0.4": liger_teacher("jsd", T=2.0, beta=0.4),
        "JSDLoss(beta=0)": liger_teacher("jsd", beta=0),
        "JSDLoss(beta=1)": liger_teacher("jsd", beta=1),
        "CosineSimilarity": liger_teacher("cosine_similarity", beta=0.5),
        "LigerTVDLoss": liger_tvd,
        **{f'DPO `loss_type="{name}"': liger_pairs(
            "DPO", False, True, loss_type=name, label_smoothing=0.1 * (name in ("exo_pair", "robust"))
        ) for name in (
            "sigmoid", "hinge", "exo_pair", "nca_pair", "robust", "bco_pair", "sppo_hard", "apo_zero", "apo_down",
            "discopop",
        )},
        "CPOLoss": liger_pairs("CPO", False, label_smoothing=0.1),
        "SimPOLoss": liger_pairs("SimPO", True, gamma=0.5, label_smoothing=0.1),
        "ORPOLoss": liger_pairs("ORPO", True),
        "compute_nll_loss": chosen_nll,
        "KTOLoss": liger_kto,
        'GRPO `loss_type="grpo"': liger_grpo("grpo"),
        'GRPO `loss_type="dapo"': liger_grpo(),
        "dr_grpo": liger_grpo("dr_grpo", max_completion_length=7),
        '"cispo"': liger_grpo("cispo", epsilon_high=1.1),
        '"sapo"': liger_grpo("sapo"),
        '"vespo"': liger_grpo("vespo"),
        "GRPO `importance": liger_grpo(importance_sampling_level="sequence", epsilon_low=0.02, epsilon_high=0.03),
        '"luspo"': liger_grpo("luspo", importance_sampling_level="sequence", epsilon_low=0.02, epsilon_high=0.03),
        "delta": liger_grpo(delta=1.15, epsilon_high=0.1),
        "vllm_is_ratio": liger_grpo(is_ratio=True),
        "KL alone": liger_kl(),
        "use_bias_correction_kl": liger_kl(use_bias_correction_kl=True),
    },
}  # fmt: skip


def peer_of(trainer: str, option: str) -> list[str]:
    return [key for key in PEERS[trainer] if key in f"| {option} "]


def test_every_line_has_a_peer_and_every_peer_a_line() -> None:
    assert {trainer for trainer, _, _ in ROWS} == set(PEERS)
    for trainer, peers in PEERS.items():
        found = [peer_of(trainer, option) for name, option, said in ROWS if name == trainer and said != "not available"]
        assert all(len(keys) == 1 for keys in found), (trainer, found)
        assert sorted(key for keys in found for key in keys) == sorted(peers)


@pytest.mark.parametrize("row", [r for r in ROWS if r[2] != "not available"], ids=lambda r: f"{r[0]} {r[1]}")
def test_a_line_of_the_page(row: tuple[str, str, str]) -> None:
    trainer, option, said = row
    x = Numbers()
    want = PEERS[trainer][peer_of(trainer, option)[0]](x)
    grads = torch.autograd.grad(want, (x.logits, x.value), allow_unused=True)
    loss, found = here(said.strip("`"), x)
    torch.testing.assert_close(loss, want, rtol=1e-7, atol=1e-9)
    for a, b in zip(found, grads, strict=True):
        inside = x.mask[..., None] if a is not None and a.ndim == 3 else x.mask
        zero = torch.zeros(B, T, V if inside.ndim == 3 else 1, dtype=torch.float64)
        ours, theirs = ((zero if g is None else g * (inside if g.ndim == 3 else x.mask)) for g in (a, b))
        torch.testing.assert_close(ours.reshape(B, T, -1), theirs.reshape(B, T, -1), rtol=1e-7, atol=1e-9)
    assert any(g is not None and g.abs().max() > 1e-6 for g in grads), "the case must have a gradient"
