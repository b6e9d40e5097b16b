import torch

from headloss.losses._ranges import not_negative


def focal(logprob, *, gamma=2.0):
    """-(1 - p[y])^gamma log p[y]: easy tokens count less (Lin et al. 2017)."""
    not_negative(gamma=gamma)
    miss = -logprob.expm1()  # 1 - p[y], exact for confident tokens
    focus = miss.clamp(min=torch.finfo(miss.dtype).tiny) ** gamma  # 0 ** gamma has no slope where gamma < 1
    return -focus * logprob, {"focus": focus}
