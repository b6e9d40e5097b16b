"""The Triton backend with teachers, under the interpreter, against the torch backend in float64.

TRITON_INTERPRET must be set before triton is first imported, so one test runs this file again in a process of its own.
"""

import math
from importlib import import_module

import pytest
import torch
from interpreting import INSIDE, inside, interpreted

from headloss.divergence import Element
from headloss.facts import Fact, Want, coefficients, finish
from headloss.losses import jsd, skew_kl, tvd
from headloss.nested import nest
from headloss.teachers import DenseChunk, DenseSoftmax, SparseChunk, teacher_coefficients

pytest.importorskip("triton")
NAN, INF = math.nan, math.inf
DENSE = ("teacher_cross_entropy", "reverse_cross_entropy", "teacher_entropy", "shared_entropy", "teacher_argmax")
STUDENT = ("lse", "logprob", "mean_logprob", "entropy", "sum_p2", "argmax")
SPARSE = ("ids_logprob", "tail_logprob", "ids_logit", "topk_overlap")

plain = import_module("headloss.backends.torch")
if INSIDE:
    kernels = import_module("headloss.backends.triton.backend")
    tiles = import_module("headloss.backends.triton.tiles")
    TINY = tiles.Shape(width=64, lanes=4, loads=2, stages=1, warps=1)  # 3 parts and several blocks at V near 150
    MIXED = tiles.Shape(width=128, lanes=8, loads=2, stages=1, warps=1)  # for two dtypes


test_under_the_interpreter = interpreted(__file__)


class Case:
    """Rows, targets, and teachers by name; and the same in float64."""

    def __init__(self, x, want, teachers, *, temperatures=(1.0,), scale=1.0, softcap=None, start=0, targets=None):
        self.x, self.want, self.teachers = x, want, teachers
        self.temperatures = list(temperatures)
        self.transform = {"scale": scale, "softcap": softcap}
        self.start = start
        generator = torch.Generator().manual_seed(2)
        self.y = torch.randint(start, start + max(1, x.shape[1]), (len(x),), generator=generator)
        self.y = self.y if targets is None else targets
        self.quiet = "nobody"  # a teacher that has nothing to say of row 1
        self.shape = None
        if INSIDE:
            sizes = {x.element_size(), *(t.raw_CV.element_size() for t in teachers if isinstance(t, DenseChunk))}
            self.shape = TINY if len(sizes) == 1 else MIXED

    def wide(self, z):
        return nest(z, lambda x: x.double() if x.is_floating_point() else x)

    def sums(self, backend, wide, **options):
        x, T, teachers = (self.wide(z) if wide else z for z in (self.x, self.temperatures, self.teachers))
        return backend.sums(x, self.y, self.want, T, teachers=teachers, start=self.start, **self.transform, **options)

    @property
    def student(self):
        at = dict(zip(self.want.temperatures, self.temperatures, strict=True))
        return [[at[key] for key in self.want.temperatures_of(name)] for name in self.want.teachers]

    def divergence_pass(self, backend, softmax, wide, **options):
        x, T, teachers = (self.wide(z) if wide else z for z in (self.x, self.student, self.teachers))
        return backend.divergence_pass(x, self.want, softmax, teachers, T, **self.transform, **options)

    def state(self):
        """Facts, softmax and coefficients, all in float64 by the torch backend."""
        facts, softmax = finish(self.sums(plain, True), self.want, self.wide(self.temperatures), self.x.shape[1])
        divergences = self.want.all_divergences
        if divergences:
            found = dict(zip(divergences, self.divergence_pass(plain, softmax, True), strict=True))
            facts |= {f: v for f, (v, _) in found.items()}
            teachers = [
                seen._replace(slopes=tuple(c for f, (_, c) in found.items() if f.teacher == name))
                if isinstance(seen, DenseSoftmax)
                else seen
                for name, seen in zip(self.want.teachers, softmax.teachers, strict=True)
            ]
            softmax = softmax._replace(teachers=tuple(teachers))
        generator = torch.Generator().manual_seed(1)
        grads = {}
        for f in self.want.facts:
            if f.name not in ("argmax", "teacher_argmax", "teacher_entropy", "topk_overlap", "max_logprob"):
                grads[f] = torch.randn(facts[f].shape, generator=generator).double()
        for f, g in grads.items():
            if f.teacher == self.quiet:
                g[1] = 0.0
            if f.name in ("ids_logprob", "ids_logit"):
                g[self.teachers[self.want.teachers.index(f.teacher)].ids_CK < 0] = 0.0
        return facts, softmax, grads

    def check_sums(self, **options):
        ours, truth = self.sums(kernels, False, shape=self.shape, **options), self.sums(plain, True)
        for path, mine, theirs in leaves(ours, truth):
            close = 1e-3 if path.endswith("total") else 5e-6
            torch.testing.assert_close(
                mine.double(), theirs.double(), rtol=2e-5, atol=close, msg=lambda m, path=path: f"{path}: {m}"
            )

    def check_look(self):
        _, softmax, _ = self.state()
        truth = self.divergence_pass(plain, softmax, True)
        ours = self.divergence_pass(kernels, narrow(softmax), False, shape=self.shape)
        for mine, theirs in zip(ours, truth, strict=True):
            torch.testing.assert_close(torch.stack(mine).double(), torch.stack(theirs), rtol=2e-5, atol=1e-5)

    def check_pull(self, out=None, close=None):
        facts, softmax, grads = self.state()
        V, want = self.x.shape[1], self.want
        pulls = coefficients(facts, grads, want, V)
        asked = [[f for f in want.facts if f.teacher == name] for name in want.teachers]
        own = [
            teacher_coefficients(seen, want.temperatures_of(name), mine, facts, grads)
            for name, seen, mine in zip(want.teachers, softmax.teachers, asked, strict=True)
        ]
        truth = torch.empty(self.x.shape, dtype=torch.float64)
        more = {"start": self.start, **self.transform}
        plain.pull(
            self.wide(self.x), self.y, softmax, pulls, self.wide(self.temperatures), truth,
            teachers=self.wide(self.teachers), teacher_pulls=own, teacher_temperatures=self.wide(self.student), **more,
        )  # fmt: skip
        out = torch.full_like(self.x, NAN, memory_format=torch.contiguous_format) if out is None else out
        kernels.pull(
            self.x, self.y, narrow(softmax), narrow(pulls), self.temperatures, out, shape=TINY,
            teachers=self.teachers, teacher_pulls=narrow(own), teacher_temperatures=self.student, **more,
        )  # fmt: skip
        close = close or {torch.float32: 3e-5, torch.bfloat16: 8e-3, torch.float16: 1e-3}[out.dtype]  # it truncates
        torch.testing.assert_close(out.double(), truth, rtol=close, atol=close)

    def check(self, **options):
        self.check_sums()
        if any(f.element is not None for f in self.want.facts):
            self.check_look()
        self.check_pull(**options)


def leaves(ours, truth, path=""):
    assert (ours is None) == (truth is None), path
    if isinstance(ours, torch.Tensor):
        yield path, ours, truth
    elif isinstance(ours, tuple):
        names = getattr(ours, "_fields", range(len(ours)))
        for name, x, y in zip(names, ours, truth, strict=True):
            yield from leaves(x, y, f"{path}.{name}")


def narrow(z):
    return nest(z, lambda x: x.float() if x.dtype == torch.float64 else x)


def draw(n=3, v=147, dtype=torch.float32, spread=4.0, seed=0):
    return (spread * torch.randn(n, v, generator=torch.Generator().manual_seed(seed))).to(dtype)


def wants(*names, teacher="t", T=(None,)):
    return [Fact(n, t, teacher) for n in names for t in T]


def dense(u, columns=None, temperatures=(1.0,), scale=1.0, softcap=None):
    return DenseChunk(u, scale, softcap, tuple(temperatures), u.shape[1] if columns is None else columns)


def own(*names, T=(None,)):
    return [Fact(n, t) for n in names for t in T]


# ---------------------------------------------------------------- a dense teacher


@inside
@pytest.mark.parametrize("name", DENSE)
def test_each_dense_fact_alone(name):
    Case(draw(2, 133), Want(wants(name)), [dense(draw(2, 133, seed=1))]).check()


@inside
@pytest.mark.parametrize(
    "v, dtype", [(1, torch.float16), (64, torch.float32), (147, torch.bfloat16), (147, torch.float32)]
)
def test_any_vocabulary(v, dtype):
    want = Want(own(*STUDENT) + wants(*DENSE))
    Case(draw(2, v, dtype), want, [dense(draw(2, v, dtype, seed=1))]).check()


@inside
def test_any_layout_of_either():
    want = Want(own("logprob") + wants("teacher_cross_entropy", "reverse_cross_entropy", "teacher_argmax"))
    room = torch.full((3, 310), NAN)
    x, u = draw(3, 300), draw(3, 301, seed=1)
    narrow_u = u.bfloat16()
    for view, teacher, out in (
        (x[:, 3:150], u[:, 3:150], room[:, 3:150]),
        (x[:, 4:151], u[:, 1:148], room[:, 5:152]),
        (x[:, 8:155], narrow_u[:, 8:155], room[:, 8:155]),
        (x[:, :147], narrow_u[:, 2:149], room[:, :294:2]),
        (x[:, :294:2], u[:, :294:2], None),
        (x[:1, 130:277].expand(3, -1), u[:, 130:277], None),
    ):
        room.fill_(NAN)
        Case(view, want, [dense(teacher)]).check(out=out)
        assert out is None or int(room.isnan().sum()) == room.numel() - out.numel()
    y = draw(3, 160, torch.bfloat16)
    Case(y[:, 1:148], want, [dense(u[:, 1:148])]).check(out=y[:, 1:148])  # in place, with a wider dtype


@inside
def test_vocabularies_that_differ():
    want = Want(own(*STUDENT) + wants(*DENSE) + wants("teacher_cross_entropy", T=(2.0,)))
    x, u = draw(3, 147), draw(3, 170, seed=1)
    x, u = x[:2], u[:2]
    for columns in (131, 1, 0):
        Case(x, want, [dense(u, columns, (1.0, 2.0))], temperatures=(1.0, 2.0)).check()
    peak = x.clone()
    peak[:, 140] = 50.0  # the student's maximum stands beyond the shared columns
    Case(peak, want, [dense(u, 131, (1.0, 2.0))], temperatures=(1.0, 2.0)).check()


@inside
def test_what_either_rules_out():
    """-inf columns, blocks, parts and rows, on either side or both; and numbers that others use for -inf."""
    want = Want(own("entropy", "logprob") + wants(*DENSE))
    x, u = draw(7, 147), draw(7, 147, seed=1)
    for z in (x, u.flip(0)):
        z[0, ::3] = -INF
        z[1, :128] = -INF
        z[2, 64:] = -INF
        z[3] = -INF
        z[4, 1:] = -INF
    case = Case(x, want, [dense(u.flip(0).flip(0))])
    case.check_sums()
    case.check_pull(close=2e-3)  # of numbers as large as 1e4
    for mask in (-1e9, -1e30, torch.finfo(torch.float32).min):
        x, u = draw(2, 147), draw(2, 147, seed=1)
        x[0, :64] = x[1, ::2] = u[1, :80] = u[0, 100:] = mask
        case = Case(x, Want(wants(*DENSE)), [dense(u)])
        case.check_sums()
        case.check_pull(close=2e-3)


@inside
@pytest.mark.parametrize("offset", [1e4, -200.0])
def test_offsets_cost_no_digits(offset):
    x, u = draw(2, 133) + offset, draw(2, 133, seed=1) - offset
    case = Case(x, Want(own("entropy") + wants(*DENSE)), [dense(u)])
    case.check_sums()
    case.check_pull()


@inside
def test_peaked_rows():
    case = Case(draw(2, 133, spread=60.0), Want(wants(*DENSE)), [dense(draw(2, 133, spread=60.0, seed=1))])
    case.check_sums()
    case.check_pull(close=1e-3)


PER_ROW = torch.tensor([0.7, 1.0, 3.0])


@inside
def test_temperatures_and_transforms_of_both():
    want = Want(own("logprob", "entropy") + wants(*DENSE[:4], T=(None, 2.0)) + own("lse", T=(0.5,)))
    at = {None: PER_ROW, 2.0: 2.0, 0.5: 0.5}
    temperatures = [at[T] for T in want.temperatures]
    keys = want.temperatures_of("t")
    theirs = [{None: PER_ROW.flip(0), 2.0: 2.0}[T] for T in keys]
    teacher = dense(draw(3, 147, spread=8.0, seed=1), None, theirs, scale=-0.7, softcap=6.0)
    x = draw(3, 147, spread=8.0)
    Case(x, want, [teacher], temperatures=temperatures, scale=0.3, softcap=5.0).check(out=x.clone())
    Case(x, want, [teacher._replace(softcap=None)], temperatures=temperatures).check()


@inside
def test_a_shard():
    want = Want(own("logprob", "argmax", "mean_logprob") + wants(*DENSE))
    targets = torch.tensor([99, 130, 300])
    Case(draw(), want, [dense(draw(seed=1), 120)], start=100, targets=targets).check()
    Case(draw(3, 0), want, [dense(draw(3, 7), 0)], start=100, targets=targets).check_sums()
    Case(draw(0, 9), want, [dense(draw(0, 9))], start=100, targets=targets[:0]).check()


# ---------------------------------------------------------------- the second read


def mine(logp, logq, *, power=1.5):
    """Exists only here: p |log p - log q|^power, smooth where p < q."""
    gap = logp - logq
    return torch.where(gap > 0, logp.exp() * (gap * gap + 1e-3) ** (power / 2), gap.tanh() * logq.exp())


ELEMENTS = [Element(jsd, {"beta": 0.3}), Element(tvd, {}), Element(skew_kl, {"alpha": 0.1}), Element(mine, {})]


def divergences(elements, T=None, teacher="t"):
    return [Fact("divergence", T, teacher, element) for element in elements]


@inside
@pytest.mark.parametrize("element", ELEMENTS, ids=str)
def test_second_look(element):
    want = Want(divergences([element]))
    Case(draw(2, 147, spread=2.0), want, [dense(draw(2, 147, spread=2.0, seed=1))]).check()
    x, u = draw(3, 149, torch.bfloat16), draw(3, 160, torch.bfloat16, seed=1)
    x[0, ::4] = u[0, ::3] = u[1, :70] = x[2] = -INF
    u[1, 139] = 9.0
    Case(x[:, 2:], want, [dense(u[:, 3:], 139)]).check()


@inside
def test_divergences_at_several_temperatures_with_everything_else():
    facts = divergences(ELEMENTS[:2]) + divergences(ELEMENTS[1:3], 2.0)
    want = Want(facts + own("logprob", "entropy") + wants("teacher_cross_entropy", T=(2.0,)))
    at = {None: PER_ROW, 2.0: 2.0}
    teacher = dense(draw(3, 147, seed=1), 140, [at[T] for T in want.temperatures_of("t")], softcap=9.0)
    x = draw()
    Case(x, want, [teacher], temperatures=[at[T] for T in want.temperatures], softcap=7.0).check(out=x.clone())


# ---------------------------------------------------------------- sparse teachers


def ids_of(n, v, k, start=0, seed=3):
    """No order, repeated, padded, and with some of other shards."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(start - 5, start + v + 5, (n, k), generator=generator)
    ids = ids.masked_fill(ids < start, -1) if start == 0 else ids
    ids = ids.masked_fill(ids >= v, -1) if start == 0 else ids
    if k > 4:
        ids[:, 1] = ids[:, 3]
        ids[0, 4] = ids[0, 0] = ids[0, 3]
        ids[1, 2] = -1
    return ids


@inside
@pytest.mark.parametrize("names", [SPARSE[:1], SPARSE[1:2], SPARSE[2:3], SPARSE[3:], SPARSE], ids=" ".join)
def test_sparse_facts(names):
    dtype = torch.float32 if len(names) == 1 else torch.bfloat16
    x = draw(3, 149, dtype)[:, 2:]
    want = Want(own("logprob", "entropy") + wants(*names))
    Case(x, want, [SparseChunk(ids_of(3, 147, 9))]).check()


@inside
def test_likeliest_columns_of_a_negative_scale():
    Case(draw(2, 40), Want(wants("topk_overlap")), [SparseChunk(ids_of(2, 40, 9))], scale=-1.5).check_sums()


@inside
def test_ids_beyond_the_columns_that_a_dense_teacher_shares():
    want = Want(wants("reverse_cross_entropy", teacher="a") + wants("ids_logprob", "tail_logprob", teacher="s"))
    Case(draw(2, 71), want, [dense(draw(2, 71, seed=1), 33), SparseChunk(ids_of(2, 71, 12))]).check()


@inside
def test_where_a_teacher_can_be_read_by_whole_vectors():
    along = tiles.vector_along

    def rows(dtype, stride, lead=0):  # as `_rows` sees memory that begins at a boundary
        x = torch.zeros(4, 64, dtype=dtype).as_strided((4, 9), (stride, 1))
        vector = 16 // x.element_size()
        aligned = lead == 0 and stride % vector == 0
        return tiles.Rows(x, lead, vector if aligned else 8 * vector, vector)

    wide, narrow = torch.float32, torch.bfloat16
    assert along(rows(wide, 64), rows(narrow, 64)) == 8 and along(rows(narrow, 64), rows(wide, 64)) == 4
    assert along(rows(wide, 12), rows(narrow, 20)) == 1  # 8 apart, and neither of 8
    assert along(rows(wide, 64, 3), rows(narrow, 64, 3)) == 8 and along(rows(wide, 64, 3), rows(narrow, 64, 4)) == 1
    assert along(rows(narrow, 61, 3), rows(narrow, 53, 11)) == 8 and along(rows(narrow, 64), rows(narrow, 61)) == 1


@inside
@pytest.mark.parametrize("k, v", [(1, 5), (40, 64), (40, 147)])
def test_any_number_of_ids(k, v):
    want = Want(wants("ids_logprob", "tail_logprob"))
    x = draw(2, v)
    Case(x, want, [SparseChunk(ids_of(2, v, k))]).check(out=x.clone())


@inside
def test_tails():
    """Small next to the ids, empty, ruled out, at several temperatures, capped, and in a shard."""
    x = draw(5, 147)
    ids = ids_of(5, 147, 7)
    x[0] = x[0].scatter(0, ids[0].clamp(min=0), 90.0)  # what is left is e^-90
    x[1, 3:] = -INF
    ids[1, :3] = torch.arange(3)
    ids[1, 3:] = -1
    want = Want(wants("ids_logprob", "tail_logprob", T=(None, 2.0)) + own("sum_p2"))
    T = torch.rand(5) + 0.5
    Case(x, want, [SparseChunk(ids)], temperatures=(T, 2.0)).check()
    Case(x[:2], want, [SparseChunk(ids[:2])], temperatures=(T[:2], 2.0), softcap=20.0, scale=-0.5).check()
    every = torch.arange(9).expand(2, -1)
    case = Case(draw(2, 9), Want(wants("ids_logprob", "tail_logprob")), [SparseChunk(every)])
    case.check_sums()
    some = Case(draw(2, 147), want, [SparseChunk(ids_of(2, 147, 9, 100))], temperatures=(1.0, 2.0), start=100)
    some.check()
    Case(draw(3, 0), want, [SparseChunk(ids_of(3, 0, 9, 100))], temperatures=(1.0, 2.0), start=100).check_sums()


@inside
def test_several_teachers_of_both_kinds():
    facts = wants("teacher_cross_entropy", "teacher_argmax", teacher="a")
    facts += wants("reverse_cross_entropy", "shared_entropy", teacher="b", T=(2.0,))
    facts += divergences(ELEMENTS[:1], 2.0, "b")
    facts += wants("ids_logprob", "tail_logprob", "topk_overlap", teacher="c", T=(None,))
    facts += wants("ids_logprob", "tail_logprob", teacher="d", T=(2.0,))
    want = Want(own("logprob") + facts)
    ids = ids_of(3, 147, 9)
    given = {
        "a": dense(draw(seed=1), 140),
        "b": dense(draw(3, 150, torch.bfloat16, seed=2), 147, (2.0,)),
        "c": SparseChunk(ids),
        "d": SparseChunk(torch.cat([ids[:, :3], ids_of(3, 147, 6, seed=4)], -1)),
    }
    x = draw(dtype=torch.bfloat16)
    case = Case(x, want, [given[n] for n in want.teachers], temperatures=[T or 1.0 for T in want.temperatures])
    case.y[0] = ids[0, 0]  # a target that is an id
    case.quiet = "b"
    case.check(out=x.clone())
    without = Want([f for f in want.facts if f.teacher not in ("a", "b")])
    case = Case(draw(), without, [given["c"], given["d"]], temperatures=[T or 1.0 for T in without.temperatures])
    case.check()
