"""A head's own products where the vocabulary lies on several ranks: against float64 on one.

Under the interpreter with tiny tiles and, where there is a Hopper GPU, on that, which all ranks share.
"""

import itertools

import pytest
import torch
import torch.distributed as dist
from interpreting import INSIDE, quicken, rerun
from spawn import Calls, Ranks
from test_settled_ranks import Kernels

import headloss as hl
from headloss.losses import cross_entropy, entropy_bonus, grpo, gspo, z_loss

pytest.importorskip("triton")
from headloss.backends.triton import product, product_ranks

if not product.TESTED:
    pytest.skip("the products need triton 3.6", allow_module_level=True)
GPU = torch.cuda.is_available() and product.able(torch.device("cuda"))
ROWS, VOCAB, WIDTH, DEVICE = (368, 1400, 64, "cuda") if GPU else (23, 70, 16, "cpu")
ROW = {"ce": cross_entropy, "z": hl.Term(z_loss, weight=1e-2), "rl": grpo, "metrics": ["entropy", "accuracy"]}
MOVED = {**ROW, "h": hl.Term(entropy_bonus, weight=0.1)}  # entropy has a gradient
SEGMENT = {"rl": hl.Term(gspo, reduction="seq_mean_token_mean")}
BATCH = {"it": lambda logprob, advantage, old_logprob: -logprob * advantage / (1 - (logprob.exp() * old_logprob).sum())}
FEW = 16 * 140 * (ROWS // 23) * (VOCAB // 70)  # bytes, for several chunks of two ranks' columns
CASES = {  # terms, whether the second rank and later ones have columns, and options
    "rows, one rank has every column": (ROW, False, {}),
    "rows that are left out on the device, in chunks": (MOVED, True, {"memory": FEW, "host_read": False}),
    "segments, into weight.grad": (SEGMENT, True, {"weight_grad_into": "grad"}),
    "segments in chunks, into weight.grad": (SEGMENT, True, {"weight_grad_into": "grad", "memory": FEW}),
    "rows that all meet, read again for the gradient": (BATCH, True, {"memory": FEW}),
}


@pytest.mark.timeout(600)
@pytest.mark.skipif(INSIDE or GPU, reason="this is the other process, or there is a GPU")
def test_under_the_interpreter():
    rerun(__file__, "-W", "ignore::RuntimeWarning")


def small():
    """CPU tensors are a Hopper GPU's, and tiles are small."""
    quicken()
    product.PRETEND = True
    product.TILE, product.READ = product.Tile(16, 32, 16, 2, 4, 2, 1), product.Tile(16, 32, 16, 2, 4, 2, 2)
    product.NUMBERED, product.SORTED = {"B": 8, "R": 16}, {"B": 4, "R": 8}


def run(terms, held, shard, dtype, memory="1GiB", host_read=True, weight_grad_into=None):
    """Loss, log-probabilities, metrics and gradients of these columns."""
    torch.manual_seed(5)
    hidden, weight = torch.randn(ROWS, WIDTH).bfloat16(), (torch.randn(VOCAB, WIDTH) / 2).bfloat16()
    targets = torch.randint(VOCAB, (ROWS,))
    targets[3::6] = -100
    hidden[7] *= 40  # the maximum of one shard is far below another's
    inputs = {"advantage": torch.randn(ROWS), "old_logprob": torch.randn(ROWS) - 4}
    inputs["advantage"][5::4] = 0
    inputs = {name: x.to(DEVICE) for name, x in inputs.items()}
    lengths = torch.tensor([0, 6, 12, 17, 23], device=DEVICE) * (ROWS // 23)
    call = {"segments": hl.Segments.from_cu_seqlens(lengths)} if terms is SEGMENT else {}
    hidden, weight = (x.to(DEVICE, dtype).requires_grad_() for x in (hidden, weight[held].clone()))
    source = hl.Linear(hidden, weight, memory=memory, shard=shard, weight_grad_into=weight_grad_into)
    objective = hl.Objective(**terms, backend="triton" if dtype == torch.bfloat16 else "torch")
    out = objective(source, targets.to(DEVICE), **inputs, **call, host_read=host_read)
    out.loss.backward()
    metrics = {name: float(x) for name, x in out.metrics.items()}
    if terms is ROW:
        metrics |= {f"argmax of row {i}": int(x) for i, x in enumerate(out.facts.argmax) if targets[i] >= 0}
    found = out.loss, out.facts.logprob, hidden.grad, weight.grad
    return metrics, *(x.detach().cpu() for x in found)


def columns(size, shared):
    """How many each rank has."""
    return [*[VOCAB // size] * (size - 1), VOCAB - VOCAB // size * (size - 1)] if shared else [VOCAB, *[0] * (size - 1)]


def on_rank(name):
    product.SMALLEST = 0
    if DEVICE == "cpu":
        small()
    terms, shared, options = CASES[name]
    rank, held, read, reads = dist.get_rank(), columns(dist.get_world_size(), shared), product_ranks.read, []
    start = sum(held[:rank])
    shard = hl.VocabShard(dist.group.WORLD, start, VOCAB, width=max(held))
    product_ranks.read = lambda *call, **more: reads.append(len(call[0])) or read(*call, **more)
    try:
        with Calls() as calls, Kernels() as seen:
            options = options | {"memory": fewer(options["memory"])} if "memory" in options else options
            found = run(terms, slice(start, start + held[rank]), shard, torch.bfloat16, **options)
            return found, reads, calls.count, seen["settle_kernel"]
    finally:
        product_ranks.read = read


def fewer(memory):
    """As many chunks of the columns of more than two ranks."""
    return memory * 2 // dist.get_world_size()


def facts(held, shard, **options):
    """Of these columns, by `row_facts` and by a call that makes a gradient."""
    torch.manual_seed(6)
    hidden, weight = torch.randn(ROWS, WIDTH).bfloat16(), (torch.randn(VOCAB, WIDTH) / 2).bfloat16()
    targets = torch.randint(VOCAB, (ROWS,))
    hidden[: ROWS // 2] = 9 * weight[targets[: ROWS // 2]]  # p within 1e-6 of 1
    targets[3::6] = -100
    hidden, weight, targets = hidden.to(DEVICE).requires_grad_(), weight[held].clone().to(DEVICE), targets.to(DEVICE)
    source = hl.Linear(hidden, weight, shard=shard, **options)
    known = hl.row_facts(source, targets, want=("logprob", "lse", "entropy", "argmax"), backend="triton")
    out = hl.Objective(ce=cross_entropy, metrics=["entropy"], backend="triton")(source, targets)
    out.loss.backward()
    found = known.logprob, known.lse, known.entropy, known.argmax, out.facts.logprob, out.facts.entropy, out.loss
    return [x.detach().cpu() for x in found]


def cut_at_tiles(size):
    """Where each rank's columns begin, and where the last ones end."""
    tiles = -(-VOCAB // product.READ.columns)
    return [*(min(i * tiles // size, tiles) * product.READ.columns for i in range(size)), VOCAB]


def bits_on_rank(options):
    product.SMALLEST = 0
    if DEVICE == "cpu":
        small()
    cuts, rank = cut_at_tiles(dist.get_world_size()), dist.get_rank()
    width = max(b - a for a, b in itertools.pairwise(cuts))
    shard = hl.VocabShard(dist.group.WORLD, cuts[rank], VOCAB, width=width)
    return facts(slice(cuts[rank], cuts[rank + 1]), shard, **options)


@pytest.mark.skipif(not INSIDE and not GPU, reason="runs under the interpreter, in a process of its own")
@pytest.mark.parametrize("size", [2, 4] if GPU else [2])
def test_ranks_share_a_vocabulary(size):
    ranks = Ranks(size)
    try:
        for name, (terms, shared, options) in CASES.items():
            more = {"host_read": options.get("host_read", True)}
            metrics, loss, logprob, dhidden, dweight = run(terms, slice(0, VOCAB), None, torch.float64, **more)
            of_ranks = dweight.split(columns(size, shared))
            for found, own_dweight in zip(ranks.run(on_rank, name), of_ranks, strict=True):
                (measured, our_loss, our_logprob, *grads), reads, collectives, settled = found
                torch.testing.assert_close(our_loss.double(), loss, rtol=1e-4, atol=1e-5, msg=name)
                torch.testing.assert_close(our_logprob.double(), logprob, rtol=1e-4, atol=1e-4, msg=name)
                assert measured == pytest.approx(metrics, rel=2e-3, abs=1e-5), name
                for x, y in zip(grads, (dhidden, own_dweight), strict=True):
                    apart = float((x.double() - y).norm())
                    assert x.shape == y.shape and apart <= 1.5e-2 * float(y.norm()), name  # bf16 may be cut off here
                assert (len(reads) > 1) == ("memory" in options), name
                gathers = 1 if terms is BATCH else len(reads)
                assert collectives == {"all_gather": gathers, "all_reduce": 1}, name
                assert settled == (0 if terms is BATCH else len(reads)), name  # in torch; else once per chunk
        if DEVICE == "cpu":
            small()
        product.SMALLEST = 0
        whole = facts(slice(0, VOCAB), None)
        assert whole[0][whole[0] < 0].max() > -1e-6
        for options in ({}, {"memory": FEW}):  # to the bit, in any chunks
            for found in ranks.run(bits_on_rank, options):
                assert all(map(torch.equal, found[:-1], whole[:-1]))
                torch.testing.assert_close(found[-1], whole[-1])
    finally:
        ranks.stop()
