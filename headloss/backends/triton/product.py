"""The head's matrix products on Hopper: the first also takes the sums behind the facts, the others apply row factors.

Dimension key:  C rows of a chunk   V columns of this rank   D hidden size   F numbers per row

    read     the sums of each row of a chunk and, if asked, e = exp(s - reference) of all its logits
    write    dX = f (E W) + y W[target] + c sum_j W_j         dW = E^T (f X) + scatter of y X + sum_n c_n X_n

where the gradient of a row by its logits is a p_j + c + y 1[j = target], and f = a / sum_j e_j.  E is the only matrix
of rows x vocabulary, and only the products read and write it.  Entropy and sum_p2 add p_j (b log p_j + e p_j): then one
sweep turns E into the gradient in place, and f is 1.  Rows that are ignored, and rows whose coefficients are all 0, are
skipped by counts on the device, which the host does not know.

One tile size serves every shape; a tile's sums are relative to its own maximum and are merged in one fixed tree.  So
the sums of a row depend on that row and the weight alone, to the bit.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
import triton  # type: ignore
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor  # type: ignore

from headloss.backends.triton.kernels import product_records as records
from headloss.backends.triton.kernels.product import hidden_kernel, read_kernel, repair_kernel, weight_kernel
from headloss.backends.triton.kernels.product_grads import (
    bend_kernel,
    blank_kernel,
    factor_kernel,
    live_kernel,
    move_kernel,
    rank_kernel,
    scatter_kernel,
    total_kernel,
)
from headloss.backends.triton.kernels.product_rows import finish_kernel, gather_kernel, merge_kernel, order_kernel
from headloss.backends.triton.launch import launch_kernel
from headloss.backends.triton.sweeps import named
from headloss.backends.triton.tiles import chains, multiprocessors, plain_temperature
from headloss.facts import Pull, Want


class Tile(NamedTuple):
    rows: int
    columns: int
    depth: int
    group: int
    warps: int
    stages: int
    programs: int  # per multiprocessor


# On an H200 the gradients' products take 0.98 to 1.04 of cuBLAS's time, the first, if it stores no e, 0.99 to 1.06.  It
# sums READ.columns columns at once, whichever of its tiles it takes, so the bits are the same.  WIDE loads less and is
# faster from WIDE_FROM hidden features on; with fewer, one of READ's two programs multiplies while the other sums.
TILE = Tile(128, 256, 64, 8, 8, 3, 1)
READ, WIDE, WIDE_FROM = Tile(128, 128, 64, 32, 4, 3, 2), TILE._replace(group=16), 2048
LEVELS = 5  # levels of the tree that one launch merges
NUMBERED, SORTED = {"B": 256, "R": 4096}, {"B": 32, "R": 256}  # rows of a program, and rows that it reads at a time
TESTED = tuple(int(x) for x in triton.__version__.split(".")[:2]) >= (3, 6)  # versions that descriptors were tried with
SMALLEST = 1 << 20  # elements of a weight: below, launches cost more than products, and cuBLAS needs fewer
PRETEND = False  # in tests: take CPU tensors under the interpreter for a Hopper GPU's


class Gathered(NamedTuple):
    """The rows of a chunk that count, indexed by their places among those: each (C,) or longer."""

    hidden: Tensor
    listed: Tensor | None  # the row of the chunk at each place
    live: Tensor  # how many places are taken
    targets: Tensor  # columns of this rank; -1: none
    numbers: tuple[Tensor, ...]  # multiplier, target's logit, reference, lse, log p of the target, largest other logit
    has_target: bool


class Read(NamedTuple):
    """What `read` leaves for `write`."""

    rows: Gathered
    sums: Tensor  # (F, C), indexed by the rows of the chunk
    e: Tensor | None
    far: Tensor

    def without_hidden(self) -> Read:
        """The same without hidden states, for rows whose gradient is not needed."""
        return self._replace(rows=self.rows._replace(hidden=self.sums))


def able(device: torch.device) -> bool:
    """Whether the products run on this device."""
    if device.type != "cuda":
        return PRETEND and triton.knobs.runtime.interpret
    return TESTED and torch.version.hip is None and _is_hopper(device)


@functools.cache
def _is_hopper(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device)[0] == 9


def fits(x: Tensor) -> bool:
    """Whether a matrix can be read tile by tile: bf16, rows of whole 16-byte vectors."""
    in_vectors = x.stride(-1) == 1 and x.stride(0) % 8 == x.shape[-1] % 8 == 0 and x.data_ptr() % 16 == 0
    return x.dtype == torch.bfloat16 and in_vectors and min(x.shape) > 0


def adds(x: Tensor) -> bool:
    """Whether the kernel of the weight's gradient can add to this matrix directly."""
    in_vectors = x.is_contiguous() and x.stride(0) * x.element_size() % 16 == 0 and x.data_ptr() % 16 == 0
    return x.dtype in (torch.bfloat16, torch.float32) and in_vectors


def read(
    hidden_CD: Tensor,
    weight_VD: Tensor,
    target_C: Tensor | None,
    want: Want,
    temperature: float | Tensor,
    *,
    scale: float = 1.0,
    ignore: bool = False,
    store: Tensor | None = None,
) -> Read:
    """The sums of each row, and E in `store` (rows rounded up to whole tiles, V) if one is given.

    `ignore`: rows with target -100 are skipped, and their sums are 0.
    """
    given = plain_temperature(temperature)
    rows = gather(hidden_CD, weight_VD, target_C, given, scale=scale, ignore=ignore)
    tiles = tile_sums(rows, weight_VD, want, store=store)
    merge(tiles, rows.live, want)
    return finish(rows, tiles, want, given, rows=len(hidden_CD), columns=len(weight_VD), store=store)


def gather(
    hidden_CD: Tensor,
    weight_VD: Tensor,
    target_C: Tensor | None,
    temperature: float | Tensor,
    *,
    scale: float,
    start: int = 0,
    ignore: bool,
) -> Gathered:
    """`start`: the first column of this rank.  Without columns, only the places of rows are computed."""
    (C, D), V, device = hidden_CD.shape, len(weight_VD), hidden_CD.device
    target_C, high = None if target_C is None else target_C.contiguous(), -(-C // TILE.rows) * TILE.rows
    listed, live, x_CD = None, torch.empty(1, dtype=torch.int32, device=device), hidden_CD
    if ignore and target_C is not None:
        listed = torch.empty(C, dtype=torch.int32, device=device)
        launch_kernel(order_kernel, triton.cdiv(C, NUMBERED["B"]), target_C, listed, live, C, **NUMBERED, num_warps=8)
    targets = torch.empty(high, dtype=torch.int32, device=device)
    numbers = torch.empty(6, high, dtype=torch.float32, device=device).unbind()
    has_target = target_C is not None  # even if no fact needs it: what is asked for must not change the bits of facts
    if not V:
        live = live if listed is not None else live.fill_(C)
        return Gathered(x_CD, listed, live, targets.fill_(-1), numbers, has_target)
    if listed is not None:
        x_CD = torch.empty(high, D, dtype=hidden_CD.dtype, device=device)
    few, copied = min(1024, triton.next_power_of_2(D)), listed is not None
    flags = records.GatherFlags(copied, has_target, isinstance(temperature, Tensor), copied, TILE.rows, few)
    launch_kernel(
        gather_kernel, high,
        records.GatherAt(hidden_CD, weight_VD, x_CD, targets, *numbers[:3]), listed, live, target_C, temperature,
        float(scale), C, V, D, start, hidden_CD.stride(0), weight_VD.stride(0), F=flags, num_warps=4,
    )  # fmt: skip
    return Gathered(x_CD, listed, live, targets, numbers, has_target)


def tile_sums(rows: Gathered, weight_VD: Tensor, want: Want, *, start: int = 0, store: Tensor | None) -> Tensor:
    """(fields, tiles, places): run the first product, which leaves the sums of each tile's rows."""
    (V, D), device = weight_VD.shape, weight_VD.device
    most, high, tiles = WIDE if D >= WIDE_FROM else READ, len(rows.targets), -(-V // READ.columns)
    whole = V // most.columns
    done = whole * (most.columns // READ.columns)
    parts = torch.empty(2 + sum(sums_of(want)), tiles, high, dtype=torch.float32, device=device)
    multiplier, _, reference, *_ = rows.numbers
    flags = {"STORE": store is not None, "TARGET": rows.has_target, **sums_of(want)._asdict()}
    for T, first, wide in ((most, 0, whole), (READ, done, tiles - done)):  # the rest alone: masks cost 6% at D = 1024
        if wide:
            launch_kernel(
                read_kernel, T.programs * multiprocessors(device),
                _blocks(rows.hidden, T.rows, T.depth), _blocks(weight_VD, T.columns, T.depth),
                None if store is None else _blocks(store, T.rows, READ.columns // 2),
                rows.live, records.ReadAt(rows.targets, multiplier, reference), parts,
                V, D, high, start, first, wide, tiles,
                F=_tile(T, device, RAGGED=first == done, PIECES=T.columns // READ.columns, **flags), **_launch(T),
            )  # fmt: skip
    return parts


def merge(parts: Tensor, live: Tensor, want: Want, first: int | None = None) -> None:
    """Merge the sums of tiles in one tree, in place: all of them into the first.

    `first`: the index of the first, if these are some tiles of more; then whole groups of 2^LEVELS merge, and of such.
    """
    _, tiles, high = parts.shape
    step = 1
    while step < tiles:
        size, begin = step << LEVELS, 0
        groups = -(-tiles // size)
        if first is not None:
            begin = -first % size
            groups = max(0, tiles - begin) // size
        if groups:
            launch_kernel(
                merge_kernel, triton.cdiv(high, 128) * groups, parts, live, tiles, high, step, begin, groups,
                F=sums_of(want), LEVELS=LEVELS, B=128, num_warps=4,
            )  # fmt: skip
        step = size


def finish(
    gathered: Gathered,
    parts: Tensor,
    want: Want,
    temperature: float | Tensor,
    *,
    rows: int,
    columns: int,
    store: Tensor | None = None,
    whole: bool = True,
) -> Read:
    """The sums of each row from those of all its tiles, with the targets included again.

    `whole`: these are all the columns; if not, only what E needs of the sums is right.
    """
    (_, tiles, high), device = parts.shape, parts.device
    sums = torch.empty(_slots(want), rows, dtype=torch.float32, device=device)
    far = torch.empty(high // TILE.rows, dtype=torch.int32, device=device)
    _, logit, reference, lse, logprob, top = gathered.numbers
    how = records.FinishFlags(
        gathered.listed is not None, gathered.has_target, want.target, isinstance(temperature, Tensor),
        store is not None, whole and all(f.name != "max_logprob" for f in want.facts), TILE.rows,
    )  # fmt: skip
    launch_kernel(
        finish_kernel, high // TILE.rows,
        records.FinishAt(parts, gathered.targets, logit, reference, sums, lse, logprob, top, far), gathered.listed,
        gathered.live, temperature, tiles, high, rows, columns, SUMS=sums_of(want), F=how, num_warps=4,
    )  # fmt: skip
    return Read(gathered, sums, store, far)


def _slots(want: Want) -> int:
    return 1 + want.target + 2 * want.total + want.argmax + 1 + want.sums("X") + want.sums("Q")


def sums_of(want: Want) -> records.TileFlags:
    """Which sums the tiles take besides S, whose bits do not depend on the others."""
    return records.TileFlags(want.sums("X"), want.sums("Q"), want.total, want.argmax)


def write(
    read: Read,
    hidden_CD: Tensor,
    weight_VD: Tensor,
    pull: Pull,
    *,
    dhidden_CD: Tensor | None,
    dweight_VD: Tensor | None,
    add: bool = False,
) -> None:
    """The gradients, from the coefficients of each row of the chunk; `add`: dW to `dweight_VD`.

    E is used up: its rows move or are overwritten.  Until `dhidden_CD` is written, it holds X times row factors.
    """
    assert read.e is not None
    (C, D), V, device = hidden_CD.shape, len(weight_VD), hidden_CD.device
    T, programs, rows, high = TILE, TILE.programs * multiprocessors(device), read.rows, len(read.rows.targets)
    pulls = [None if x is None else x.to(torch.float32).contiguous() for x in pull]
    given = records.PulledFlags(*(x is not None for x in (*pulls, rows.listed)))
    bent = given.B or given.E
    multiplier, _, reference, lse, logprob, top = rows.numbers
    counts, tiles, gaps, sources, ranks = torch.empty(5, high, dtype=torch.int32, device=device).unbind()
    launch_kernel(
        live_kernel, triton.cdiv(C, NUMBERED["B"]),
        rows.live, rows.listed, *pulls, records.LiveAt(read.far, counts, tiles, gaps, sources, ranks),
        F=given, BM=T.rows, **NUMBERED, num_warps=8,
    )  # fmt: skip
    tile = _tile(T, device, TARGET=rows.has_target)
    launch_kernel(
        repair_kernel, programs,
        _blocks(rows.hidden, T.rows, T.depth), _blocks(weight_VD, T.columns, T.depth),
        _blocks(read.e, T.rows, T.columns // 2), rows.live, counts[2:], tiles,
        records.ReadAt(rows.targets, multiplier, reference), V, D, F=tile, **_launch(T),
    )  # fmt: skip
    launch_kernel(
        move_kernel, 8 * programs, read.e, counts, gaps, sources, read.e.stride(0),
        PROGRAMS=8 * programs, B=8192, num_warps=8,
    )  # fmt: skip
    work_XC = torch.empty(8 if bent else 3, high, dtype=torch.float32, device=device)
    (factors, shares, constants), bends = work_XC[:3], work_XC[3:] if bent else work_XC
    numbers, columns = (torch.empty(n, dtype=torch.int32, device=device) for n in (high, C))
    scaled_CD = None
    if dweight_VD is not None:
        usable = dhidden_CD is not None and fits(dhidden_CD)
        scaled_CD = dhidden_CD if usable else torch.empty(C, D, dtype=hidden_CD.dtype, device=device)
    BD = min(1024, triton.next_power_of_2(D))
    launch_kernel(
        factor_kernel, C,
        records.FactorAt(
            hidden_CD, counts, gaps, ranks, rows.targets, multiplier, reference, lse, logprob, top, factors,
            bends, shares, constants, numbers, columns,
        ),
        rows.listed, rows.live, *pulls, scaled_CD, D, hidden_CD.stride(0),
        0 if scaled_CD is None else scaled_CD.stride(0), F=given, TARGET=rows.has_target,
        SCALED=scaled_CD is not None, BK=T.depth, BD=BD, num_warps=4,
    )  # fmt: skip
    if bent:
        launch_kernel(
            bend_kernel, 8 * programs, read.e, bends, counts, read.e.stride(0),
            PROGRAMS=8 * programs, B=4096, SQUARE=given.E, num_warps=8,
        )  # fmt: skip
    constant, overlap = given.C, chains(device)
    chained = {"OVERLAP": overlap, **({"launch_pdl": True} if overlap else {})}
    keys, order = torch.empty_like(columns), torch.empty_like(columns)
    if dweight_VD is not None and scaled_CD is not None:
        total = None
        if constant:
            total = torch.empty(D, dtype=torch.float32, device=device)
            launch_kernel(
                total_kernel, triton.cdiv(D, 128), hidden_CD, numbers, constants, counts, total, D, hidden_CD.stride(0),
                R=32, BD=128, num_warps=4,
            )  # fmt: skip
        pieces = 2 if dweight_VD.element_size() == 2 else 4  # what is stored at once must fit next to the operands
        launch_kernel(
            weight_kernel, programs,
            _blocks(read.e, T.depth, T.rows), _blocks(scaled_CD, T.depth, T.columns),
            _blocks(dweight_VD, T.rows, T.columns // pieces), total, counts, V, D,
            F=_tile(T, device, ADD=add, CONSTANT=constant, PARTS=pieces, OVERLAP=overlap), **_launch(T),
        )  # fmt: skip
        if rows.has_target:
            launch_kernel(
                rank_kernel, triton.cdiv(C, SORTED["B"]) + overlap, columns, keys, order, C,
                **SORTED, **chained, num_warps=4,
            )  # fmt: skip
    if dhidden_CD is not None:
        total = weight_VD.sum(0, dtype=torch.float32) if constant else None
        launch_kernel(
            hidden_kernel, programs,
            _blocks(read.e, T.rows, T.depth), _blocks(weight_VD, T.depth, T.columns),
            records.HiddenAt(dhidden_CD, factors, shares, constants, weight_VD), numbers, columns, total, counts, V, D,
            weight_VD.stride(0), dhidden_CD.stride(0),
            F=tile._replace(CONSTANT=constant, WHOLE_TILES=D % T.columns == 0, OVERLAP=overlap), **_launch(T),
        )  # fmt: skip
        launch_kernel(
            blank_kernel, C + overlap, rows.live, rows.listed, *pulls, dhidden_CD, D, dhidden_CD.stride(0),
            F=given, BD=BD, **chained, num_warps=4,
        )  # fmt: skip
    if dweight_VD is not None and rows.has_target:
        chained = chained if dhidden_CD is not None else {"OVERLAP": False}  # after `rank`, which it needs
        launch_kernel(
            scatter_kernel, C * triton.cdiv(D, 1024) + chained["OVERLAP"],
            keys, order, numbers, shares, hidden_CD, dweight_VD, C, V, D, hidden_CD.stride(0), dweight_VD.stride(0),
            R=4, BD=1024, **chained, num_warps=4,
        )  # fmt: skip


partial = named  # the sums of rows by name, as one part that covers the whole vocabulary


def grad_buffer(read: Read, rows: int) -> Tensor | None:
    """A buffer for the gradient of that many rows: the copy of the rows that count, if it was made of as many."""
    copy = read.rows.hidden
    return copy[:rows] if read.rows.listed is not None and len(read.rows.listed) == rows else None


def chunk(rows: int, columns: int, device: torch.device) -> Tensor:
    """A buffer for E of that many rows: whole tiles of rows, each row aligned to 16 bytes."""
    high, wide = -(-rows // TILE.rows) * TILE.rows, -(-columns // 64) * 64
    return torch.empty(high, wide, dtype=torch.bfloat16, device=device)[:, :columns]


def _blocks(x: Tensor, rows: int, columns: int) -> Any:
    """A tensor descriptor of tiles.  Triton checks each new one; another of the same layout is a copy of it."""
    fields = _checked(x.shape, x.stride(), x.dtype, x.data_ptr() & 15, rows, columns)
    if not fields:
        made = TensorDescriptor(x, list(x.shape), list(x.stride()), [rows, columns])
        fields.update(made.__dict__, base=None)
    else:
        made = object.__new__(TensorDescriptor)
        made.__dict__.update(fields, base=x)
    return made


@functools.lru_cache(256)
def _checked(*layout: Any) -> dict[str, Any]:
    """The fields of a descriptor with this layout, except the matrix; empty until there is one."""
    return {}


def _tile(T: Tile, device: torch.device, **flags: Any) -> records.ProductFlags:
    return records.ProductFlags(T.rows, T.columns, T.depth, T.programs * multiprocessors(device), T.group, **flags)


def _launch(T: Tile) -> dict[str, Any]:
    return {"num_warps": T.warps, "num_stages": T.stages}
