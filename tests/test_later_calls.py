"""Later calls against first ones, bit for bit: the second must come out as if it were the first.

In a process of its own under Triton's interpreter, which is slow: most kernels are played by a function whose results
depend on everything that the kernel is given.  On a GPU the kernels run.
"""

import contextlib
import gc
import sys
import types
import weakref
import zlib

import pytest
import torch
from interpreting import INSIDE, inside, interpreted

import headloss as hl
from headloss import prepared
from headloss.engine import evaluate, heads, lookup
from headloss.engine.fast_path import OneChunkHead
from headloss.losses import cross_entropy, entropy_bonus, forward_kl, grpo, gspo, jsd, kto, reverse_kl, tvd, z_loss

pytest.importorskip("triton")
from headloss.backends.triton import totals as triton_totals
from headloss.backends.triton import visit as triton_visit
from headloss.backends.triton.cached_launches import Settles
from headloss.backends.triton.launch import Launch

DEVICE = "cpu" if INSIDE else "cuda"
N, V = 9, 40
BETA = 2.0

# here under the interpreter, or where there is a GPU
runs = lambda fn: fn if INSIDE else pytest.mark.gpu(fn)


test_under_the_interpreter = interpreted(__file__)


class Played:
    """Stands for `Launch.run`."""

    def __init__(self, real):
        self.real = real

    def __get__(self, launch, _):
        return lambda *arguments: self.play(launch, *arguments)

    def play(self, launch, key, where, programs, arguments):
        if launch.kernel is not triton_visit.visit_kernel:
            return self.real(launch, key, where, programs, arguments)
        at, given, V, _, lead, _, out_lead, *numbers = arguments
        flags = launch.constants["F"]
        assert programs == len(at.raw) and at.raw.shape[1] == V
        raw = at.raw.as_strided(
            at.raw.shape, at.raw.stride(), at.raw.storage_offset() + lead
        )  # where it lies may differ
        place = ("LINE", "VEC", "SAME", "EVEN", "PAIRED")
        kinds = [(k, x) for k, x in flags._asdict().items() if not k.endswith(place)]
        target = at.target if flags.TARGET else None
        told = [raw, target, flags.GRADIENT, tuple(given), V, numbers[:2], sorted(kinds, key=str)]
        seed = torch.Generator().manual_seed(zlib.crc32(repr([told_of(x) for x in told]).encode()))
        at.found.copy_(torch.randn(at.found.shape, generator=seed))
        if flags.BEST:
            at.best.copy_(torch.randint(0, V, at.best.shape, generator=seed))
        if flags.GRADIENT:
            out = at.out.as_strided(at.out.shape, at.out.stride(), at.out.storage_offset() + out_lead)
            out.copy_(torch.randn(out.shape, generator=seed))
        return None


def told_of(x):
    if isinstance(x, tuple | list):
        return [told_of(y) for y in x]
    return (x.dtype, x.tolist()) if isinstance(x, torch.Tensor) else x


@pytest.fixture
def played(monkeypatch):
    if INSIDE:
        monkeypatch.setattr(Launch, "run", Played(Launch.run))


@pytest.fixture
def plans(monkeypatch):
    """The plans that were made."""
    made = []
    plain = lookup.make_plan
    monkeypatch.setattr(lookup, "make_plan", lambda *a: made.append(a) or plain(*a))
    return made


def mix(**more):
    return hl.Objective(
        ce=hl.Term(cross_entropy, label_smoothing=0.1), z=hl.Term(z_loss, weight=1e-2), pg=hl.Term(grpo, weight=0.3),
        h=hl.Term(entropy_bonus, weight=0.05, reduction="token_sum", temperature=2),
        metrics=["accuracy"], backend="triton", **more,
    )  # fmt: skip


class Call:
    """The arguments of a call; `change` makes another that differs in what is said."""

    def __init__(self, n=N, v=V, seed=3):
        generator = torch.Generator().manual_seed(seed)
        self.logits = (3 * torch.randn(n, v, generator=generator)).to(DEVICE)
        self.targets = torch.randint(0, v, (n,), generator=generator).to(DEVICE)
        self.inputs = {
            "advantage": torch.randn(n, generator=generator).to(DEVICE),
            "old_logprob": -3 * torch.rand(n, generator=generator).to(DEVICE),
        }
        self.source, self.more, self.grad, self.direct = {}, {}, True, False

    def change(self, **said):
        for name, value in said.items():
            setattr(self, name, value)
        return self

    def ignoring(self, *rows):
        self.targets[list(rows)] = -100
        for row in rows:
            self.logits[row] = torch.nan
            self.inputs.get("advantage", self.logits[:, 0])[row] = torch.nan
        return self

    def __call__(self, objective):
        """Everything that comes back, as a dict of tensors."""
        x, made = self.logits.detach(), self.logits.detach()
        if self.source.get("inplace"):
            made = x = x.clone()
        if self.grad and not self.direct:
            x = x.requires_grad_()
            made = x.mul(1.0) if self.source.get("inplace") else x
        step = objective.forward_backward if self.direct else objective
        out = step(hl.Logits(made, **self.source), self.targets, **self.more, **self.inputs)
        found = {"loss": out.loss.detach(), **{f"term {k}": v for k, v in out.terms.items()}}
        found |= {f"metric {k}": m.value for k, m in out.metrics.items()}
        found |= {f"fact {k}": f.detach() for k, f in out.facts.items()}
        assert out.loss.requires_grad == (self.grad and not self.direct)
        if self.direct:
            found["grad"] = out.grads.logits
        elif self.grad:
            wanting = [v for v in self.inputs.values() if isinstance(v, torch.Tensor) and v.requires_grad]
            found |= dict(enumerate(torch.autograd.grad(out.loss * 3.0, [x, *wanting])))
        return found


def same(ours, truth):
    assert list(ours) == list(truth)
    for name, value in truth.items():
        assert ours[name].dtype == value.dtype and ours[name].shape == value.shape, name
        torch.testing.assert_close(ours[name], value, rtol=0, atol=0, equal_nan=True, msg=f"{name} differs")


def wide(shift):
    """A call whose logits are some columns of others."""
    call = Call()
    room = torch.zeros(N, V + 12, device=DEVICE)
    room[:, shift : shift + V] = call.logits
    return call.change(logits=room[:, shift : shift + V])


def with_inputs(**inputs):
    call = Call()
    call.inputs |= inputs
    return call


ROWS = torch.linspace(-1.0, 1.0, N, device=DEVICE if INSIDE or torch.cuda.is_available() else "cpu")
SAME_FORM = {
    "other values": lambda: Call(seed=4),
    "fewer rows": lambda: Call(n=5),
    "one row": lambda: Call(n=1),
    "16 rows of 48 columns": lambda: Call(16, 48),
    "other columns": lambda: Call(v=37),
    "ignored rows": lambda: Call().ignoring(2, 5),
    "every row ignored": lambda: Call().ignoring(*range(N)),
    "a wider row stride": lambda: wide(0),
    "columns from the fourth on": lambda: wide(4),
    "rows that begin off a boundary": lambda: wide(3),
    "no gradient": lambda: Call().change(grad=False),
    "forward_backward": lambda: Call().change(direct=True),
    "in place": lambda: Call().change(source={"inplace": True}),
    "a temperature": lambda: Call().change(source={"temperature": 0.5}),
    "a temperature per row, beside a term's own": lambda: Call().change(source={"temperature": ROWS + 1.5}),
    "scale, softcap": lambda: Call().change(source={"scale": 0.7, "softcap": 5}),
    "no host read": lambda: Call().change(more={"host_read": False}),
    "no host read, ignored rows": lambda: Call().ignoring(2, 5).change(more={"host_read": False}),
    "no host read, every row ignored": lambda: Call().ignoring(*range(N)).change(more={"host_read": False}),
    "prepared": lambda: Call().change(targets=hl.prepare(Call().ignoring(1).targets)),
    "a weight": lambda: Call().change(more={"weights": {"z": 0.5}}),
    "a weight on the device": lambda: Call().change(more={"weights": {"z": torch.tensor(0.5, device=DEVICE)}}),
    "num_items": lambda: Call().change(more={"num_items": 4}),
    "num_items on the device": lambda: Call().change(more={"num_items": torch.tensor(4, device=DEVICE)}),
    "grad_scale": lambda: Call().change(more={"grad_scale": 7.0}),
    "grad_scale on the host": lambda: Call().change(more={"grad_scale": torch.tensor(7.0)}),
    "a batch of lines": lambda: (
        c := Call(8),
        c.change(
            logits=c.logits.view(2, 4, V), targets=c.targets.view(2, 4),
            inputs={k: v.view(2, 4) for k, v in c.inputs.items()},
        ),
    )[1],
    "columns apart": lambda: (c := Call()).change(logits=c.logits.t().contiguous().t()),
    "lines apart": lambda: (c := Call(8)).change(
        logits=c.logits.view(2, 4, V).transpose(0, 1), targets=c.targets.view(4, 2),
        inputs={k: v.view(4, 2) for k, v in c.inputs.items()},
    ),
    "targets with gaps": lambda: (c := Call()).change(targets=torch.stack([c.targets, c.targets], 1)[:, 0]),
    "int32 targets": lambda: (c := Call()).change(targets=c.targets.int()),
    "an input off a boundary": lambda: with_inputs(advantage=torch.cat([ROWS[:1], ROWS])[1:]),
    "an input with gaps": lambda: with_inputs(advantage=torch.stack([ROWS, ROWS], 1)[:, 0]),
    "an input with one value for all rows": lambda: with_inputs(advantage=ROWS[:1].expand(N)),
}  # fmt: skip
OTHER_FORM = {
    "bfloat16": lambda: (c := Call()).change(logits=c.logits.bfloat16()),
    "an input in float64": lambda: with_inputs(advantage=ROWS.double()),
    "an input that is None": lambda: with_inputs(old_logprob=None),
    "a temperature that is a term's own": lambda: Call().change(source={"temperature": 2}),
    "a term switched off": lambda: Call().change(more={"weights": {"z": 0}}),
    "float16": lambda: (c := Call()).change(logits=c.logits.half()),
    "segments": lambda: Call().change(more={"segments": hl.Segments.from_ids((ROWS > 0).long())}),
    "an input that wants a gradient": lambda: with_inputs(advantage=ROWS.clone().requires_grad_()),
    "an input that is a number": lambda: with_inputs(advantage=0.5),
    "an input that makes a metric one number": lambda: with_inputs(advantage=ROWS[3]),
}


FEW = [
    "other values",
    "fewer rows",
    "no gradient",
    "forward_backward",
    "in place",
    "prepared",
    "num_items",
    "grad_scale",
]


@runs
@pytest.mark.parametrize("name", [*SAME_FORM, *OTHER_FORM] if INSIDE else [*FEW, "no host read, ignored rows"])
def test_one_thing_changes(name, plans, played):
    changes(name, plans)


@inside
@pytest.mark.parametrize("name", ["ignored rows", "rows that begin off a boundary", "a wider row stride"])
def test_one_thing_changes_for_the_kernel(name, plans, monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "mix", lambda: hl.Objective(ce=cross_entropy, backend="triton"))
    monkeypatch.setattr(Call, "inputs", property(lambda self: {}, lambda self, _: None), raising=False)
    changes(name, plans)


def changes(name, plans):
    call = {**SAME_FORM, **OTHER_FORM}[name]
    objective, plain = mix(), Call()
    truth, other = plain(mix()), call()(mix())
    del plans[:]
    for _ in range(3):
        same(plain(objective), truth)
        assert len(plans) == 1
    for _ in range(2):
        same(call()(objective), other)
        assert len(plans) == 1 + (name in OTHER_FORM)
    same(plain(objective), truth)
    assert len(plans) == 1 + (name in OTHER_FORM)


def numbers_of(objective, **inputs):
    call = Call()
    call.inputs = inputs
    return call(objective)


@inside
def test_what_a_function_reads_may_change(plans, monkeypatch):
    settings = types.ModuleType("settings")
    settings.beta = 2.0
    cell = 2.0

    def by_global(logprob):
        return -BETA * logprob

    def by_module(logprob):
        return -settings.beta * logprob

    def by_closure(logprob):
        return -cell * logprob

    def by_default(logprob, *, beta=2.0):
        return -beta * logprob

    def by_weight(logprob):
        return BETA + 0 * logprob

    for fn, change in (
        (by_global, lambda: monkeypatch.setattr(sys.modules[__name__], "BETA", 3.0)),
        (by_module, lambda: setattr(settings, "beta", 3.0)),
    ):
        objective = hl.Objective(a=fn, backend="triton")
        first = numbers_of(objective)
        same(numbers_of(objective), first)
        assert len(plans) == 1
        change()
        for _ in range(2):
            torch.testing.assert_close(numbers_of(objective)["loss"], 1.5 * first["loss"])
        assert len(plans) == 2
        del plans[:]
    objective = hl.Objective(a=by_closure, b=by_default, backend="triton")
    first = numbers_of(objective)
    cell = 3.0
    assert float(numbers_of(objective)["term a"]) == pytest.approx(1.5 * float(first["term a"]))
    by_default.__code__ = by_global.__code__
    objective = hl.Objective(a=hl.Term(cross_entropy, row_weight=by_weight), backend="triton")
    weighed = numbers_of(objective)
    monkeypatch.setattr(sys.modules[__name__], "BETA", 6.0)
    torch.testing.assert_close(numbers_of(objective)["loss"], 2.0 * weighed["loss"])


@inside
def test_a_default_of_a_divergence_of_ours_is_read_in_every_call_on_ids(monkeypatch):
    call, ids = Call(v=8), torch.arange(8).expand(N, 8)  # all columns, so that no tail is left
    q = call.logits.flip(0).log_softmax(-1)
    p = call.logits.log_softmax(-1)
    objective = hl.Objective(it=hl.Term(jsd, tail="none"), backend="triton")
    for beta in (0.5, 0.1, 0.9, 0.5):
        monkeypatch.setitem(jsd.__kwdefaults__, "beta", beta)
        mixed = (beta * q.exp() + (1 - beta) * p.exp()).log()
        want = (beta * q.exp() * (q - mixed) + (1 - beta) * p.exp() * (p - mixed)).sum(-1).mean()
        torch.testing.assert_close(objective(hl.Logits(call.logits), teacher=hl.Sparse(ids, q)).loss, want)


@inside
def test_a_number_on_the_device_is_an_input_like_another(plans, played):
    def loss(logprob, coefficient):
        return -coefficient * logprob

    objective = hl.Objective(a=loss, backend="triton")
    for x in (2.0, 3.0, 4.0):
        given = {"coefficient": torch.tensor(x, device=DEVICE)}
        truth = numbers_of(hl.Objective(a=loss, backend="triton"), **given)
        del plans[:]
        same(numbers_of(objective, **given), truth)
        assert len(plans) == (x == 2.0)


@inside
def test_inputs_are_told_apart_by_their_names(played):
    def loss(logprob, a=None, b=None):
        return -logprob * (1.0 if a is None else a) * (2.0 if b is None else b)

    objective = hl.Objective(a=loss, backend="triton")
    for name in ("a", "b", "a", "b"):
        same(numbers_of(objective, **{name: ROWS}), numbers_of(hl.Objective(a=loss, backend="triton"), **{name: ROWS}))


@inside
def test_segments_are_seen_wherever_they_come_from():
    def loss(logprob, segments=None):
        return -logprob if segments is None else -segments.totals(logprob)

    objective, call = hl.Objective(a=loss, backend="triton"), Call(4)
    segments = hl.Segments.from_ids(torch.tensor([0, 0, 0, 1]))
    source = hl.Logits(call.logits)
    for _ in range(2):
        plain = objective(source, call.targets).loss
        torch.testing.assert_close(plain, torch.nn.functional.cross_entropy(call.logits, call.targets))
        for out in (
            objective(source, call.targets, segments=segments),
            objective(source, hl.prepare(call.targets, segments)),
        ):
            torch.testing.assert_close(out.loss, 2 * plain)  # 4 rows in 2 segments


@inside
def test_a_metric_of_the_users_own_may_change_too(monkeypatch):
    def above(logprob):
        return logprob * BETA

    objective = hl.Objective(ce=cross_entropy, metrics=[above], backend="triton")
    first = numbers_of(objective)
    numbers_of(objective)
    monkeypatch.setattr(sys.modules[__name__], "BETA", 4.0)
    torch.testing.assert_close(numbers_of(objective)["metric above"], 2.0 * first["metric above"])


@inside
def test_a_later_call_launches_where_its_logits_are(played, monkeypatch):
    objective, call = mix(), Call()
    first = objective(hl.Logits(call.logits), call.targets, **call.inputs)
    entered = []
    monkeypatch.setattr(heads, "on_other_device", lambda device: not entered)

    @contextlib.contextmanager
    def current(device):
        entered.append(device)
        yield

    monkeypatch.setattr(torch.cuda, "device", current)
    later = objective(hl.Logits(call.logits), call.targets, **call.inputs)
    assert entered == [call.logits.device] and torch.equal(first.loss, later.loss)


@runs
def test_what_has_no_gradient_says_so_in_every_call(played):
    """As `run.HeadFunction` marks them."""
    objective = hl.Objective(ce=cross_entropy, metrics=["max_logprob", "accuracy", "entropy"], backend="triton")
    for _ in range(3):
        call = Call()
        out = objective(hl.Logits(call.logits.clone().requires_grad_()), call.targets)
        wants = {name for name, fact in out.facts.items() if fact.requires_grad}
        assert wants == {"logprob", "entropy"} and set(out.facts) - wants == {"max_logprob", "argmax"}
    assert [len(form.plans) for form in objective.plans.forms.values()] == [1]


@runs
@pytest.mark.parametrize("inplace", [False, True])
def test_backward_of_a_later_call(inplace, played, monkeypatch):
    """Facts, twice, and both together."""
    bumped, bump = [], torch.autograd.graph.increment_version
    monkeypatch.setattr(torch.autograd.graph, "increment_version", lambda x: bumped.append(x) or bump(x))
    found = []
    for objective in (mix(), mix()):
        for _ in range(2):
            call = Call().ignoring(2)
            leaf = call.logits.clone().requires_grad_()
            made = leaf * 1.0
            del bumped[:]
            out = objective(hl.Logits(made, inplace=inplace), call.targets, **call.inputs)
            assert [x is made for x in bumped] == [True] * inplace  # a kernel's writes are nothing that torch sees
            with torch.no_grad():  # whoever looks first decides nothing
                assert out.facts.lse.shape == call.targets.shape
            if inplace:
                with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                    (out.loss + out.facts.lse.sum()).backward(retain_graph=True)
                continue
            out.loss.backward(retain_graph=True)
            (2 * out.loss + out.facts.lse.square().sum()).backward(retain_graph=True)
            out.facts.logprob.sum().backward()
            found.append(leaf.grad.nan_to_num())
            assert not out.facts.argmax.requires_grad and out.facts.lse.requires_grad
    assert all(torch.equal(x, found[0]) for x in found)


@runs
def test_the_loss_of_a_later_call_can_be_divided_in_place_and_its_logits_written_to():
    objective = mix()
    for _ in range(2):
        call = Call()
        leaf = call.logits.clone().requires_grad_()
        loss = objective(hl.Logits(leaf), call.targets, **call.inputs).loss
        loss /= 4
        loss.backward()
        plain = Call().change(direct=True)(mix())["grad"]
        torch.testing.assert_close(leaf.grad, plain / 4)
        made = leaf.detach().requires_grad_() * 1.0
        out = objective(hl.Logits(made), call.targets, **call.inputs)
        made.mul_(2.0)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.loss.backward()
        with pytest.raises(RuntimeError, match="differentiate twice"):
            x = call.logits.clone().requires_grad_()
            (g,) = torch.autograd.grad(objective(hl.Logits(x), call.targets, **call.inputs).loss, x, create_graph=True)
            g.sum().backward()


@runs
def test_a_later_call_keeps_neither_logits_nor_inputs(played):
    objective = mix()
    for _ in range(2):
        call = Call()
        x = call.logits.clone().requires_grad_()
        out = objective(hl.Logits(x), call.targets, **call.inputs)
        out.loss.backward()
        refs = [weakref.ref(t) for t in (x, call.inputs["advantage"])]
        out = (out.loss, out.metrics)
        del x, call
        gc.collect()
        assert [r() for r in refs][1] is None
        del out
        gc.collect()
        assert refs[0]() is None


@runs
def test_a_later_call_keeps_no_teacher(reached):
    plain = Taught()
    objective = plain.made()
    for _ in range(3):
        teachers, x = Taught().teachers(), plain.call.logits.clone().requires_grad_()
        out = objective(hl.Logits(x), plain.call.targets, teacher=teachers)
        out.loss.backward()
        ref = weakref.ref(teachers["b"].logits)
        del teachers
        gc.collect()
        assert ref() is None
    assert reached[-1] is not None


@runs
def test_a_later_call_counts_and_scales_by_what_it_is_told():
    objective, call = hl.Objective(ce=cross_entropy, backend="triton"), Call(n=4)
    source, batch = hl.Logits(call.logits), hl.prepare(call.targets)
    plain = objective.forward_backward(source, batch)
    for targets in (batch, call.targets):
        out = objective.forward_backward(source, targets, num_items=8, grad_scale=4.0)
        torch.testing.assert_close(out.loss, plain.loss / 2)
        torch.testing.assert_close(out.grads.logits, plain.grads.logits * 2)


@inside
def test_later_calls_tell_which_rows_are_dead(played):
    objective = hl.Objective(ce=cross_entropy, metrics=["dead_rows"], backend="triton")
    found = [float(numbers_of(objective)["metric dead_rows"]) for _ in range(3)]
    assert found == found[:1] * 3


@runs
@pytest.mark.parametrize("kind", ["dense", "ids"])
def test_later_calls_with_a_teacher(kind):
    """Facts too, and whatever is said of the teacher."""
    made = lambda: hl.Objective(kl=forward_kl, backend="triton")
    objective = made()
    said = [{}, {}, {"temperature": 0.5}, {"scale": 0.7, "softcap": 5.0}, {}] if kind == "dense" else [{}] * 3
    for seed, how in enumerate(said):
        found = []
        for known in (objective, made()):
            call = Call(n=3, seed=seed).ignoring(1) if how is said[-1] and seed else Call(n=3, seed=seed)
            x, told = call.logits.requires_grad_(), Call(n=3, seed=seed + 9).logits
            if kind == "ids":
                told = told[:, :8].log_softmax(-1)
                ids = torch.arange(seed, seed + 8, device=DEVICE).expand(3, 8).contiguous()
            teacher = hl.Logits(told, **how) if kind == "dense" else hl.Sparse(ids, told)
            out = known(hl.Logits(x), call.targets, teacher=teacher)
            fact = out.facts.teacher_cross_entropy if kind == "dense" else out.facts.ids_logprob
            (out.loss + fact.sum()).backward(retain_graph=True)
            found.append({"loss": out.loss, "grad": x.grad})
            told.add_(1.0)
            name = "teacher.logits" if kind == "dense" else "teacher.logprobs"
            with pytest.raises(RuntimeError, match=f"{name}: modified by an inplace operation"):
                out.loss.backward()
        same(*found)


WITHOUT_TARGETS = {
    "forward KL": (forward_kl, "dense"),
    "JSD": (jsd, "dense"),
    "TVD at a temperature": (hl.Term(tvd, temperature=2.0), "dense"),
    "forward KL on ids": (forward_kl, "ids"),
    "JSD on ids alone": (hl.Term(jsd, tail="none"), "ids"),
    "entropy": (entropy_bonus, None),
}


@runs
@pytest.mark.parametrize("lines", [False, True])
@pytest.mark.parametrize("name", WITHOUT_TARGETS)
def test_later_calls_without_targets(name, lines, reached):
    """They are found too, with a teacher that is new in every call; facts pull, and what was written to is told."""
    loss, kind = WITHOUT_TARGETS[name]
    made = lambda backend: hl.Objective(it=loss, metrics=["entropy"], backend=backend)
    objective, shape = made("triton"), (2, 2) if lines else (4,)
    for seed in range(3):
        found = []
        for known in (objective, made("triton"), made("torch")):
            x, told = Call(n=4, seed=seed).logits.view(*shape, V).requires_grad_(), Call(n=4, seed=seed + 9).logits
            more = {"num_items": 3} if seed == 2 else {}
            if kind == "dense":
                more["teacher"] = hl.Logits(told.view(*shape, V))
            elif kind == "ids":
                ids = torch.arange(seed, seed + 8, device=DEVICE).expand(4, 8).contiguous()
                told = told[:, :8].log_softmax(-1)
                more["teacher"] = hl.Sparse(ids.view(*shape, 8), told.view(*shape, 8))
            out = known(hl.Logits(x), **more)
            assert known is not objective or seed == 0 or reached[-1] is not None
            (out.loss + out.facts.entropy.square().sum()).backward(retain_graph=True)
            found.append({"loss": out.loss.detach(), "grad": x.grad, "entropy": out.metrics["entropy"].value})
            if kind is not None:
                told.add_(1.0)
                with pytest.raises(RuntimeError, match="teacher.*: modified by an inplace operation"):
                    out.loss.backward()
        same(*found[:2])
        for key, value in found[2].items():
            torch.testing.assert_close(found[0][key], value, rtol=1e-4, atol=1e-5, msg=f"{key} differs")


@inside
def test_later_calls_may_give_other_weights(played, reached):
    """Each call its own, of some terms or of one that is off; a weight of 0 is another plan."""
    objective = mix()
    objectives = (objective, hl.Objective(ce=cross_entropy, z=hl.Term(z_loss, weight=0.0), backend="triton"))
    for known in objectives:
        for weights, found in (({"z": 0.5}, False), ({"z": 2.0}, True), ({"z": 0.25}, True), ({"z": 0.0}, False)):
            call = Call().change(more={"weights": weights})
            if known is not objective:
                call.inputs = {}
            new = mix() if known is objective else hl.Objective(ce=cross_entropy, z=z_loss, backend="triton")
            truth, ours = call(new), call(known)
            same(ours, truth)
            assert (reached[-1] is not None) == found


@runs
def test_later_calls_with_a_head():
    """Facts too, and a second backward; ignored rows, which are left out of the products, in between."""
    made = lambda: hl.Objective(ce=cross_entropy, backend="triton")
    objective = made()
    for seed, ignored in enumerate(([], [], [2], [])):
        found = []
        for known in (objective, made()):
            call = Call(n=3, seed=seed).ignoring(*ignored)
            generator = torch.Generator().manual_seed(seed)
            hidden, weight = (torch.randn(n, 16, generator=generator).to(DEVICE) for n in (3, V))
            hidden[ignored] = torch.nan
            hidden, weight = hidden.requires_grad_(), weight.requires_grad_()
            out = known(hl.Linear(hidden, weight), hl.prepare(call.targets))
            out.loss.backward(retain_graph=True)
            (2 * out.loss + out.facts.logprob.square().sum()).backward()
            found.append({"loss": out.loss, "hidden": hidden.grad, "weight": weight.grad})
            assert weight.grad.isfinite().all()
        same(*found)


@inside
@pytest.mark.parametrize("kind", ["dense", "two", "ids", "head", "head alone", None])
def test_later_calls_with_a_head_next_to_teachers(kind, reached):
    """As a call makes them that is not found: with targets or without, of which some are ignored, and of lines too."""
    many = {"kl": forward_kl, "h": entropy_bonus}
    terms = {
        "dense": many, "head": many, "head alone": many, "ids": {"kl": hl.Term(reverse_kl, tail="bucket")},
        "two": {"a": hl.Term(forward_kl, teacher="a"), "b": hl.Term(jsd, teacher="b")}, None: {"h": entropy_bonus},
    }[kind]  # fmt: skip
    made = lambda: hl.Objective(**terms, backend="triton")
    objective = made()
    weight, theirs = torch.nn.Parameter(torch.randn(V, 16)), torch.nn.Parameter(torch.randn(V, 8))
    plan = [(), (), ("targets",), ("targets",), ("targets", "ignored"), ("lines",), ("lines",), ("small",), ("small",)]
    for seed, said in enumerate(plan):
        hidden, told, found = torch.randn(6, 16), torch.randn(2, 6, V).log_softmax(-1), []
        targets = torch.arange(6)
        targets[[2, 4] if "ignored" in said else []] = -100
        shape = (2, 3) if "lines" in said else (6,)
        ids, logprobs = torch.arange(seed, seed + 30).view(6, 5) % V, told[0, :, :5].contiguous()
        more = {
            "dense": {"teacher": hl.Logits(told[0].view(*shape, V), temperature=0.5 + seed)},
            "two": {"teacher": {n: hl.Logits(told[i].view(*shape, V)) for i, n in enumerate("ab")}},
            "ids": {"teacher": hl.Sparse(ids.view(*shape, 5), logprobs.view(*shape, 5))}, None: {},
        }  # fmt: skip
        memory = {"memory": 3 * 4 * 48} if "small" in said else {}
        told_by = hl.Linear(torch.randn(*shape, 8), theirs, temperature=0.5 + seed % 3, **memory)
        more = {**more, "head": {"teacher": told_by}, "head alone": {"teacher": told_by}}[kind]

        def call(known, hidden=hidden, targets=targets, said=said, shape=shape, more=more, memory=memory):
            x, weight.grad = hidden.view(*shape, 16).requires_grad_(), None
            given = hl.prepare(targets.view(shape)) if "targets" in said else None
            alone = kind == "head alone"
            source = hl.Logits(x @ weight.t()) if alone else hl.Linear(x, weight, **memory)
            out = known(source, given, **more)
            out.loss.backward(retain_graph=True)
            (out.loss + sum(f.sum() for f in out.facts.values() if f.requires_grad)).backward()
            grads, x.grad = {"hidden": x.grad, "weight": weight.grad}, None
            return {"loss": out.loss.detach(), **out.terms, **grads}

        for _ in range(2):
            found.append(call(objective))
        assert (reached[-1] is not None) == (not {"ignored", "small"} & {*said}), said
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(evaluate, "make_fast_path", lambda *call: None)
            truth = call(made())
        same(found[0], truth)
        same(found[1], truth)


@pytest.mark.parametrize("uneven", [False, True])
@pytest.mark.parametrize("columns", [V + 3, 4099])
@pytest.mark.parametrize("needs", [(True, True), (True, False), (False, True)])
def test_one_chunk_is_that_of_any_head(uneven, columns, needs, monkeypatch):
    """Bit for bit, whatever the sizes; rows of a batch, and a weight that lies the other way round."""
    monkeypatch.setattr(heads, "UNEVEN_IS_SLOW", {"cpu": 8} if uneven else {})
    generator = torch.Generator().manual_seed(columns)
    hidden, weight = torch.randn(2, 3, 16, generator=generator), torch.randn(16, columns, generator=generator).t()
    source = hl.Linear(hidden.requires_grad_(), torch.nn.Parameter(weight))
    head, every = heads.LinearHead(source, single_chunk=True), slice(0, 6)
    head.wants_grad(needs)
    with torch.no_grad():
        chunk = OneChunkHead(source)
        raw, truth = chunk.read(source), head.read(every)
        assert torch.equal(raw, truth) and raw.stride() == truth.stride()
        grad = torch.randn(raw.shape, generator=generator)
        head.write(every, grad, None)
        for ours, theirs in zip(chunk.write(source, grad, needs), head.grads(), strict=True):
            assert ours is theirs is None or (torch.equal(ours, theirs) and ours.stride() == theirs.stride())
            assert type(ours) in (torch.Tensor, type(None))


class InSegments:
    """A call whose rows meet in segments; `reached`: it is one that is found as those before it."""

    def __init__(self, reduction="token_mean", **more):
        self.reduction, self.how, self.ids, self.ignored, self.rows = reduction, {}, [0, 0, 0, 0, 1, 1, 2, 2, 2], [], N
        self.prepare, self.count, self.seed, self.reached, self.more, self.loss = True, 3, 3, True, {}, gspo
        self.__dict__.update(more)

    def made(self, backend="triton"):
        terms = {"rl": hl.Term(self.loss, reduction=self.reduction), "z": hl.Term(z_loss, weight=1e-2)}
        return hl.Objective(**terms, metrics=["entropy"], backend=backend)

    def __call__(self, objective):
        call = Call(n=self.rows, seed=self.seed)
        targets, ids = call.targets, torch.tensor(self.ids[: self.rows], device=DEVICE)
        targets[self.ignored] = -100
        call.logits[self.ignored] = torch.nan
        segments = hl.Segments.from_ids(ids, self.count)
        if self.prepare:
            call.change(targets=hl.prepare(targets, segments), more=self.more)
        else:
            call.change(more={"segments": segments, **self.more})
        if self.loss is kto:
            desirable = torch.arange(self.count, device=DEVICE) % 2 == 0
            call.inputs = {"ref_logprob": call.inputs["old_logprob"], "desirable": desirable}
        return call.change(**self.how)(objective)


PLAIN = {"prepare": False, "more": {"host_read": False}}  # as on a GPU
IN_SEGMENTS = {
    "other values": {"seed": 8},
    "ignored rows": {"ignored": [2, 5]},
    "a segment that is ignored": {"ignored": [4, 5]},
    "in no order": {"ids": [2, 0, 0, 1, 1, 1, 0, 2, 2]},
    "in no order, ignored rows": {"ids": [2, 0, 0, 1, 1, 1, 0, 2, 2], "ignored": [0, 4]},
    "an ignored row names a later segment": {"ids": [0, 0, 2, 0, 1, 1, 2, 2, 2], "ignored": [2]},
    "other lengths": {"ids": [0, 1, 1, 1, 1, 1, 1, 2, 2]},
    "more segments": {"count": 5, "ids": [0, 0, 1, 1, 2, 3, 3, 4, 4]},
    "fewer rows": {"rows": 7},
    "num_items": {"more": {"num_items": 4}},
    "num_segments": {"more": {"num_segments": 7}, "reached": False},
    "grad_scale": {"more": {"grad_scale": 3.0}},
    "segments of their own": {"prepare": False, "reached": False},
    "segments of their own, no host read": PLAIN,
    "segments of their own, no host read, ignored rows": {**PLAIN, "ignored": [2, 5]},
    "segments of their own, no host read, one that is ignored": {**PLAIN, "ignored": [4, 5]},
    "segments of their own, no host read, in no order": {**PLAIN, "ids": [2, 0, 0, 1, 1, 1, 0, 2, 2], "ignored": [0]},
    "segments of their own, no host read, num_items": {**PLAIN, "more": {"host_read": False, "num_items": 4}},
    "no gradient": {"how": {"grad": False}},
    "forward_backward": {"how": {"direct": True}},
    "scale, softcap": {"how": {"source": {"scale": 0.7, "softcap": 5.0}}},
    "a temperature": {"how": {"source": {"temperature": 0.5}}},
    "a loss of segments": {"loss": kto},
}


@pytest.fixture
def reached(monkeypatch):
    """Of each call, whether it was found."""
    found, plain = [], evaluate.find_fast_path
    monkeypatch.setattr(evaluate, "find_fast_path", lambda *a: found.append(ready := plain(*a)) or ready)
    return found


@inside
@pytest.mark.parametrize("reduction", ["token_mean", "seq_mean_token_mean", "seq_mean_token_sum"])
def test_one_thing_changes_in_segments(reduction, reached):
    plain, objectives = InSegments(reduction), {}
    truth = plain(plain.made())
    some = ["ignored rows", "more segments", "num_items", *(name for name in IN_SEGMENTS if "no host read" in name)]
    some = IN_SEGMENTS if reduction == "seq_mean_token_mean" else some
    for name in some:
        other = InSegments(reduction, **IN_SEGMENTS[name])
        objective = objectives.setdefault(other.loss, other.made())  # which has seen all calls before this one
        expected, plainly = other(other.made()), other(other.made("torch"))
        for key, value in plainly.items():  # the first call goes the same way as later ones
            torch.testing.assert_close(expected[key], value, rtol=1e-4, atol=1e-5, msg=f"{name}: {key} differs")
        for _ in range(2):
            del reached[:]
            same(other(objective), expected)
        assert (reached[-1] is not None) == other.reached, name
        if other.loss is gspo:
            same(plain(objective), truth)


@inside
def test_segments_of_a_later_call_are_checked():
    """Their ids, that rows have one, and that they were not written to, before the call or after it."""
    plain = InSegments()
    objective = plain.made()
    for _ in range(2):
        plain(objective)
    call, rows = Call(), hl.Segments.from_ids(torch.tensor(plain.ids), 3)
    batch = hl.prepare(call.targets, rows)
    out = objective(hl.Logits(call.logits.requires_grad_()), batch, **call.inputs)
    rows.ids[0] = 1
    with pytest.raises(RuntimeError, match="segments: modified by an inplace operation"):
        out.loss.backward()
    with pytest.raises(ValueError, match="segments: were written to"):
        objective(hl.Logits(call.logits), batch, **call.inputs)
    for bad, said in ((3, "outside"), (-1, "1 rows that are not ignored have no segment")):
        ids = torch.tensor(plain.ids)
        ids[4] = bad
        wrong = hl.prepare(call.targets, hl.Segments(ids, 3))
        with pytest.raises(ValueError, match=said):
            objective(hl.Logits(call.logits), wrong, **call.inputs)
    with pytest.raises(ValueError, match="but its targets are prepared"):
        also = hl.Segments.from_ids(torch.tensor(plain.ids), 3)
        objective(hl.Logits(call.logits), hl.prepare(call.targets, rows), segments=also, **call.inputs)


@inside
def test_rows_that_meet_nowhere_may_have_segments(reached):
    """A loss of rows, whose reduction goes over rows, with segments of prepared targets."""
    call, made = Call(), lambda: hl.Objective(ce=cross_entropy, z=z_loss, backend="triton")
    objective, ids = made(), torch.tensor([0, 0, 1, 1, 1, 2, 2, 2, -1])
    for turn in range(3):
        batch = hl.prepare(call.targets, hl.Segments.from_ids(ids, 3))
        found = [known(hl.Logits(call.logits), batch).loss for known in (objective, made())]
        assert torch.equal(*found) and (turn == 0 or reached[-2] is not None)


def few(seed=3):
    """Of fewer rows: the interpreter takes its time for each."""
    return Call(6, seed=seed)


class Taught:
    """A call with several teachers; `change` gives another one that differs in what is said."""

    def __init__(self, meet=False):
        self.meet, self.call, self.how = meet, few(), {"a": {}, "b": {}}
        self.told = {"a": few(11).logits, "b": few(12).logits}
        self.segments = hl.Segments.from_ids(torch.tensor([0, 0, 1, 2, 2, 2], device=DEVICE), 3)

    def made(self, backend="triton"):
        more = {"rl": hl.Term(gspo, reduction="seq_mean_token_mean")} if self.meet else {}
        terms = {
            "a": hl.Term(forward_kl, teacher="a", weight=0.7), "b": hl.Term(reverse_kl, teacher="b", temperature=2.0),
            "j": hl.Term(jsd, teacher="b", weight=0.3), "ce": cross_entropy,
        }  # fmt: skip
        return hl.Objective(**terms, **more, metrics=["entropy", "argmax"], backend=backend)

    def teachers(self):
        return {name: hl.Logits(x, **self.how[name]) for name, x in self.told.items()}

    def __call__(self, objective):
        call = self.call
        if not self.meet:
            call.inputs = {}
        elif not isinstance(call.targets, hl.Prepared):
            call.targets = hl.prepare(call.targets, self.segments)
        return call.change(more={**call.more, "teacher": self.teachers()})(objective)

    def tell(self, name, x=None, **how):
        self.told[name] = self.told[name] if x is None else x
        self.how[name] = how
        return self

    def ask(self, **said):
        self.call.change(**said)
        return self


class WithIds(Taught):
    def teachers(self):
        found = self.told["b"].log_softmax(-1).topk(5)
        return {**super().teachers(), "b": hl.Sparse(found.indices, found.values)}


def shifted(x, by):
    room = torch.zeros(len(x), x.shape[1] + 8, device=DEVICE)
    room[:, by : by + x.shape[1]] = x
    return room[:, by : by + x.shape[1]]


OTHER_TEACHERS = {  # and whether it is found as the call before it, which was alike
    "other values": (lambda c: c.tell("a", few(21).logits), True),
    "swapped": (lambda c: c.tell("a", c.told["b"]).tell("b", few(11).logits), True),
    "named in another order": (lambda c: setattr(c, "told", dict(reversed(c.told.items()))) or c, True),
    "weights": (lambda c: c.ask(more={"weights": {"a": 2.0, "j": 0.1}}), True),
    "a weight on the device": (
        lambda c: c.ask(more={"weights": {"a": torch.tensor(2.0, device=DEVICE)}}), False,
    ),
    "a term switched off": (lambda c: c.ask(more={"weights": {"j": 0.0}}), False),
    "a teacher's temperature": (lambda c: c.tell("b", temperature=0.5), True),
    "its temperature as a tensor": (lambda c: c.tell("b", temperature=torch.tensor(0.5, device=DEVICE)), False),
    "its temperature per row": (lambda c: c.tell("b", temperature=ROWS[:6] + 1.5), False),
    "the student's temperature": (lambda c: c.ask(source={"temperature": 0.5}), True),
    "the student's temperature per row": (lambda c: c.ask(source={"temperature": ROWS[:6] + 1.5}), False),
    "scale, softcap": (lambda c: c.tell("a", scale=0.7, softcap=5.0).ask(source={"scale": 0.8}), True),
    "a teacher in bfloat16": (lambda c: c.tell("a", c.told["a"].bfloat16()), True),
    "a student in bfloat16": (lambda c: c.ask(logits=c.call.logits.bfloat16()), True),
    "a student in float16": (lambda c: c.ask(logits=c.call.logits.half()), False),
    "a teacher in float64": (lambda c: c.tell("a", c.told["a"].double()), False),
    "a wider row stride": (lambda c: c.tell("b", shifted(c.told["b"], 0)), True),
    "columns from the fourth on": (lambda c: c.tell("b", shifted(c.told["b"], 4)), True),
    "columns off a boundary": (lambda c: c.tell("b", shifted(c.told["b"], 3)), True),
    "columns apart": (lambda c: c.tell("b", c.told["b"].t().contiguous().t()), True),
    "columns apart, no gradient": (lambda c: c.tell("b", c.told["b"].t().contiguous().t()).ask(grad=False), True),
    "a student off a boundary": (lambda c: c.ask(logits=shifted(c.call.logits, 3)), True),
    "a narrower teacher": (lambda c: c.tell("b", c.told["b"][:, :33].contiguous()), False),
    "ids in place of a teacher": (lambda c: setattr(c, "__class__", WithIds) or c, False),
    "ignored rows": (lambda c: c.ask() if c.call.ignoring(2, 5) else c, True),
    "no gradient": (lambda c: c.ask(grad=False), True),
    "forward_backward": (lambda c: c.ask(direct=True), True),
    "in place": (lambda c: c.ask(source={"inplace": True}), False),
    "num_items": (lambda c: c.ask(more={"num_items": 4}), True),
    "grad_scale": (lambda c: c.ask(more={"grad_scale": 3.0}), True),
    "no host read": (lambda c: c.ask(more={"host_read": False}) if c.call.ignoring(2) else c, True),
}  # fmt: skip


def slowly(call):
    """A first call that does not become one that later calls find."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(evaluate, "make_fast_path", lambda *call: None)
        return call(call.made())


LOOKED_AT = {name for name in OTHER_TEACHERS if name.startswith("columns") or name == "a student off a boundary"}


@inside
@pytest.mark.parametrize("meet", [False, True])
def test_one_thing_changes_next_to_several_teachers(meet, reached, monkeypatch):
    looked, look = [], Settles._make
    monkeypatch.setattr(Settles, "_make", lambda *call: looked.append(call) or look(*call))
    plain, names = Taught(meet), [*OTHER_TEACHERS]
    objective, truth = plain.made(), slowly(plain)  # the objective has seen all calls before this one
    names = names if not meet else ["other values", "scale, softcap", "columns off a boundary", "ignored rows"]
    for name in names:
        change, is_found = OTHER_TEACHERS[name]
        made = lambda change=change: change(Taught(meet))
        expected = slowly(made())
        for _ in range(2):
            del reached[:], looked[:]
            same(made()(objective), expected)
        assert (reached[-1] is not None) == is_found, name
        assert bool(looked) == (name in LOOKED_AT), name  # or what an earlier call launched is launched again
        same(Taught(meet)(objective), truth)
        for key, value in made()(plain.made("torch")).items():
            if expected[key].dtype == torch.float32 and not name.startswith("a student in"):
                torch.testing.assert_close(expected[key], value, rtol=1e-4, atol=1e-5, msg=f"{name}: {key} differs")


@runs
@pytest.mark.parametrize("lines", [False, True])
def test_later_calls_with_several_teachers(lines, reached):
    """Without targets; facts pull too, once more as well, and what was written to is told by its name."""
    plain, shape = Taught(), (3, 3, V) if lines else (N, V)
    terms = {name: term for name, term in plain.made().terms.items() if name != "ce"}
    made = lambda: hl.Objective(**terms, backend="triton")
    objective = made()
    for seed in range(3):
        found = []
        for known in (objective, made()):
            x = Call(seed=seed).logits.view(shape).requires_grad_()
            told = {name: Call(seed=seed + i).logits.view(shape) for i, name in ((5, "a"), (9, "b"))}
            out = known(hl.Logits(x), teacher={name: hl.Logits(z, temperature=1.3) for name, z in told.items()})
            assert known is not objective or seed == 0 or reached[-1] is not None
            (out.loss + sum(f.sum() for f in out.facts.values() if f.requires_grad)).backward(retain_graph=True)
            out.loss.backward(retain_graph=True)
            found.append({"loss": out.loss.detach(), "grad": x.grad})
            told["b"].add_(1.0)
            with pytest.raises(RuntimeError, match=r"teacher\['b'\].logits: modified by an inplace operation"):
                out.loss.backward()
        same(*found)


BAD = {
    "a target that is out of range": lambda c: c.targets.__setitem__(3, V),
    "a negative target": lambda c: c.targets.__setitem__(3, -5),
    "targets of another shape": lambda c: c.change(targets=c.targets[:-1]),
    "float targets": lambda c: c.change(targets=c.targets.float()),
    "targets elsewhere": lambda c: c.change(targets=c.targets.to("meta")),
    "no targets": lambda c: c.change(targets=None),
    "an input of another shape": lambda c: c.inputs.update(advantage=ROWS[:-1]),
    "an input elsewhere": lambda c: c.inputs.update(advantage=ROWS.to("meta")),
    "an input nobody asks for": lambda c: c.inputs.update(advantages=ROWS),
    "None for an input nobody asks for": lambda c: c.inputs.update(advantages=None),
    "a missing input": lambda c: c.inputs.pop("advantage"),
    "a missing input, given as None": lambda c: c.inputs.update(advantage=None),
    "a log-probability in bfloat16": lambda c: c.inputs.update(old_logprob=ROWS.bfloat16()),
    "a list for an input": lambda c: c.inputs.update(advantage=[1.0]),
    "a weight of no term": lambda c: c.change(more={"weights": {"zz": 1.0}}),
    "a weight that is NaN": lambda c: c.change(more={"weights": {"z": float("nan")}}),
    "a weight that is text": lambda c: c.change(more={"weights": {"z": "1"}}),
    "a count below 0": lambda c: c.change(more={"num_items": -1}),
    "segments that count below 0": lambda c: c.change(more={"num_segments": -1}),
    "a count that is a vector": lambda c: c.change(more={"num_items": ROWS}),
    "grad_scale True": lambda c: c.change(more={"grad_scale": True}),
    "grad_scale infinite": lambda c: c.change(more={"grad_scale": float("inf")}),
    "ids for segments": lambda c: c.change(more={"segments": torch.zeros(N)}),
    "a teacher nobody looks at": lambda c: c.change(more={"teacher": hl.Logits(c.logits)}),
    "in place on a leaf": lambda c: c.change(source={"inplace": True, "temperature": 0.0}),
}


@inside
@pytest.mark.parametrize("name", BAD)
def test_what_is_wrong_is_said_as_the_first_time(name, played):
    objective, said = mix(), []
    for i, known in enumerate((mix(), objective)):
        for _ in range(2 * i):
            Call()(known)
        call = Call()
        BAD[name](call)
        with pytest.raises((TypeError, ValueError)) as error:
            call(known)
        said.append((type(error.value), str(error.value)))
    assert said[0] == said[1]


@runs
@pytest.mark.parametrize(("rows", "weights"), [(1, [2.0]), (9001, [0.5]), (2500, [1.0, -2.0, 0.0, 0.25, 3.0])])
def test_sums_over_more_rows_than_a_block(rows, weights):
    wide = torch.randn(9, rows + 3, device=DEVICE)
    found = wide.flatten()[: 9 * rows].view(9, rows)
    told = [w if i % 2 else torch.tensor(w, device=DEVICE) for i, w in enumerate(weights)]
    sums, loss = triton_totals.totals(types.SimpleNamespace(term_values=(found, 3)), told)
    truth = found[3 : 3 + len(weights)].double().sum(1)
    torch.testing.assert_close(sums.double(), truth, rtol=1e-5, atol=1e-4)
    expected = (truth * torch.tensor(weights, device=DEVICE)).sum()
    torch.testing.assert_close(loss.double(), expected, rtol=1e-5, atol=1e-3)


@runs
@pytest.mark.parametrize("rows", [1, 9001])
def test_targets_are_counted(rows):
    targets = torch.randint(3, 90, (rows + 1,), device=DEVICE)[:rows]
    targets[rows // 2 :: 3] = -100
    stats = hl.prepare(targets).stats
    numbers, mean, valid, held = triton_totals.count_targets(targets)
    assert torch.equal(valid, targets != -100) and held is None
    assert numbers[0] == stats.valid and (not stats.valid or numbers.tolist()[1:] == [stats.low, stats.high])
    assert float(mean) == 1 / max(1, stats.valid)


@runs
@pytest.mark.parametrize("low", [-1, 0, -7])
@pytest.mark.parametrize("rows", [1, 9001])
def test_segments_are_counted_with_them(rows, low):
    """The numbers of `hl.prepare`; ids below -1 and above all segments are told of whether their rows count or not."""
    targets = torch.randint(3, 90, (rows,), device=DEVICE)
    ids = torch.randint(low, 50, (rows,), device=DEVICE)
    targets[rows // 2 :: 3] = -100
    numbers, mean, valid, held = triton_totals.count_targets(targets, ids)
    expected = prepared.target_numbers(targets, hl.Segments(ids, 60))
    assert torch.equal(numbers[3:], expected[3:5]) and torch.equal(held, ids.masked_fill(~valid, -1))
    alone = triton_totals.count_targets(targets)
    assert torch.equal(numbers[:3], alone.numbers) and torch.equal(mean, alone.one_token)
    stats = prepared.Stats.read(numbers)
    assert not stats.sorted and (stats.unassigned, stats.extreme_id) == tuple(expected[3:5].tolist())


@inside
def test_forms_do_not_pile_up(played):
    objective, call = hl.Objective(**{f"t{i}": cross_entropy for i in range(7)}, backend="triton"), Call(n=2)
    call.change(inputs={}, grad=False)
    for i in range(80):
        call.change(more={"weights": {f"t{k}": 0.0 for k in range(7) if i >> k & 1}})(objective)
    assert len(objective.plans.forms) == 64


def captured(step):
    """A CUDA graph of a step, and what it writes to, after calls that compile."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    return graph, out


@pytest.mark.gpu
def test_a_later_call_is_part_of_a_cuda_graph():
    objective, call = mix(), Call(n=64, v=1024)
    batch = hl.prepare(call.targets)
    x = call.logits.clone()
    step = lambda: objective.forward_backward(hl.Logits(x), batch, **call.inputs)
    graph, out = captured(step)
    x.copy_(call.logits.flip(0))
    graph.replay()
    truth = mix().forward_backward(hl.Logits(x.clone()), batch, **call.inputs)
    assert torch.equal(out.loss, truth.loss) and torch.equal(out.grads.logits, truth.grads.logits)
    assert float(out.metrics["accuracy"]) == float(truth.metrics["accuracy"])


@pytest.mark.gpu
def test_plain_targets_and_segments_are_part_of_a_cuda_graph():
    """They are counted and put in order in every replay."""
    objective, call = hl.Objective(rl=hl.Term(gspo, reduction="seq_mean_token_mean")), Call(n=300, v=64)
    ids, x, targets = torch.arange(300, device=DEVICE) // 10, call.logits.clone(), call.targets
    how = {"segments": hl.Segments(ids, 40), "host_read": False, **call.inputs}
    step = lambda: objective.forward_backward(hl.Logits(x), targets, **how)
    graph, out = captured(step)
    for seed in range(3):
        other = Call(n=300, v=64, seed=seed)
        x.copy_(other.logits)
        targets.copy_(other.targets.masked_fill(other.targets % 7 == 0, -100))
        ids.copy_(torch.randperm(300, device=DEVICE) % 30)
        graph.replay()
        torch.cuda.synchronize()
        exact = {n: v.double() for n, v in call.inputs.items()}
        truth = hl.Objective(rl=hl.Term(gspo, reduction="seq_mean_token_mean"), backend="torch")
        want = truth.forward_backward(hl.Logits(x.double()), targets, segments=hl.Segments(ids, 40), **exact)
        torch.testing.assert_close(out.loss.double(), want.loss, rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(out.grads.logits.double(), want.grads.logits, rtol=1e-3, atol=1e-7)
