"""Every number that a loss takes as an option has a range, or is listed as free; outside of it the call is refused."""

import inspect
import math

import pytest
import torch

import headloss as hl
from headloss import row_weights
from headloss.losses import LOSSES

N, V = 6, 11
BELOW = math.nextafter(0.0, -1.0)
DISTANCE = (-0.2,)  # from 1, or from an old value
RATE = (0.0, -0.1)  # which divides, or turns a preference around
SHARE = (-0.1, 1.5)
ABOVE_ONE = (1.0, 0.2, -3.0)  # a ratio, given as a distance from 1
WEIGHT = (BELOW, -1.0)

# of each option, numbers that it must not be
REFUSED = {
    ("a2po", "beta"): RATE,
    ("cispo", "high"): (0.0, -1.0),
    ("cispo", "low"): (5.0, 6.0),
    ("clip_cov", "fraction"): SHARE,
    ("clip_cov", "least"): (5.0,),
    ("clip_cov", "most"): (1.0,),
    ("cpo", "beta"): RATE,
    ("deft", "alpha"): (0.0, 1.1),
    ("dpo", "beta"): RATE,
    ("dpo", "tau"): RATE,
    ("dppo", "cap"): RATE,
    ("eaft", "alpha"): WEIGHT,
    ("eaft", "unit"): RATE,
    ("focal", "gamma"): WEIGHT,
    ("jsd", "beta"): (0.0, 1.0),
    ("kimi", "beta"): WEIGHT,
    ("kl_cov", "beta"): WEIGHT,
    ("kl_cov", "fraction"): SHARE,
    ("kl_to_reference", "bound"): RATE,
    ("kl_to_reference_sequence", "bound"): RATE,
    ("kto", "beta"): RATE,
    ("kto", "desirable_weight"): WEIGHT,
    ("kto", "undesirable_weight"): WEIGHT,
    ("opd", "low"): DISTANCE,
    ("orpo", "beta"): WEIGHT,
    ("sapo", "tau_neg"): RATE,
    ("sapo", "tau_pos"): RATE,
    ("simpo", "beta"): RATE,
    ("simpo", "gamma"): WEIGHT,
    ("skew_kl", "alpha"): (-0.1, 1.0),
    ("value_loss", "clip"): RATE,
    ("value_loss", "huber"): RATE,
    ("vespo", "sampler_high"): RATE,
    ("vespo", "sampler_low"): (2.0, 3.0),
    **{(loss, name): ABOVE_ONE for loss in ("grpo", "gspo") for name in ("dual", "delta")},
    **{("vespo", name): WEIGHT for name in ("k_pos", "lam_pos", "k_neg", "lam_neg")},
    **{(loss, "label_smoothing"): SHARE for loss in ("cross_entropy", "cpo", "dpo", "simpo")},
    **{
        (loss, name): DISTANCE
        for loss in ("clip_cov", "dppo", "gmpo", "grpo", "gspo", "gspo_token", "rloo")
        for name in ("low", "high")
    },
}
for twin, of in (("cispo_sequence", "cispo"), ("sapo_sequence", "sapo")):
    REFUSED |= {(twin, name): bad for (loss, name), bad in REFUSED.items() if loss == of}
FREE = {("dpo", "alpha"), ("simpo", "alpha")}  # any real alpha names a divergence

MORE = {("vespo", "sampler_low"): {"sampler_high": 2.0}}  # options that an option goes with


def numbers(fn):
    """The options of a loss that are numbers."""
    for name, parameter in inspect.signature(fn).parameters.items():
        default = parameter.default
        if parameter.kind is parameter.KEYWORD_ONLY and not isinstance(default, bool | str):
            yield name


def test_every_number_has_a_range_or_is_free():
    every = {(loss, name) for loss, fn in LOSSES.items() for name in numbers(fn)}
    assert every == set(REFUSED) | FREE
    assert not set(REFUSED) & FREE


def called(loss, **options):
    torch.manual_seed(0)
    row = lambda: torch.randn(N)
    given = {
        "advantage": row(), "old_logprob": -row().abs(), "ref_logprob": -row().abs(), "draw": torch.rand(N),
        "sampler_logprob": -row().abs(), "value": row().requires_grad_(), "returns": row(), "old_value": row(),
        "desirable": torch.tensor([True, False]), "optimal_advantage": torch.randn(2),
        "pairs": torch.tensor([[0, 1]]), "foreign_logprob": torch.randn(N, 3).log_softmax(-1),
    }  # fmt: skip
    wanted = inspect.signature(LOSSES[loss]).parameters
    more = {name: x for name, x in given.items() if name in wanted}
    if "segments" in wanted:
        more["segments"] = hl.Segments.from_ids(torch.arange(N) // 3)
    if "logq" in wanted:
        more["teacher"] = hl.Logits(torch.randn(N, V))
    z = torch.randn(N, V, requires_grad=True)
    top = {"top": 3} if "top_logprob" in wanted else {}
    objective = hl.Objective(it=hl.Term(LOSSES[loss], **top, **options))
    out = objective(hl.Logits(z), torch.randint(0, V, (N,)), **more)
    out.loss.backward()
    return out.loss


@pytest.mark.parametrize(("loss", "name"), sorted(REFUSED))
def test_outside_of_its_range_an_option_is_refused(loss, name):
    more = MORE.get((loss, name), {})
    for bad in REFUSED[loss, name]:
        with pytest.raises(ValueError, match=rf"\b{name}\b.*wanted .*, got "):
            called(loss, **more, **{name: bad})


EDGES = {
    "grpo": ({"low": 0.0, "high": 0.0}, {"low": 10.0}, {"dual": 1.5, "delta": 1.25}),
    "cispo": ({"low": -9.0, "high": 1.2}, {"low": 0.0, "high": 5.0}),
    "clip_cov": ({"fraction": 0.0}, {"fraction": 1.0}),
    "cross_entropy": ({"label_smoothing": 1.0},),
    "focal": ({"gamma": 0.0},),
    "kimi": ({"beta": 0.0},),
    "vespo": ({"lam_pos": 0.0, "sampler_high": 2.0, "sampler_low": 0.0},),
    "opd": ({"low": 0.0}, {"low": None}),
    "dppo": ({"cap": None}, {"low": 0.0}),
    "simpo": ({"gamma": 0.0, "alpha": -0.5},),
}


@pytest.mark.parametrize("loss", EDGES)
def test_what_lies_on_the_edge_is_taken(loss):
    for options in EDGES[loss]:
        assert called(loss, **options).isfinite()


WEIGHTS = {
    "truncate": ((0.0, 1.0), (math.nan,), (2.0, -0.1)),
    "band": ((2.0, 0.5), (-0.1, 2.0)),
    "drop_segments": ((2.0, 0.5), (-0.1, 2.0)),
    "reject": ((1.0, 2.0), (math.nan,)),
    "second_moment": ((0.0,), (-1.0,), (math.nan,)),
    "off_policy_mask": ((-0.1,), (math.nan,)),
    "top_entropy": ((0.0,), (1.5,), (math.nan,)),
    "likely": ((0.9, 0.1), (-0.1,)),
    "settled": ((-0.1,), (1.5,)),
}


def test_row_weights_have_ranges_too():
    made = {n for n, f in vars(row_weights).items() if inspect.isfunction(f) and f.__module__ == row_weights.__name__}
    assert {n for n in made if not n.startswith("_")} == {*WEIGHTS, "wpo"}
    for name, every in WEIGHTS.items():
        for bad in every:
            with pytest.raises(ValueError, match=r"wanted .*, got "):
                getattr(row_weights, name)(*bad)
