"""The first losses, written again from the logits alone.

A formula is injected by name like its loss, and may ask for `logits` (rows x vocabulary, after scale, softcap and
temperature) and `targets`.
"""

import torch
import torch.nn.functional as F


def cross_entropy(logits, targets, *, label_smoothing=0.0):
    return F.cross_entropy(logits, targets, reduction="none", label_smoothing=label_smoothing)


def z_loss(logits):
    return torch.log(torch.exp(logits).sum(-1)) ** 2


def entropy_bonus(logits):
    p = torch.softmax(logits, -1)
    return (p * torch.log(p)).sum(-1)


def cosine(logits, teacher_logits):
    return 1 - F.cosine_similarity(F.normalize(logits, dim=-1), F.normalize(teacher_logits, dim=-1), dim=-1)


def focal(logits, targets, *, gamma=2.0):
    p = torch.softmax(logits, -1)[torch.arange(len(targets)), targets]
    return -((1 - p) ** gamma) * torch.log(p)


def dft(logits, targets):
    nll = F.cross_entropy(logits, targets, reduction="none")
    return nll * torch.exp(-nll).detach()


def eaft(logits, targets, *, alpha=1.0, unit=1.0):
    doubt = torch.distributions.Categorical(logits=logits).entropy().detach()
    return F.cross_entropy(logits, targets, reduction="none") * torch.exp(alpha * torch.log(doubt / unit))


def deft(logits, targets, *, alpha=None):
    p = torch.softmax(logits, -1)
    power = (p * p).sum(-1).detach() if alpha is None else torch.full((len(targets),), alpha, dtype=p.dtype)
    return (1 - torch.pow(p[torch.arange(len(targets)), targets], power)) / power


def uld(logits, foreign_logprob, *, rest="bucket"):
    """Every probability sorted and padded with zeros; what stands beyond the 8 of the student is one sum."""
    p = torch.softmax(logits, -1).sort(-1).values.flip(-1)
    q = foreign_logprob.exp().sort(-1).values.flip(-1)
    apart = torch.stack([(p[:, k] - q[:, k]).abs() for k in range(min(8, q.shape[1]))]).sum(0)
    beyond = p[:, 8:].sum(-1) - (1 - q[:, :8].sum(-1))
    return apart if rest == "none" else apart + beyond.abs()


def value_loss(value, returns, old_value=None, *, clip=None, huber=None):
    if huber is not None:
        return F.huber_loss(value, returns, reduction="none", delta=huber)
    off = 0.5 * torch.square(returns - value)
    if clip is None:
        return off
    edge = torch.where(value > old_value, old_value + clip, old_value - clip)
    clipped = torch.where((value - old_value).abs() > clip, edge, value)
    held = 0.5 * torch.square(returns - clipped)
    return torch.where(held > off, held, off)


FORMULAS = {
    fn.__name__: fn for fn in (cosine, cross_entropy, z_loss, entropy_bonus, focal, dft, eaft, deft, uld, value_loss)
}
