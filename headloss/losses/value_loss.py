import torch

from headloss.losses._ranges import positive


def value_loss(value, returns, old_value=None, *, clip=None, huber=None):
    """(v - R)^2 / 2 of a critic's value v and the return R; with `clip` c, the larger of that and of the same with v
    held within c of `old_value` (Schulman et al. 2017).

    `value` is an input that requires grad, one number per row.  A value head of one column needs no input: its logit is
    the fact lse, so `hl.Term(value_loss, facts={"value": ("lse", 1.0)})` on `hl.Linear(hidden, value_head.weight)`.

    huber   beyond this distance from R the error counts linearly, not squared: huber (|v - R| - huber / 2)

    In trainers: verl compute_value_loss, OpenRLHF ValueLoss, AReaL ppo_critic_loss_fn, whose
    "huber" is huber=10; slime's has no 1/2.
    """
    free = _error(value - returns, huber)
    error = value.detach() - returns
    metrics = {"value": value, "returns": returns, "value_error": error.abs()}
    if clip is None:
        return free, metrics
    if old_value is None:
        raise ValueError(f"clip: {clip} is a distance from old_value; pass old_value, or clip=None")
    positive(clip=clip)
    held = _error(old_value + (value - old_value).clamp(-clip, clip) - returns, huber)
    return torch.maximum(free, held), metrics | {"clip_fraction": held > free}


def _error(x, huber):
    if huber is None:
        return x**2 / 2
    positive(huber=huber)
    return torch.where(x.abs() < huber, x**2 / 2, huber * (x.abs() - huber / 2))
