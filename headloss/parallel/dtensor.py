"""DTensors: a head with sharded tensors becomes plain local tensors and a `VocabShard`, or an error says why not.

A weight sharded over its rows may be a vocabulary shard (tensor parallelism) or a piece of an FSDP parameter.  They
look the same, and taking one for the other silently gives a wrong loss.  So a sharded weight counts as a vocabulary
shard only if the caller says so: with `shard=`, with `HeadParallel`, or with a hidden replicated on the same mesh.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from headloss.parallel.shard import VocabShard
from headloss.sources import Linear, Source


def localize(source: Source) -> Source:
    """The same source on plain tensors; gradients still reach the DTensors."""
    return _localize_linear(source) if isinstance(source, Linear) else _localize_logits(source)


def _localize_logits(source: Any) -> Source:
    logits = source.logits
    split = _splits(logits)
    if split == [Shard(logits.ndim - 1)] and logits.device_mesh.ndim == 1:
        if source.shard is not None:
            _check_same_ranks("logits", logits, source.shard)
        shard = source.shard or shard_of(logits.device_mesh, logits.shape[-1], source.vocab)
        return dataclasses.replace(source, logits=logits.to_local(), shard=shard)
    if split or source.shard is not None:
        raise ValueError(
            f"logits: a DTensor placed {tuple(logits.placements)} is not a vocabulary shard; redistribute it to "
            f"Shard(-1) or Replicate() on one mesh dimension, or pass its local tensor if other ranks hold other rows"
        )
    return dataclasses.replace(source, logits=logits.to_local())


def _localize_linear(source: Linear) -> Source:
    hidden, weight = source.hidden, source.weight
    if source.shard is not None:
        if isinstance(hidden, DTensor):
            if _splits(hidden):
                raise ValueError(_NOT_REPLICATED.format(tuple(hidden.placements)))
            of_grad = Partial() if source.shard.partial_hidden else Replicate()
            hidden = hidden.to_local(grad_placements=[of_grad] * hidden.device_mesh.ndim)
        plain: dict[str, Any] = {"hidden": hidden}
        for name, x in (("weight", weight), ("bias", source.bias)):
            if isinstance(x, DTensor):
                _check_same_ranks(name, x, source.shard)
                x = x.to_local()
            plain[name] = x
        return dataclasses.replace(source, **plain)
    placement = _one_placement(weight) if isinstance(weight, DTensor) else None
    if not isinstance(hidden, DTensor):
        raise ValueError(
            f"weight: a DTensor placed {placement} with a plain hidden. If it is FSDP's, a piece of a parameter and "
            f"not of the vocabulary, use hl.FusedLMHead, whose own forward sees it whole. If it is a vocabulary shard, "
            f"say so: hl.HeadParallel, shard=hl.VocabShard(...), or hidden as a DTensor Replicate() on the same mesh"
        )
    if not isinstance(weight, DTensor) or weight.device_mesh != hidden.device_mesh:
        raise ValueError("hidden: is a DTensor, but weight is not one on the same mesh; pass hidden.to_local()")
    if _splits(hidden):
        raise ValueError(_NOT_REPLICATED.format(tuple(hidden.placements)))
    bias = source.bias.to_local() if isinstance(source.bias, DTensor) else source.bias
    local: dict[str, Any] = {
        "hidden": hidden.to_local(grad_placements=[Replicate()]),
        "weight": weight.to_local(),
        "bias": bias,
    }
    if placement is not None and placement.is_replicate():
        return dataclasses.replace(source, **local)
    if not (isinstance(placement, Shard) and placement.dim == 0):
        raise ValueError(
            f"weight: a DTensor placed {placement}; the head knows Shard(0), the vocabulary, and Replicate()"
        )
    return dataclasses.replace(source, **local, shard=shard_of(weight.device_mesh, weight.shape[0], source.vocab))


_NOT_REPLICATED = (
    "hidden: a DTensor placed {}; redistribute it to Replicate() before the head (hl.HeadParallel(input_layouts=...) "
    "does): all ranks that share the vocabulary see the same rows"
)


def _splits(x: DTensor) -> list[Placement]:
    """The placements that split a tensor over several ranks, with negative Shard dims made positive."""
    found = []
    for placement, size in zip(x.placements, x.device_mesh.shape, strict=True):
        if size > 1 and not placement.is_replicate():
            plain = isinstance(placement, Shard) and placement.dim < 0
            found.append(Shard(placement.dim + x.ndim) if plain else placement)  # type: ignore[attr-defined]
    return found


def _check_same_ranks(name: str, x: DTensor, shard: VocabShard) -> None:
    """A DTensor passed with an explicit shard must be split over that shard's ranks; otherwise it is something else."""
    ranks = dist.get_process_group_ranks(shard.group)
    dim = x.ndim - 1 if name == "logits" else 0
    if _splits(x) not in ([], [Shard(dim)]) or x.device_mesh.mesh.flatten().tolist() != ranks:
        raise ValueError(
            f"{name}: a DTensor placed {tuple(x.placements)} on ranks {x.device_mesh.mesh.tolist()}, but shard= says "
            f"that ranks {ranks} share the vocabulary. If it is FSDP's, use hl.FusedLMHead; if its local tensor is "
            f"meant, pass that"
        )


def _one_placement(x: DTensor) -> Placement:
    split = _splits(x)
    if len(split) > 1 or (split and x.device_mesh.ndim > 1):
        raise ValueError(
            f"weight: a DTensor placed {tuple(x.placements)} on a {x.device_mesh.ndim}-D mesh; outside its module's "
            f"forward an FSDP parameter is a piece. Use hl.FusedLMHead, whose own forward sees it whole"
        )
    return split[0] if split else (x.placements[0] if x.device_mesh.ndim == 1 else Replicate())


def shard_of(mesh: Any, held: int, vocab: int | None = None, dim: int = 0) -> VocabShard:
    """This rank's shard if DTensor's Shard(0) splits `held` columns over a mesh dimension.  Columns from `vocab` on are
    padding."""
    width, vocab = -(-held // mesh.size(dim)), held if vocab is None else vocab
    return VocabShard(mesh.get_group(dim), min(mesh.get_local_rank(dim) * width, vocab), vocab, min(width, vocab))


def spread_source(hidden: Any, weight: Any, bias: Any, **options: Any) -> Linear:
    """A head whose tensors share one mesh: rows split over some dimensions, the vocabulary over at most one.

    Only for weights that the caller declares to be placed this way, since a piece of an FSDP parameter looks the same.
    Losses cover the local rows.
    """
    mesh, rows = weight.device_mesh, hidden.ndim - 1
    pairs = list(zip(hidden.placements, weight.placements, strict=False))
    cuts_rows = [isinstance(h, Shard) and h.dim % hidden.ndim < rows and w.is_replicate() for h, w in pairs]
    cuts_columns = [h.is_replicate() and isinstance(w, Shard) and w.dim == 0 for h, w in pairs]
    cuts_nothing = [h.is_replicate() and w.is_replicate() for h, w in pairs]
    known = all(map(any, zip(cuts_rows, cuts_columns, cuts_nothing, strict=True)))
    if hidden.device_mesh != mesh or not known or sum(cuts_columns) > 1:
        raise ValueError(
            f"hidden: a DTensor placed {tuple(hidden.placements)} on {hidden.device_mesh}, with a weight placed "
            f"{tuple(weight.placements)} on {mesh}; wanted one mesh, over each dimension of which rows are cut, or "
            f"the vocabulary (one dimension), or nothing"
        )
    shard, of_hidden, of_weight = None, list(hidden.placements), list(weight.placements)  # placements of gradients
    for dim in range(mesh.ndim):
        if cuts_columns[dim]:
            shard = dataclasses.replace(shard_of(mesh, weight.shape[0], options.get("vocab"), dim), partial_hidden=True)
            of_hidden[dim] = Partial()  # vocabulary split: each rank has part of the gradient of hidden
        elif cuts_rows[dim]:
            of_weight[dim] = Partial()  # rows split: each rank has part of the gradient of the weight
    local = lambda x: x.to_local(grad_placements=of_weight) if isinstance(x, DTensor) else x
    return Linear(hidden.to_local(grad_placements=of_hidden), local(weight), local(bias), shard=shard, **options)


def sharded_source(hidden: Any, module: Any, leading: tuple[int, ...] | None, **options: Any) -> Linear:
    """The source of a head that `HeadParallel` sharded: local tensors and the shard.  `leading`: the targets' shape."""
    mesh, layout = module.parallel
    if options.get("weight_grad_into") is not None:
        raise ValueError(
            f"weight_grad_into={options['weight_grad_into']!r}: under HeadParallel the weight is a DTensor, whose "
            f"gradient autograd has to place; use None"
        )
    if not isinstance(hidden, DTensor) and isinstance(layout, Shard) and leading is not None:
        dim = layout.dim % hidden.ndim
        if dim < len(leading) and hidden.shape[dim] * mesh.size() != leading[dim]:
            raise ValueError(
                f"hidden: this rank has {hidden.shape[dim]} of the targets' {leading[dim]} positions, but the parts of "
                f"{mesh.size()} ranks have to be of one size; pad the sequences, or pass hidden as a DTensor, which "
                f"knows its whole shape"
            )
    shard = shard_of(mesh, module.weight.shape[0], options.get("vocab"))
    if isinstance(hidden, DTensor) or not layout.is_replicate():
        if not isinstance(hidden, DTensor):
            hidden = DTensor.from_local(hidden, mesh, [layout], run_check=False)
        whole = hidden.redistribute(mesh, [Replicate()])
        # The gradient stays partial: redistribute's backward reduces or reduce-scatters it.
        hidden = whole.to_local(grad_placements=[Partial()])
        shard = dataclasses.replace(shard, partial_hidden=True)
    bias = None if module.bias is None else module.bias.to_local()
    return Linear(hidden, module.weight.to_local(), bias, shard=shard, **options)


def sharded_logits(hidden: Any, module: Any) -> Tensor:
    """All logits of a head that `HeadParallel` sharded."""
    mesh, layout = module.parallel
    if not isinstance(hidden, DTensor):
        hidden = DTensor.from_local(hidden, mesh, [layout], run_check=False)
    logits: Any = nn.functional.linear(hidden.redistribute(mesh, [Replicate()]), module.weight, module.bias)
    return logits.redistribute(mesh, [Replicate()]).to_local()
