"""Autograd's contract in the compiled form."""

import pytest
import torch

import headloss as hl
from headloss.losses import cross_entropy, entropy_bonus

N, V, D = 6, 11, 4


@pytest.fixture(autouse=True)
def _reset():
    torch._dynamo.reset()


def compiled(kind, fn, **options):
    """A compiled function of hidden or logits, whose outputs `fn` takes from the record."""
    objective = hl.Objective(ce=cross_entropy, h=entropy_bonus)
    weight, t = torch.randn(V, D), torch.arange(N)

    def call(x, targets=t):
        source = hl.Logits(x) if kind == "logits" else hl.Linear(x, weight)
        return fn(objective(source, targets))

    return torch.compile(call, backend="aot_eager", fullgraph=True), call


@pytest.mark.parametrize("what", ["loss", "fact", "both"])
@pytest.mark.parametrize("kind", ["logits", "linear"])
def test_second_derivative(kind, what):
    """Of a net that is not compiled: the graph leads through it, and the compiled part must not be a constant."""
    pulled = {"loss": lambda out: out.loss, "fact": lambda out: out.facts.entropy.sum()}
    pulled["both"] = lambda out: out.loss + out.facts.logprob.sum()
    call, eager = compiled(kind, pulled[what])
    net = torch.nn.Sequential(torch.nn.Linear(3, D), torch.nn.Tanh(), torch.nn.Linear(D, V if kind == "logits" else D))
    x, parameters = torch.randn(N, 3), list(net.parameters())
    want = torch.autograd.grad(eager(net(x)), parameters)
    for f in (call, eager):
        grads = torch.autograd.grad(f(net(x)), parameters, create_graph=True)
        for g, right in zip(grads, want, strict=True):
            torch.testing.assert_close(g.detach(), right)
        with pytest.raises(RuntimeError, match="differentiate twice|double backward"):
            torch.autograd.grad(sum(g.square().sum() for g in grads), parameters[0])


@pytest.mark.parametrize("kind", ["logits", "linear"])
def test_facts_share_no_memory_with_the_backward(kind):
    call, _ = compiled(kind, lambda out: (out.loss, out.facts.entropy, out.facts.logprob))
    x = torch.randn(N, V if kind == "logits" else D, requires_grad=True)
    loss, entropy, logprob = call(x)
    total = loss + entropy.sum() + logprob.sum()
    (want,) = torch.autograd.grad(total, x, retain_graph=True)
    for fact in (entropy, logprob):
        fact.data.fill_(7)
    torch.testing.assert_close(torch.autograd.grad(total, x)[0], want)


def test_changed_in_place():
    call, _ = compiled("logits", lambda out: out.loss)
    z, t = torch.randn(N, V, requires_grad=True), torch.arange(N)
    loss = call(z, t)
    t.copy_(t.flip(0))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("kind", ["logits", "linear"])
def test_exported(kind):
    """A graph without a compiler: the operators as they are."""

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.body = torch.nn.Linear(3, D if kind == "linear" else V)
            self.head = torch.nn.Parameter(torch.randn(V, D))

        def forward(self, x, t):
            source = hl.Linear(self.body(x), self.head) if kind == "linear" else hl.Logits(self.body(x))
            return hl.Objective(ce=cross_entropy)(source, t).loss

    x, t = torch.randn(N, 3), torch.arange(N)
    module = torch.export.export(Model(), (x, t)).module()
    parameters = [module.body.weight]
    want = torch.autograd.grad(module(x, t), parameters)
    grads = torch.autograd.grad(module(x, t), parameters, create_graph=True)
    torch.testing.assert_close(grads[0].detach(), want[0])
    with pytest.raises(RuntimeError, match="differentiate twice"):
        torch.autograd.grad(grads[0].sum(), parameters)


def test_captured_parameter():
    alpha = torch.nn.Parameter(torch.zeros(()))
    objective = hl.Objective(l=lambda logprob: -logprob * alpha.exp())
    t = torch.arange(N)
    call = torch.compile(lambda z: objective(hl.Logits(z), t).loss, backend="aot_eager")
    with pytest.raises(Exception, match="captures requires grad"):
        call(torch.randn(N, V, requires_grad=True))
