"""Autograd's contract: what the backward reads is kept, what it cannot give is refused.

Every test runs on the torch backend, and once more under Triton's interpreter in a process of its own.
"""

import functools
import math
import os
import sys
import warnings

import pytest
import torch
from torch.autograd import forward_ad
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

sys.path.insert(0, os.path.dirname(os.path.dirname(__file__)))
from interpreting import INSIDE, interpreted

import headloss as hl
from headloss.losses import cross_entropy, entropy_bonus, forward_kl, grpo, gspo, reverse_kl, tvd
from headloss.trace import gradient

BACKEND = "triton" if INSIDE else "torch"
N, V, D, K = 6, 11, 4, 3


def batch_mean(logprob, advantage):
    return (advantage - advantage.mean()) * -logprob


def sparse_kl(logp, logq):
    return logq.exp() * (logq - logp)


class Scene:
    """A call with everything that a backward may read, each in a tensor of its own."""

    def __init__(self, source="logits", teacher=None, ignored=False, memory="1GiB", host_read=True):
        self.kind, self.teacher_kind, self.memory, self.host_read = source, teacher, memory, host_read
        self.logits, self.hidden = torch.randn(N, V), torch.randn(N, D)
        self.weight, self.bias = torch.randn(V, D), torch.randn(V)
        self.leaves = [self.logits] if source == "logits" else [self.hidden, self.weight, self.bias]
        for x in self.leaves:
            x.requires_grad_()
        self.targets = torch.arange(N)
        if ignored:
            self.targets[2] = -100
        self.temperature = torch.linspace(1, 2, N)
        self.advantage, self.old = torch.randn(N), torch.randn(N) - 2
        self.ids = torch.tensor([0, 0, 0, 1, 1, 1])
        self.num_items, self.beta, self.scale = torch.tensor(5.0), torch.tensor(0.5), torch.tensor(2.0)
        self.teacher_logits, self.teacher_hidden = torch.randn(N, V), torch.randn(N, D)
        self.teacher_weight, self.teacher_temperature = torch.randn(V, D), torch.linspace(2, 1, N)
        self.teacher_ids = torch.arange(N * K).view(N, K) % V
        self.teacher_logprobs = torch.randn(N, K).log_softmax(-1) - 0.5

    def source(self, **more):
        if self.kind == "logits":
            return hl.Logits(self.logits * 1, temperature=self.temperature, **more)
        # temperature as a scalar tensor: the other form
        return hl.Linear(self.hidden, self.weight, self.bias, temperature=self.temperature[0], memory=self.memory)

    def teacher(self):
        if self.teacher_kind == "logits":
            return hl.Logits(self.teacher_logits, temperature=self.teacher_temperature)
        if self.teacher_kind == "linear":
            return hl.Linear(self.teacher_hidden, self.teacher_weight)
        return hl.Sparse(self.teacher_ids, self.teacher_logprobs)

    def objective(self):
        terms = {"ce": cross_entropy, "rl": hl.Term(grpo, reduction="seq_mean_token_mean"), "h": entropy_bonus}
        if self.teacher_kind in ("logits", "linear"):
            terms |= {"kl": forward_kl, "back": reverse_kl, "tv": tvd}
        elif self.teacher_kind == "sparse":
            terms |= {"kl": hl.Term(sparse_kl, tail="bucket")}
        if self.kind == "batch":
            terms |= {"b": batch_mean}
        return hl.Objective(**terms, metrics=["accuracy", "entropy"], backend=BACKEND)

    def call(self, objective=None, **more):
        objective = objective or self.objective()
        if self.teacher_kind is not None:
            more["teacher"] = self.teacher()
        return objective(
            self.source(), self.targets, segments=hl.Segments.from_ids(self.ids), num_items=self.num_items,
            weights={"ce": self.beta}, grad_scale=self.scale, advantage=self.advantage, old_logprob=self.old,
            host_read=self.host_read, **more,
        )  # fmt: skip

    def grads(self, loss, **more):
        return torch.autograd.grad(loss, self.leaves, **more)


SCENES = {
    "logits": Scene,
    "logits, rows dropped": lambda: Scene(ignored=True),
    "logits, rows masked": lambda: Scene(ignored=True, host_read=False),
    "logits, dense teacher": lambda: Scene(teacher="logits"),
    "logits, linear teacher": lambda: Scene(teacher="linear"),
    "logits, sparse teacher": lambda: Scene(teacher="sparse"),
    "linear": lambda: Scene("linear"),
    "linear, many chunks": lambda: Scene("linear", memory=4 * V * 3),
    "linear, dense teacher": lambda: Scene("linear", teacher="logits", ignored=True),
    "linear, sparse teacher": lambda: Scene("linear", teacher="sparse"),
}
EVERY = ("targets", "temperature", "advantage", "old", "ids", "num_items", "beta", "scale")
EVERY = ("targets", "temperature", "ids") if INSIDE else EVERY  # the interpreter is slow
NAMES = {
    "old": "old_logprob", "ids": "segments", "beta": "weights['ce']", "scale": "grad_scale",
    "teacher_logits": "teacher.logits", "teacher_hidden": "teacher.hidden", "teacher_weight": "teacher.weight",
    "teacher_temperature": "teacher.temperature", "teacher_ids": "teacher.ids", "teacher_logprobs": "teacher.logprobs",
}  # fmt: skip
OF_TEACHER = {
    "logits": ("teacher_logits", "teacher_temperature"),
    "linear": ("teacher_hidden", "teacher_weight"),
    "sparse": ("teacher_ids", "teacher_logprobs"),
}


def change(x):
    with torch.no_grad():
        x.copy_(x.flip(0)) if x.ndim else x.mul_(2)


@pytest.mark.parametrize("name", SCENES)
def test_changed_in_place(name):
    """Whatever a call was given raises and is named: in the loss, in a fact, and in a second backward."""
    scene = SCENES[name]()
    objective = scene.objective()
    for what in (*EVERY, *OF_TEACHER.get(scene.teacher_kind, ()), *(() if scene.kind == "logits" else ("weight",))):
        out = scene.call(objective)
        scene.grads(out.loss, retain_graph=True)
        change(getattr(scene, what))
        label = NAMES.get(what, what).replace("[", r"\[").replace("]", r"\]")
        for pulled in (out.loss, out.facts.logprob.sum(), out.facts.entropy.sum()):
            with pytest.raises(RuntimeError, match=f"^{label}: modified by an inplace operation"):
                scene.grads(pulled, retain_graph=True)
        change(getattr(scene, what))


@pytest.mark.parametrize("prepared", [False, True])
@pytest.mark.parametrize("shape", [(N,), (2, 3)])
def test_changed_in_place_later_calls(prepared, shape):
    """Plain calls on logits, which have a path of their own from the second on."""
    objective = hl.Objective(ce=cross_entropy, rl=grpo, metrics=["accuracy"], backend=BACKEND)
    advantage, old, beta, items = torch.randn(shape), torch.randn(shape), torch.tensor(0.5), torch.tensor(7.0)
    z = torch.randn(*shape, V, requires_grad=True)
    for what in ("targets", "advantage", "old_logprob", "weights['rl']", "num_items", "grad_scale", None):
        targets, scale = torch.arange(N).view(shape), torch.tensor(1.5)
        given = {"targets": targets, "advantage": advantage, "old_logprob": old}
        given |= {"weights['rl']": beta, "num_items": items, "grad_scale": scale}
        out = objective(
            hl.Logits(z), hl.prepare(targets) if prepared else targets, advantage=advantage, old_logprob=old,
            weights={"rl": beta}, num_items=items, grad_scale=scale,
        )  # fmt: skip
        torch.autograd.grad(out.loss, z, retain_graph=True)
        if what is None:
            torch.autograd.grad([out.loss, out.facts.logprob.sum()], z)
            break
        change(given[what])
        for pulled in (out.loss, out.facts.logprob.sum()):
            with pytest.raises(RuntimeError, match="modified by an inplace operation") as error:
                torch.autograd.grad(pulled, z, retain_graph=True)
            assert str(error.value).startswith(f"{what}:")


@pytest.mark.parametrize("name", ["logits", "logits, rows masked", "linear"])
def test_facts_changed_in_place(name):
    """`row_facts`: its targets and its temperature."""
    scene = SCENES[name]()
    for what in ("targets", "temperature"):
        facts = hl.row_facts(
            scene.source(), scene.targets, ("logprob", "entropy"), backend=BACKEND, host_read=scene.host_read
        )
        change(getattr(scene, what))
        with pytest.raises(RuntimeError, match=f"^{what}: modified by an inplace operation"):
            scene.grads(facts.logprob.sum())
        change(getattr(scene, what))


@pytest.mark.parametrize("name", SCENES)
def test_saved_tensor_hooks(name):
    """What a hook keeps is what the backward reads: a copy on the host is not changed by what happens here."""
    scene = SCENES[name]()
    loss = lambda out: out.loss + out.facts.entropy.sum()
    want = scene.grads(loss(scene.call()))
    with torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda x: x):
        out = scene.call()
        pulled = loss(out)
    scene.grads(out.loss, retain_graph=True)  # what was made in the visit is gone: read again
    for what in (*EVERY, *OF_TEACHER.get(scene.teacher_kind, ())):
        change(getattr(scene, what))
    for got, right in zip(scene.grads(pulled), want, strict=True):
        torch.testing.assert_close(got, right)


@pytest.mark.parametrize("name", ["logits", "linear", "linear, dense teacher"])
def test_checkpoint(name):
    scene = SCENES[name]()
    call = lambda _: scene.call().loss
    want = scene.grads(call(None))
    got = scene.grads(checkpoint(call, scene.leaves[0], use_reentrant=False))
    for x, y in zip(got, want, strict=True):
        torch.testing.assert_close(x, y)


def test_inference_tensors():
    """Targets, inputs and teachers from inference mode: autograd saves none of them, and the gradient is the same."""
    scene = Scene(teacher="logits")
    pulls = lambda out: [out.loss, *(x.sum() for x in out.facts.values() if x.requires_grad)]  # facts read them again
    want = scene.grads(pulls(scene.call()))
    with torch.inference_mode():
        for what in ("targets", "temperature", "advantage", "old", "beta", "num_items", "teacher_logits"):
            setattr(scene, what, getattr(scene, what).clone())
    out = scene.call()
    with torch.inference_mode():
        change(scene.targets)
        change(scene.temperature)
    for x, y in zip(scene.grads(pulls(out)), want, strict=True):
        torch.testing.assert_close(x, y)


@pytest.mark.parametrize("kind", ["Logits", "Linear"])
@pytest.mark.parametrize("how", ["facts", "meeting", "twice"])
def test_a_teacher_from_inference_mode_that_is_written_to(how, kind):
    """torch counts no writes to it, and a backward that reads it again sees them all the same."""
    hidden, weight = torch.randn(N, 4, requires_grad=True), torch.randn(V, 4)
    with torch.inference_mode():
        u, w = torch.randn(N, V), torch.randn(V, 5)
        v = torch.randn(N, 5)
        v[2, 3] = u[2, 1] = math.nan  # of a row that is ignored
    written, teacher = (u, hl.Logits(u)) if kind == "Logits" else (v, hl.Linear(v, w))
    targets = torch.arange(N) % V
    targets[2] = -100

    def meeting(teacher_cross_entropy):
        return teacher_cross_entropy * teacher_cross_entropy.detach().mean()

    def call():
        if how == "facts":
            facts = hl.row_facts(
                hl.Linear(hidden, weight), targets, ("teacher_cross_entropy",), teacher=teacher, backend=BACKEND
            )
            return facts.teacher_cross_entropy.sum()
        objective = hl.Objective(kd=meeting if how == "meeting" else forward_kl, backend=BACKEND)
        memory = V * 8 if how == "meeting" else "1GiB"  # where all rows fit, the forward makes the gradient
        return objective(hl.Linear(hidden, weight, memory=memory), targets, teacher=teacher).loss

    grads = lambda loss: torch.autograd.grad(loss, hidden, retain_graph=True)[0]
    loss = call()
    want = grads(loss)
    torch.testing.assert_close(grads(loss), want)
    loss = call()
    _ = grads(loss) if how == "twice" else None
    with torch.inference_mode():
        written[4] += 1
    with pytest.raises(RuntimeError, match=r"teacher\.(logits|hidden): modified by an inplace .*inference_mode"):
        grads(loss)


def test_a_call_that_autograd_cannot_record_says_so_by_name():
    """Hidden states of inference mode, and a transform of torch.func that follows none of the call's tensors."""
    objective = hl.Objective(ce=cross_entropy, backend=BACKEND)
    weight, targets = torch.randn(V, D, requires_grad=True), torch.arange(N) % V
    with torch.inference_mode():
        hidden = torch.randn(N, D)
    for call in (
        lambda x: objective(hl.Linear(x, weight), targets).loss,
        lambda x: hl.row_facts(hl.Linear(x, weight), targets, backend=BACKEND).logprob.sum(),
    ):
        with pytest.raises(RuntimeError, match=r"^hidden: was made under torch.inference_mode\(\).*hidden.clone\(\)"):
            call(hidden)
        plain = hidden.clone()
        assert call(plain).requires_grad
        with pytest.raises(RuntimeError, match="^weight: requires grad and the call is made inside a transform"):
            torch.func.grad(lambda s, call=call, x=plain: call(x) * s)(torch.tensor(2.0))


@pytest.mark.parametrize("name", SCENES)
def test_facts_share_no_memory_with_the_backward(name):
    """Whatever is written to facts, terms and metrics: gradients stay what they are."""
    scene = SCENES[name]()
    objective = scene.objective()
    for _ in range(2):
        out = scene.call(objective)
        want = scene.grads(out.loss, retain_graph=True)
        right = scene.grads([x.sum() for x in out.facts.values() if x.requires_grad], retain_graph=True)
        for x in (*out.facts.values(), *out.terms.values(), *(p for m in out.metrics.values() for p in m.parts)):
            x.detach().zero_()
            x.data.fill_(7)
        for got, x in zip(scene.grads(out.loss, retain_graph=True), want, strict=True):
            torch.testing.assert_close(got, x)
        pulled = scene.grads([x.sum() for x in out.facts.values() if x.requires_grad])
        for got, x in zip(pulled, right, strict=True):
            torch.testing.assert_close(got, x)


def test_facts_of_later_calls_share_no_memory():
    objective = hl.Objective(ce=cross_entropy, h=entropy_bonus, metrics=["accuracy", "entropy"], backend=BACKEND)
    z, t = torch.randn(N, V, requires_grad=True), torch.arange(N)
    for _ in range(3):
        out = objective(hl.Logits(z), t)
        (want,) = torch.autograd.grad(out.loss + out.facts.entropy.sum(), z, retain_graph=True)
        entropy = float(out.metrics["entropy"])
        for x in out.facts.values():
            x.data.fill_(7)
        (got,) = torch.autograd.grad(out.loss + out.facts.entropy.sum(), z)
        torch.testing.assert_close(got, want)
        assert entropy == float(objective(hl.Logits(z), t).metrics["entropy"])


def test_row_facts_share_no_memory():
    z = torch.randn(N, V, requires_grad=True)
    facts = hl.row_facts(hl.Logits(z), None, ("entropy", "sum_p2", "lse"), backend=BACKEND)
    total = sum(x.sum() for x in facts.values())
    for x in facts.values():
        x.data.zero_()
    (got,) = torch.autograd.grad(total, z)
    log_p = z.double().log_softmax(-1)
    dense = -(log_p.exp() * log_p).sum() + (2 * log_p).exp().sum() + z.double().logsumexp(-1).sum()
    torch.testing.assert_close(got, torch.autograd.grad(dense, z)[0])


# A second derivative.


def net_and_loss(kind):
    """A small net, and a loss of what it puts out."""
    net = torch.nn.Sequential(torch.nn.Linear(3, D), torch.nn.Tanh(), torch.nn.Linear(D, D if kind == "linear" else V))
    weight, t, x = torch.randn(V, D), torch.arange(N), torch.randn(N, 3)
    objective = hl.Objective(ce=cross_entropy, backend=BACKEND)

    def loss():
        source = hl.Linear(net(x), weight) if kind == "linear" else hl.Logits(net(x))
        if kind == "facts":
            return -hl.row_facts(source, t, backend=BACKEND).logprob.mean()
        return objective(source, t).loss

    return net, loss


@pytest.mark.parametrize("kind", ["logits", "linear", "facts"])
def test_second_derivative(kind):
    """Raises where it is used, though the incoming gradient needs none; a graph that nobody uses is fine."""
    net, loss = net_and_loss(kind)
    for _ in range(2):
        parameters = list(net.parameters())
        want = torch.autograd.grad(loss(), parameters)
        grads = torch.autograd.grad(loss(), parameters, create_graph=True)
        for g, right in zip(grads, want, strict=True):
            torch.testing.assert_close(g.detach(), right)
        for parameter in parameters[:2]:
            with pytest.raises(RuntimeError, match="differentiate twice"):
                torch.autograd.grad(sum(g.square().sum() for g in grads), parameter, retain_graph=True)
        loss().backward(create_graph=True)
        with pytest.raises(RuntimeError, match="differentiate twice"):
            sum(p.grad.sum() for p in parameters).backward()
        net.zero_grad()


def test_second_derivative_of_an_input():
    value = torch.randn(N, requires_grad=True)
    objective = hl.Objective(l=lambda logprob, value: -logprob * value.square(), backend=BACKEND)
    z = torch.randn(N, V, requires_grad=True)
    for leaf in (value, z):
        for by in (value, z):
            (g,) = torch.autograd.grad(
                objective(hl.Logits(z), torch.arange(N), value=value).loss, leaf, create_graph=True
            )
            with pytest.raises(RuntimeError, match="differentiate twice"):
                torch.autograd.grad(g.sum(), by)


@pytest.mark.parametrize("seed", [False, True])
def test_second_derivative_of_the_incoming_gradient(seed):
    z = torch.randn(N, V, requires_grad=True)
    incoming = torch.ones((), requires_grad=seed)
    loss = hl.Objective(ce=cross_entropy, backend=BACKEND)(hl.Logits(z), torch.arange(N)).loss
    (g,) = torch.autograd.grad(loss, z, incoming, create_graph=True)
    assert g.requires_grad
    with pytest.raises(RuntimeError, match="differentiate twice"):
        torch.autograd.grad(g.sum(), incoming if seed else z)


def test_functional_and_func():
    objective, t = hl.Objective(ce=cross_entropy, backend=BACKEND), torch.arange(N)
    z, v = torch.randn(N, V), torch.randn(N, V)
    loss = lambda z: objective(hl.Logits(z), t).loss
    functional = torch.autograd.functional
    torch.testing.assert_close(
        functional.jacobian(loss, z), functional.jacobian(lambda z: F.cross_entropy(z, t), z)
    )  # first order is fine
    for wrong in (
        lambda: functional.hessian(loss, z),
        lambda: functional.hvp(loss, z, v),
        lambda: functional.vhp(loss, z, v),
        lambda: functional.jvp(loss, z, v),
    ):
        with pytest.raises(RuntimeError, match="differentiate twice"):
            wrong()
    for wrong in (
        lambda: torch.func.grad(loss)(z),
        lambda: torch.func.grad(lambda z: torch.func.grad(loss)(z).sum())(z),
        lambda: torch.func.hessian(loss)(z),
        lambda: torch.func.jvp(loss, (z,), (v,)),
        lambda: torch.func.vmap(loss)(torch.stack([z, v])),
        lambda: torch.func.vmap(lambda z: objective.forward_backward(hl.Logits(z), t).loss)(torch.stack([z, v])),
        lambda: torch.func.vmap(lambda z: hl.row_facts(hl.Logits(z), t, backend=BACKEND).logprob)(torch.stack([z, v])),
    ):
        with pytest.raises(RuntimeError, match="logits: is inside a transform of torch.func"):
            wrong()
    with pytest.raises(RuntimeError, match="targets: is inside a transform of torch.func"):
        torch.func.vmap(lambda t: objective(hl.Logits(z), t).loss)(torch.stack([t, t]))


def test_a_trace_that_would_keep_this_calls_targets():
    """`torch.jit.trace` writes down what is done to tensors, and nothing of what is read of them."""
    z, t = torch.randn(N, V), torch.arange(N)
    t[1] = -100
    for call in (
        lambda z, t: hl.Objective(ce=cross_entropy, backend=BACKEND)(hl.Logits(z), t).loss,
        lambda z, t: hl.Objective(ce=cross_entropy, backend=BACKEND)(hl.Linear(z, torch.randn(V, V)), t).loss,
        lambda z, t: hl.row_facts(hl.Logits(z), t, backend=BACKEND).logprob,
    ):
        call(z, t)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of torch.jit.trace itself
            with pytest.raises(RuntimeError, match=r"torch.jit.trace .* use torch.export or torch.compile"):
                torch.jit.trace(call, (z, t), check_trace=False)


def test_several_incoming_gradients():
    """`vmap` around a backward would write them all into one gradient."""
    objective, t = hl.Objective(ce=cross_entropy, backend=BACKEND), torch.arange(N)
    z, weight = torch.randn(N, V, requires_grad=True), torch.randn(V, N)
    ones, jacobian = torch.ones(2), torch.autograd.functional.jacobian
    for wrong in (
        lambda: torch.autograd.grad(objective(hl.Logits(z), t).loss, z, ones, is_grads_batched=True),
        lambda: jacobian(lambda h: torch.stack([objective(hl.Linear(h, weight), t).loss]), weight[:N], vectorize=True),
        lambda: jacobian(lambda z: hl.row_facts(hl.Logits(z), t, backend=BACKEND).logprob, z, vectorize=True),
    ):
        with pytest.raises(RuntimeError, match="several gradients come into one backward"):
            wrong()
    loss = objective(hl.Logits(z), t).loss
    with pytest.raises(RuntimeError, match="several gradients come into one backward"):
        torch.func.vmap(lambda g: torch.autograd.grad(loss, z, g)[0])(ones)


def test_a_transform_around_other_tensors():
    """Only what a transform follows is refused."""
    objective, t, z = hl.Objective(ce=cross_entropy, backend=BACKEND), torch.arange(N), torch.randn(N, V)
    want = objective(hl.Logits(z), t).loss
    torch.testing.assert_close(torch.func.vmap(lambda x: x + objective(hl.Logits(z), t).loss)(torch.zeros(2))[0], want)
    with forward_ad.dual_level():
        torch.testing.assert_close(objective(hl.Logits(z), t).loss, want)


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("kind", ["logits", "linear"])
def test_tangent(kind, grad):
    scene = Scene(kind, teacher="logits")
    objective = scene.objective()
    scene.call(objective)
    with torch.set_grad_enabled(grad), forward_ad.dual_level():
        for what in (*(("logits",) if kind == "logits" else ("hidden", "weight", "bias")), "advantage", "old"):
            kept = getattr(scene, what)
            setattr(scene, what, forward_ad.make_dual(kept, torch.ones_like(kept)))
            with pytest.raises(RuntimeError, match=f"{NAMES.get(what, what)}: carries a forward-mode tangent"):
                scene.call(objective)
            setattr(scene, what, kept)
        scene.teacher_logits = forward_ad.make_dual(scene.teacher_logits, torch.ones(N, V))
        with pytest.raises(RuntimeError, match="logits: carries a forward-mode tangent"):
            scene.call(objective)


def test_tangent_in_facts_and_forward_backward():
    z, t = torch.randn(N, V), torch.arange(N)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(z, torch.ones(N, V))
        for wrong in (
            lambda: hl.row_facts(hl.Logits(dual), t, backend=BACKEND),
            lambda: hl.Objective(ce=cross_entropy, backend=BACKEND).forward_backward(hl.Logits(dual), t),
        ):
            with pytest.raises(RuntimeError, match="logits: carries a forward-mode tangent"):
                wrong()


# What a function captures.

ALPHA = torch.nn.Parameter(torch.zeros(()))
HOLDER = {"alpha": ALPHA}


class Scaled(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.alpha = torch.nn.Parameter(torch.zeros(()))

    def forward(self, logprob):
        return self.method(logprob)

    def method(self, logprob):
        return -logprob * self.alpha.exp()


class Plain:
    alpha = torch.nn.Parameter(torch.zeros(()))

    def __call__(self, logprob):
        return -logprob * self.alpha.exp()


def by_global(logprob):
    return -logprob * ALPHA.exp()


def by_dict(logprob):
    return -logprob * HOLDER["alpha"].exp()


def by_helper(logprob):
    return by_global(logprob) * 2


def by_default(logprob, alpha=ALPHA):
    return -logprob * alpha.exp()


def with_alpha(logprob, *, alpha=None):
    return -logprob * alpha.exp()


def captured_forms():
    alpha = torch.nn.Parameter(torch.zeros(()))
    made = (alpha * 2).exp()  # not a leaf
    net = torch.nn.Linear(1, 1)
    yield "closure", lambda logprob: -logprob * alpha.exp()
    yield "not a leaf", lambda logprob: -logprob * made
    yield "module in a closure", lambda logprob: net(-logprob[:, None])[:, 0]
    yield "forward of a module", Scaled().forward
    yield "method", Scaled().method
    yield "object", Plain()
    yield "global", by_global
    yield "dict", by_dict
    yield "helper", by_helper
    yield "partial", functools.partial(with_alpha, alpha=alpha)
    yield "default", by_default
    yield "pure", hl.Term(by_global, pure=True)
    yield "added", lambda logprob: -logprob + alpha
    yield "nothing else", lambda logprob: alpha.expand(logprob.shape)


@pytest.mark.parametrize("trains", [True, False])
@pytest.mark.parametrize("name", [name for name, _ in captured_forms()])
def test_captured_tensor_that_requires_grad(name, trains):
    """Refused where gradients are recorded, whether the source wants one or not."""
    fn = dict(captured_forms())[name]
    objective = hl.Objective(ce=cross_entropy, mine=fn, backend=BACKEND)
    z, t = torch.randn(N, V, requires_grad=trains), torch.arange(N)
    h, w = torch.randn(N, D, requires_grad=trains), torch.randn(V, D)
    for source in (hl.Logits(z), hl.Linear(h, w)):
        with pytest.raises(ValueError, match=r"term 'mine' .*captures requires grad.*pass it as an input"):
            objective(source, t)
        with pytest.raises(ValueError, match="term 'mine' .*captures requires grad"):
            objective.forward_backward(source, t)
        with torch.no_grad():
            assert objective(source, t).loss.isfinite()  # an evaluation wants none


def test_captured_tensors_that_are_fine():
    """Without requires_grad, detached, in a metric, in a row weight; and as an input, with its gradient."""
    alpha, z, t = torch.nn.Parameter(torch.tensor(0.5)), torch.randn(N, V, requires_grad=True), torch.arange(N)
    plain = torch.tensor(0.5)
    metric = lambda logprob: logprob * alpha
    weight = lambda logprob: torch.ones_like(logprob) * alpha
    for term in (
        lambda logprob: -logprob * plain,
        lambda logprob: -logprob * alpha.detach(),
        hl.Term(cross_entropy, row_weight=weight),
    ):
        objective = hl.Objective(mine=term, metrics={"m": metric}, backend=BACKEND)
        out = objective(hl.Logits(z), t)
        torch.testing.assert_close(out.loss, 0.5 * F.cross_entropy(z, t))
        (g,) = torch.autograd.grad(out.loss, z)
        torch.testing.assert_close(g, torch.autograd.grad(0.5 * F.cross_entropy(z, t), z)[0])
    objective = hl.Objective(mine=lambda logprob, alpha: -logprob * alpha, backend=BACKEND)
    objective(hl.Logits(z), t, alpha=alpha).loss.backward()
    torch.testing.assert_close(alpha.grad, F.cross_entropy(z, t).detach())


def test_captured_by_a_divergence():
    alpha = torch.nn.Parameter(torch.ones(()))
    z, t = torch.randn(N, V, requires_grad=True), torch.arange(N)
    mine = lambda logp, logq: alpha * logq.exp() * (logq - logp)
    sparse = hl.Sparse(torch.arange(N * K).view(N, K) % V, torch.randn(N, K).log_softmax(-1) - 0.5)
    for teacher in (hl.Logits(torch.randn(N, V)), sparse):
        with pytest.raises(ValueError, match="term 'kl' .*captures requires grad"):
            hl.Objective(kl=mine)(hl.Logits(z), t, teacher=teacher)
        with torch.no_grad():
            hl.Objective(kl=mine)(hl.Logits(z), t, teacher=teacher)


# A divergence that a pull calls again.

FACTOR = 1.0


class Config:
    factor = 1.0


def of_a_number(logp, logq):
    return FACTOR * (logp.exp() - logq.exp()).abs()


def of_an_object(logp, logq):
    return Config.factor * (logp.exp() - logq.exp()).abs()


@pytest.mark.parametrize("how", ["again", "fact", "narrow"])
@pytest.mark.parametrize("kind", ["Logits", "Linear"])
@pytest.mark.parametrize("fn", [of_a_number, of_an_object] if BACKEND == "torch" else [of_a_number])
def test_what_a_divergence_reads_changes_before_its_pull(fn, kind, how, monkeypatch):
    if how == "narrow" and kind == "Linear":
        pytest.skip("its gradient is made in the forward pass")
    dtype = torch.float16 if how == "narrow" else torch.float32  # whose gradient waits for the caller's scale
    leaf = torch.randn(N, V if kind == "Logits" else D, dtype=dtype, requires_grad=True)
    source = hl.Logits(leaf) if kind == "Logits" else hl.Linear(leaf, torch.randn(V, D))
    teacher, objective = hl.Logits(torch.randn(N, V, dtype=dtype)), hl.Objective(d=fn, backend=BACKEND)

    def pulled(change):
        out = objective(source, torch.arange(N), teacher=teacher)
        value = next(iter(out.facts.values())).sum() if how == "fact" else out.loss
        first = torch.autograd.grad(out.loss, leaf, retain_graph=True)[0] if how == "again" else None
        with monkeypatch.context() as patch:
            if change:
                patch.setitem(globals(), "FACTOR", 3.0)
                patch.setattr(Config, "factor", 3.0)
            return first, torch.autograd.grad(value, leaf)[0]

    first, second = pulled(False)
    if first is not None:
        torch.testing.assert_close(second, first)
    with pytest.raises(RuntimeError, match=rf"{fn.__name__}\(\): reads something that has changed"):
        pulled(True)


# A gradient that goes nowhere.


def miss(argmax, targets):
    return (argmax != targets).float()


def margin(logprob, max_logprob):
    return max_logprob - logprob


def soft_margin(logprob, max_logprob):
    return max_logprob.detach() - logprob


def sure(max_logprob):
    return -max_logprob


def watched(logprob):
    return -logprob.detach()


def switched(logprob, *, on=False):
    return -logprob if on else torch.zeros_like(logprob)


def value_loss(value):
    return value.square()


def reads_a_value(logprob):
    return -logprob if float(logprob.detach().sum()) > 0 else torch.zeros_like(logprob)  # not traced


@pytest.fixture
def fresh():
    gradient._WARNED.clear()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="headloss")
        yield


@pytest.mark.parametrize("also", [False, True])
@pytest.mark.parametrize("fn", [miss, sure, watched])
@pytest.mark.parametrize("kind", ["logits", "linear"])
def test_no_gradient_path(fresh, fn, kind, also):
    """Refused alone and beside another term; not in an evaluation, and not when it is off."""
    terms = {"mine": fn} | ({"ce": cross_entropy} if also else {})
    objective = hl.Objective(**terms, backend=BACKEND)
    z, h, t = torch.randn(N, V, requires_grad=True), torch.randn(N, D, requires_grad=True), torch.arange(N)
    source = hl.Logits(z) if kind == "logits" else hl.Linear(h, torch.randn(V, D))
    with torch.no_grad():
        for _ in range(2):
            assert objective(source, t).loss.isfinite()
    for _ in range(2):
        with pytest.raises(ValueError, match=r"term 'mine' .*has no gradient"):
            objective(source, t)
        with pytest.raises(ValueError, match=r"term 'mine' .*has no gradient"):
            objective.forward_backward(source, t)
    if also:
        assert objective(source, t, weights={"mine": 0.0}).loss.requires_grad


def test_no_gradient_path_is_judged_by_the_call(fresh):
    """A constant that an option chose, an input that wants no gradient, a function that branches."""
    z, t = torch.randn(N, V, requires_grad=True), torch.arange(N)
    value = torch.randn(N, requires_grad=True)
    objective = functools.partial(hl.Objective, backend=BACKEND)
    off = objective(ce=cross_entropy, mine=switched)
    torch.testing.assert_close(off(hl.Logits(z), t).loss, F.cross_entropy(z, t))
    with pytest.raises(ValueError, match="term 'mine' .*has no gradient"):
        objective(mine=switched)(hl.Logits(z), t)
    assert objective(mine=hl.Term(switched, on=True))(hl.Logits(z), t).loss.requires_grad
    both = objective(ce=cross_entropy, v=value_loss)
    assert both(hl.Logits(z), t, value=value).loss.requires_grad
    assert both(hl.Logits(z.detach()), t, value=value).loss.requires_grad  # a frozen head
    with pytest.raises(ValueError, match="term 'v' .*has no gradient"):
        both(hl.Logits(z), t, value=value.detach())
    branching = objective(ce=cross_entropy, mine=reads_a_value)
    with pytest.warns(UserWarning, match="term 'mine' .*no gradient in this call"):
        branching(hl.Logits(z), t)
    branching(hl.Logits(z), t)  # once
    with pytest.raises(ValueError, match="term 'mine' .*has no gradient"):
        objective(mine=reads_a_value)(hl.Logits(z), t)


@pytest.mark.parametrize("fn", [margin, lambda logprob, max_logprob, table=[0.0]: max_logprob + table[0] - logprob])
def test_a_fact_without_a_gradient_is_named_once(fresh, fn):
    """Traced or not, first in an evaluation or not."""
    z, t = torch.randn(N, V, requires_grad=True), torch.arange(N)
    objective = hl.Objective(mine=fn, backend=BACKEND)
    with torch.no_grad():
        objective(hl.Logits(z), t)
        objective(hl.Logits(z), t)
    with pytest.warns(UserWarning, match="term 'mine' .*'max_logprob', which has none"):
        objective(hl.Logits(z), t)
    objective(hl.Logits(z), t).loss.backward()
    torch.testing.assert_close(z.grad, torch.autograd.grad(F.cross_entropy(z, t), z)[0])
    hl.Objective(mine=soft_margin, backend=BACKEND)(hl.Logits(z), t)


def test_our_losses_lose_nothing(fresh):
    scene = Scene(teacher="logits")
    scene.call().loss.backward()
    scene = Scene("linear", teacher="sparse")
    scene.call().loss.backward()
    hl.Objective(rl=gspo, backend=BACKEND)(
        hl.Logits(scene.logits.requires_grad_()), scene.targets, advantage=scene.advantage, old_logprob=scene.old,
        segments=hl.Segments.from_ids(scene.ids),
    )  # fmt: skip


# In place, on memory that is there once.


def overlapping():
    x = torch.randn(1, V, requires_grad=True)
    yield (x * 1).expand(N, V)
    yield (torch.randn(N, 1, requires_grad=True) * 1).expand(N, V)
    yield (torch.randn(1, 1, V, requires_grad=True) * 1).expand(2, 3, V)
    yield (torch.randn(N + V, requires_grad=True) * 1).unfold(0, V, 1)[:N]
    yield (torch.randn(N * V, requires_grad=True) * 1).as_strided((N, V), (V - 1, 1))


@pytest.mark.parametrize("form", range(5))
def test_inplace_on_memory_that_is_shared(form):
    objective = hl.Objective(ce=cross_entropy, backend=BACKEND)
    good = torch.randn(N, V, requires_grad=True) * 1
    t = torch.arange(N)
    objective(hl.Logits(good, inplace=True), t).loss.backward()  # a later call is as strict
    for call in (objective, objective.forward_backward):
        logits = list(overlapping())[form]
        before = logits.detach().clone()
        with pytest.raises(ValueError, match="inplace: logits of shape .* share memory"):
            call(hl.Logits(logits, inplace=True), t.view(logits.shape[:-1]))
        torch.testing.assert_close(logits.detach(), before)
        assert call(hl.Logits(logits), t.view(logits.shape[:-1])).loss.isfinite()


@pytest.mark.parametrize("view", [lambda x: x[:, 1:-1], lambda x: x.t().contiguous().t(), lambda x: x[::2]])
def test_inplace_on_views_that_are_not(view):
    objective = hl.Objective(ce=cross_entropy, backend=BACKEND)
    x = torch.randn(N, V, requires_grad=True)
    for inplace in (False, True):
        z = view(x * 1)
        t = torch.arange(len(z))
        objective(hl.Logits(z, inplace=inplace), t).loss.backward()
    torch.testing.assert_close(x.grad, 2 * torch.autograd.grad(F.cross_entropy(view(x), t), x)[0])


def value_loss_of(logprob, advantage):
    return -advantage * logprob


IN_THE_LOGITS = {  # what a call reads of (N, V + 2) numbers whose columns from 1 to V are its logits
    "advantage": (lambda x: {"advantage": x[:, 1]}, hl.Objective(a=value_loss_of, backend=BACKEND)),
    "advantage, by rows": (lambda x: {"advantage": x[0, :N]}, hl.Objective(a=value_loss_of, backend=BACKEND)),
    "teacher": (lambda x: {"teacher": hl.Logits(x[:, 2:])}, hl.Objective(k=forward_kl, backend=BACKEND)),
    "temperature": (lambda x: {"temperature": x[:, V].exp_()}, hl.Objective(ce=cross_entropy, backend=BACKEND)),
    "grad_scale": (lambda x: {"grad_scale": x[N - 1, V]}, hl.Objective(ce=cross_entropy, backend=BACKEND)),
}


@pytest.mark.parametrize("name", IN_THE_LOGITS)
def test_inplace_where_the_call_reads_something_else(name):
    """As with a value or a temperature in a column of its own, which the gradient writes over."""
    given, objective = IN_THE_LOGITS[name]
    for direct in (False, True):
        for inplace in (False, True):
            x = torch.randn(N, V + 2, requires_grad=not direct) * 1
            more = given(x.detach())
            source = hl.Logits(x[:, 1 : V + 1], temperature=more.pop("temperature", 1.0), inplace=inplace)
            call = functools.partial(objective.forward_backward if direct else objective, source, torch.arange(N))
            if not inplace:
                call(**more)
                continue
            before = x.detach().clone()
            with pytest.raises(ValueError, match=f"inplace: {name.split(',')[0]} lies in the memory of the logits"):
                call(**more)
            assert torch.equal(x.detach(), before)
            with torch.no_grad():
                objective(source, torch.arange(N), **more)  # nothing is overwritten


def test_inplace_next_to_something_else():
    """A column that is no part of the logits, and padding that is."""
    x, t = torch.randn(N, V + 2, requires_grad=True), torch.arange(N)
    objective = hl.Objective(a=value_loss_of, backend=BACKEND)
    for rest in (lambda x: x[:, 0], lambda x: x[:, V + 1]):
        got, want = (
            objective(hl.Logits(y[:, 1 : V + 1], inplace=inplace), t, advantage=rest(y.detach())).loss
            for inplace in (True, False)
            for y in (x * 1,)
        )
        torch.testing.assert_close(got, want)
        torch.testing.assert_close(*(torch.autograd.grad(loss, x)[0] for loss in (got, want)))
    y = x * 1
    with pytest.raises(ValueError, match="inplace: advantage lies"):
        objective(hl.Logits(y, vocab=V, inplace=True), t, advantage=y.detach()[:, V])
    with pytest.raises(ValueError, match="inplace: teacher lies"):
        hl.row_facts(
            hl.Logits(y[:, :V], inplace=True), want=("teacher_cross_entropy",), teacher=hl.Logits(y.detach()[:, 1:-1])
        )


test_under_the_interpreter = interpreted(__file__)


def test_compiled_autograd_is_refused() -> None:
    """It would trace the backward, whose gradients may be added where no graph sees it."""
    from torch._dynamo import utils

    enable = getattr(utils, "maybe_enable_compiled_autograd", None)
    if INSIDE or enable is None:
        pytest.skip("no such thing here")
    z = torch.randn(3, 5, requires_grad=True)
    loss = hl.Objective(ce=cross_entropy)(hl.Logits(z), torch.tensor([1, 2, 3])).loss
    with enable(True, fullgraph=False), pytest.raises(RuntimeError, match="compiled autograd cannot trace"):
        loss.backward()
    loss.backward()
    assert z.grad is not None
