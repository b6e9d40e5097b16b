"""The head's own products under Triton's interpreter: against float64, and bit for bit against themselves."""

import itertools

import pytest
import torch
from interpreting import INSIDE, inside, interpreted

from headloss.facts import Fact, Pull, Want, finish

pytest.importorskip("triton")
from headloss.backends.triton import product, product_ranks

if not product.TESTED:
    pytest.skip("the products need triton 3.6", allow_module_level=True)
ALL = ("lse", "logprob", "mean_logprob", "entropy", "sum_p2", "argmax")


# numpy says that 2^-x overflows where the result is not used
test_under_the_interpreter = interpreted(__file__, "-W", "ignore::RuntimeWarning")


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    monkeypatch.setattr(product, "TILE", product.Tile(16, 32, 16, 2, 4, 2, 1))
    monkeypatch.setattr(product, "READ", product.Tile(16, 32, 16, 2, 4, 2, 2))
    monkeypatch.setattr(product, "WIDE", product.Tile(16, 64, 16, 2, 4, 2, 1))
    monkeypatch.setattr(product, "NUMBERED", {"B": 8, "R": 16})
    monkeypatch.setattr(product, "SORTED", {"B": 4, "R": 8})
    monkeypatch.setattr(product, "LEVELS", 1)


class Case:
    """Some rows, some of them ignored, and what float64 says of them."""

    def __init__(self, rows=37, vocab=70, width=24, *, ignored=True, temperature=1.0, scale=1.0, facts=ALL):
        self.hidden = torch.randn(rows, width).bfloat16()
        self.weight = (torch.randn(vocab, width) * 2 / width**0.5).bfloat16()
        self.target = torch.randint(vocab, (rows,))
        self.target[2::5] = -100 if ignored else 0
        self.temperature, self.scale, self.want, self.ignored = (
            temperature,
            scale,
            Want(list(map(Fact, facts))),
            ignored,
        )

    @property
    def counts(self):
        return self.target >= 0

    def read(self, store=True, rows=slice(None), **more):
        vocab = len(self.weight)
        e = product.chunk(len(self.hidden[rows]), vocab, self.hidden.device).fill_(torch.nan) if store else None
        T = self.temperature[rows] if isinstance(self.temperature, torch.Tensor) else self.temperature
        how = {"scale": self.scale, "ignore": self.ignored, "store": e, **more}
        return product.read(self.hidden[rows], self.weight, self.target[rows], self.want, T, **how)

    def facts(self, found):
        facts, _ = finish(product.partial(found.sums, self.want), self.want, [self.temperature], len(self.weight))
        return {f.name: x for f, x in facts.items()}

    def logprobs(self):
        T = self.temperature.double()[:, None] if isinstance(self.temperature, torch.Tensor) else self.temperature
        s = self.scale * (self.hidden.double() @ self.weight.double().t()) / T
        return s, s.log_softmax(-1)

    def truth(self):
        s, log_p = self.logprobs()
        p = log_p.exp()
        return {
            "lse": s.logsumexp(-1), "logprob": log_p.gather(1, self.target.clamp(min=0)[:, None])[:, 0],
            "mean_logprob": log_p.mean(-1), "entropy": -(p * log_p).sum(-1), "sum_p2": (p * p).sum(-1),
            "max_logprob": log_p.amax(-1), "argmax": s.argmax(-1),
        }  # fmt: skip

    def check(self, found, within=2e-6):
        for name, x in self.facts(found).items():
            true = self.truth()[name]
            torch.testing.assert_close(x.double()[self.counts], true.double()[self.counts], rtol=within, atol=within)

    def gradients(self, a, c, y, b=None, e=None):
        """In float64."""
        _, log_p = self.logprobs()
        a, b, e, c = (0 if x is None else x.double()[:, None] for x in (a, b, e, c))
        grad = log_p.exp() * (a + b * log_p + e * log_p.exp()) + c
        grad[torch.arange(len(grad)), self.target.clamp(min=0)] += y.double()
        grad[~self.counts] = 0
        T = self.temperature[:, None] if isinstance(self.temperature, torch.Tensor) else self.temperature
        grad = grad * self.scale / T
        return grad @ self.weight.double(), grad.t() @ self.hidden.double()

    def write(self, found, a, c, y, b=None, e=None, **more):
        into = {"dhidden_CD": torch.full_like(self.hidden, torch.nan)}
        into |= {"dweight_VD": torch.full(self.weight.shape, torch.nan), **more}
        product.write(found, self.hidden, self.weight, Pull(a, b, e, c, y), **into)
        return into["dhidden_CD"], into["dweight_VD"]


def apart(x, true):
    return float((x.double() - true).norm() / true.norm())


CASES = {
    "ignored rows, a last tile that is not full": {},
    "scaled, a temperature": {"scale": 2.0, "temperature": 0.5, "ignored": False, "vocab": 64},
    "a temperature per row": {"temperature": torch.linspace(0.5, 2, 37), "vocab": 33},
    "the maximum": {"facts": ("lse", "logprob", "max_logprob", "entropy")},
}


@inside
@pytest.mark.parametrize("name", CASES)
def test_facts_and_gradients_are_those_of_float64(name):
    case = Case(**CASES[name])
    if not case.ignored:
        case.target[8:] = 7  # a frequent one: more rows than are added up at a time
    found = case.read()
    case.check(found)
    plain, case.target = case.target, torch.stack([case.target, case.target.flip(0)], 1)[:, 0]
    assert torch.equal(case.read().sums, found.sums)  # targets with gaps
    case.target = plain
    a, y, c = torch.randn(3, 37)
    c = c / 8 if name != "the maximum" else None
    for x in (a, y, c):
        if x is not None:
            x[::3] = 0  # rows without a gradient
    dhidden, dweight = case.write(found, a, c, y)
    true_hidden, true_weight = case.gradients(a, c, y)
    assert apart(dhidden, true_hidden) < 6e-3  # the interpreter cuts bf16 off where devices round
    assert apart(dweight, true_weight) < 5e-3
    assert torch.equal(dhidden[~case.counts], torch.zeros_like(dhidden[~case.counts]))
    assert torch.equal(dhidden[::3], torch.zeros_like(dhidden[::3]))


@inside
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("given", ["b", "e", "be", "abecy"])
def test_gradients_of_entropy_and_sum_p2_are_those_of_float64(name, given):
    case = Case(**CASES[name])
    case.hidden[5] *= 60  # most of its columns are 0 in E
    case.hidden[11] *= -60  # its target is far below the maximum
    found = case.read()
    k = {x: torch.randn(37) for x in given}
    for x in k.values():
        x[::3] = 0  # rows without a gradient
    k = {"a": None, "c": None, "y": torch.zeros(37), **k}
    dhidden, dweight = case.write(found, **k)
    true_hidden, true_weight = case.gradients(**k)
    assert apart(dhidden, true_hidden) < 2.5e-2  # cut off to bf16 in E and in what it becomes, where devices round
    assert apart(dweight, true_weight) < 2.5e-2
    for rows in (~case.counts, slice(None, None, 3)):
        assert torch.equal(dhidden[rows], torch.zeros_like(dhidden[rows]))


@inside
def test_the_weight_gradient_is_added_to_what_is_there():
    case = Case(facts=("logprob",))
    a, y = torch.randn(2, 37)
    there = torch.randn(case.weight.shape)
    _, dweight = case.write(case.read(), a, None, y, dweight_VD=there.clone(), add=True, dhidden_CD=None)
    assert apart(dweight - there, case.gradients(a, None, y)[1]) < 5e-3


@inside
@pytest.mark.parametrize("which", ["ignored", "dead"])
def test_no_row_at_all(which):
    case = Case(facts=("logprob",))
    a, y = torch.ones(2, 37)
    if which == "ignored":
        case.target[:] = -100
    else:
        a, y = 0 * a, 0 * y
    for x in case.write(case.read(), a, None, y):
        assert torch.equal(x, torch.zeros_like(x))


@inside
def test_confident_rows_keep_the_digits_of_their_loss():
    case = Case(ignored=False, facts=("logprob", "entropy"))
    case.hidden *= torch.linspace(1, 16, 37)[:, None].bfloat16()
    case.target = case.truth()["argmax"]
    s, _ = case.logprobs()
    others = (s - s.gather(1, case.target[:, None])).scatter(1, case.target[:, None], -torch.inf)
    found, true = case.facts(case.read()), -others.exp().sum(-1).log1p()  # log_softmax rounds near 1e-16
    assert -1e-8 < true.max() < 0
    torch.testing.assert_close(found["logprob"].double(), true, rtol=2e-4, atol=1e-30)


@inside
def test_a_target_far_below_the_maximum_is_measured_from_elsewhere():
    case = Case(ignored=False, facts=("logprob", "entropy"))
    case.hidden[5:8] *= 60
    case.target[5:8] = case.logprobs()[0][5:8].argmin(-1)
    assert case.truth()["logprob"].min() < -100
    found = case.read()
    case.check(found, within=1e-5)
    a = torch.full((37,), 0.1)
    for x, true in zip(case.write(found, a, None, -a), case.gradients(a, None, -a)):
        assert x.isfinite().all() and apart(x, true) < 6e-3


@inside
def test_a_row_has_the_same_bits_wherever_it_stands():
    case = Case(rows=40, vocab=96, ignored=False)
    whole = case.facts(case.read())
    for rows in (slice(0, 1), slice(17, 18), slice(3, 10), slice(8, 40)):
        found = case.facts(case.read(store=False, rows=rows))
        assert all(torch.equal(x, whole[name][rows]) for name, x in found.items()), rows
    case.target[torch.rand(40) < 0.4] = -100
    case.ignored = True
    found = case.facts(case.read())
    assert all(torch.equal(x[case.counts], whole[name][case.counts]) for name, x in found.items())


@inside
def test_of_equal_maxima_the_first_is_the_argmax():
    case = Case(vocab=150, facts=("argmax", "lse"))
    case.weight[:] = case.weight[0]
    found = product.read(case.hidden, case.weight, None, case.want, 1.0)
    assert torch.equal(case.facts(found)["argmax"], torch.zeros(37, dtype=torch.long))


@inside
@pytest.mark.parametrize(
    "cuts", [(64,), (96,), (32, 64, 128), (32, 64, 96, 128), (0, 96, 96), (40, 41, 100), (32, 384)]
)
def test_shards_cut_at_tiles_have_the_bits_of_one(cuts):
    """Each with a reference of its own, and the target on one of them; a shard of several groups of groups of tiles."""
    vocab = 150 if cuts[-1] < 150 else 420
    case = Case(rows=20, vocab=vocab, ignored=True, facts=("lse", "logprob", "entropy", "argmax", "mean_logprob"))
    case.target[::2] = case.truth()["argmax"][::2]
    case.target[4] = -100
    whole, ends = case.facts(case.read()), (0, *cuts, vocab)
    shards = []
    for start, end in itertools.pairwise(ends):
        store, shard = product.chunk(20, end - start, case.hidden.device), {"start": start, "vocab": vocab}
        given = case.hidden, case.weight[start:end], case.target, case.want, 1.0
        shards.append(product_ranks.read(*given, **shard, ignore=True, store=store))
    nodes = torch.stack([read.sums for read in shards])
    for read in shards:
        sums = product_ranks.across(read, nodes, case.want, 1.0, vocab)
        for name, x in case.facts(read._replace(sums=sums)).items():
            if all(cut % product.READ.columns == 0 for cut in cuts):
                assert torch.equal(x[case.counts], whole[name][case.counts]), name
            torch.testing.assert_close(x[case.counts], whole[name][case.counts], rtol=2e-6, atol=2e-6)


@inside
@pytest.mark.parametrize("vocab", [20, 64, 90, 96, 100, 128, 420])
def test_a_tile_of_two_pieces_has_the_bits_of_two_tiles(vocab, monkeypatch):
    case = Case(vocab=vocab, facts=ALL)
    narrow = case.read()
    monkeypatch.setattr(product, "WIDE_FROM", 24)
    launched, launch = [], product.launch_kernel

    def seen(kernel, *given, **how):
        if kernel is product.read_kernel:
            launched.append((how["F"].PIECES, how["F"].RAGGED))
        launch(kernel, *given, **how)

    monkeypatch.setattr(product, "launch_kernel", seen)
    wide = case.read()
    assert launched == [(2, False)] * (vocab >= 64) + [(1, True)] * (vocab % 64 > 0)
    assert torch.equal(wide.sums[:, case.counts], narrow.sums[:, case.counts])
    live = int(case.counts.sum())
    assert torch.equal(wide.e[:live, :vocab], narrow.e[:live, :vocab])


@inside
@pytest.mark.parametrize("cuts", [(64,), (20, 84)])
def test_of_equal_maxima_on_shards_the_first_is_the_argmax(cuts):
    case = Case(rows=20, vocab=150, ignored=False, facts=("argmax", "lse"))
    case.weight[:] = case.weight[0]
    given = None, case.want, 1.0  # a target's logit is summed by itself
    shards = [
        product_ranks.read(case.hidden, case.weight[start:end], *given, start=start, vocab=150)
        for start, end in itertools.pairwise((0, *cuts, 150))
    ]
    nodes = torch.stack([read.sums for read in shards])
    found = case.facts(shards[0]._replace(sums=product_ranks.across(shards[0], nodes, case.want, 1.0, 150)))
    assert torch.equal(found["argmax"], torch.zeros(20, dtype=torch.long))


def built(kernel, facts=("logprob",), *, vocab=2000, width=320, dtype=torch.bfloat16, add=False, store=True):
    """The kernel that a call on tensors without memory would launch."""
    from test_triton_compile import Built

    def call():
        empty = lambda *shape, dtype=torch.bfloat16: torch.empty(shape, dtype=dtype, device="meta")
        hidden, weight, target = empty(300, width), empty(vocab, width), empty(300, dtype=torch.int64)
        e = product.chunk(300, vocab, hidden.device) if store else None
        found = product.read(hidden, weight, target, Want(list(map(Fact, facts))), 1.0, ignore=True, store=e)
        if store:
            into = {"dhidden_CD": empty(300, width), "dweight_VD": empty(vocab, width, dtype=dtype)}
            product.write(found, hidden, weight, Pull(*[empty(300, dtype=torch.float32)] * 5), **into, add=add)

    return Built(call, kernel)


BUILDS = {
    "read": lambda: built("read_kernel", ("entropy",)),
    "read, every sum": lambda: built("read_kernel", ALL, vocab=100),  # one tile, and that is cut
    "read, nothing stored": lambda: built("read_kernel", ("entropy",), store=False),
    "read, wide": lambda: built("read_kernel", ("entropy",), width=4096),
    "read, wide, every sum": lambda: built("read_kernel", ALL, width=4096),
    "read, wide, nothing stored": lambda: built("read_kernel", ("entropy",), width=4096, store=False),
    "repair": lambda: built("repair_kernel"),
    "hidden": lambda: built("hidden_kernel"),
    "weight": lambda: built("weight_kernel"),
    "weight, added": lambda: built("weight_kernel", add=True),
    "weight, added in float32": lambda: built("weight_kernel", add=True, dtype=torch.float32),
}


@pytest.mark.skipif(INSIDE, reason="the interpreter compiles nothing")
@pytest.mark.parametrize("name", BUILDS)
def test_compiles_for_hopper_without_spills_in_the_loop(name, tmp_path, monkeypatch):
    import re

    monkeypatch.undo()  # tiles of the size that runs
    monkeypatch.setattr(product, "multiprocessors", lambda device: 132)
    monkeypatch.setattr(product, "chains", lambda device: True)
    made = BUILDS[name]()
    tile = (product.WIDE if "wide" in name else product.READ) if name.startswith("read") else product.TILE
    stack = int(re.search(r"STACK:(\d+) ", made.dump("--dump-resource-usage", tmp_path))[1])
    assert stack == 0 or (name.startswith("read") and stack <= 96), f"{name}: {stack} bytes"
    code = made.dump("-sass", tmp_path)
    loop = code[code.index("HGMMA") : code.rindex("HGMMA")]  # what is spilled, is spilled once per tile
    assert not re.search(r"\b(LDL|STL)\b", loop), name
    assert (made.shared + 1024) * tile.programs <= 228 << 10, name  # 1 KiB per program is the driver's
