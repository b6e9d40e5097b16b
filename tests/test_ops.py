"""The operators of a graph: their contract with torch, and what stands on it: export, checkpointing, fake tensors."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

import headloss as hl
from headloss.engine.arguments import CallArguments
from headloss.facts import VALUED
from headloss.graph import recipe, spec
from headloss.graph.compiled import constants_of
from headloss.graph.recipe import split_call
from headloss.losses import cross_entropy, gspo, gspo_token, jsd, z_loss

V, D = 29, 5
OBJECTIVE = hl.Objective(ce=cross_entropy, z=hl.Term(z_loss, weight=0.1), metrics=["entropy", "accuracy"])


def own(logprob: Tensor, lse: Tensor) -> Tensor:
    return -logprob + 0.01 * lse**2


OWN = hl.Objective(own=own)


class Model(nn.Module):
    def __init__(self, objective: hl.Objective = OBJECTIVE) -> None:
        super().__init__()
        self.body = nn.Linear(D, D, dtype=torch.float64)
        self.head = hl.FusedLMHead(D, V, bias=True, dtype=torch.float64)
        self.objective = objective

    def forward(self, x: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        out = self.head(self.body(x).tanh(), targets=targets, objective=self.objective)
        return out.loss, out.facts.logprob


def batch(rows: int, ignored: int = 2) -> tuple[Tensor, Tensor]:
    targets = torch.randint(V, (rows,)).index_fill(0, torch.randperm(rows)[:ignored], -100)
    return torch.randn(rows, D, dtype=torch.float64), targets


def grads(loss: Tensor, module: nn.Module) -> list[Tensor]:
    return list(torch.autograd.grad(loss, list(module.parameters())))


def same(found: Any, want: Any) -> None:
    torch.testing.assert_close(found, want, rtol=1e-9, atol=1e-9)


def arguments(
    source: Any, targets: Tensor, segments: Any = None, objective: Any = OBJECTIVE, teacher: Any = None, **inputs: Any
) -> Any:
    number = None if objective.is_portable(objective.key) else objective.traits.number
    found, constants = split_call(
        CallArguments(source, targets, segments, teacher, inputs=inputs), False, objective.traits, number
    )
    known = constants_of(objective, constants, host_read=True, direct=False)
    return found.tensors, found.sizes, known.recipe


def linear(rows: int) -> hl.Linear:
    hidden, weight, bias = (
        torch.randn(*shape, dtype=torch.float64).requires_grad_() for shape in ((rows, D), (V, D), (V,))
    )
    return hl.Linear(hidden, weight, bias)


def logits(rows: int) -> hl.Logits:
    return hl.Logits(torch.randn(rows, V, dtype=torch.float64).requires_grad_())


@pytest.mark.parametrize("source", [linear, logits])
def test_opcheck(source: Callable[[int], Any]) -> None:
    targets = batch(6)[1]
    torch.library.opcheck(torch.ops.headloss.visit.default, arguments(source(6), targets))
    policy = hl.Objective(rl=gspo_token)
    segments = hl.Segments.from_ids(torch.tensor([0, 1, 0, 1, 2, 2]), 3)
    advantage = torch.randn(6, dtype=torch.float64).requires_grad_()
    torch.library.opcheck(
        torch.ops.headloss.visit.default, arguments(source(6), targets, segments, policy, advantage=advantage)
    )


@pytest.mark.parametrize("source", [linear, logits])
def test_opcheck_of_the_pull(source: Callable[[int], Any]) -> None:
    tensors, sizes, text = arguments(source(6), batch(6)[1])
    known = spec.result_spec(recipe.read_recipe(text))
    with torch.no_grad():
        out = torch.ops.headloss.visit(tensors, sizes, text)
    n, saved = len(known.facts), (1 + 3 if isinstance(source(2), hl.Linear) else 0)
    valued = sum(fact.name in VALUED for fact in known.facts)
    kept = out[3 + n + saved : 5 + n + saved + valued]
    which = known.differentiable()
    pulls = [torch.randn(6, dtype=torch.float64) for _ in which]
    plain = [x.detach() for x in tensors]
    torch.library.opcheck(torch.ops.headloss.pull.default, (plain, sizes, kept, pulls, which, text))


def test_outputs_stand_apart() -> None:
    """Not in the memory of an input, nor of each other: a compiler may write over any of them."""
    for source in (linear(6), logits(6)):
        tensors, sizes, text = arguments(source, batch(6, 0)[1])
        out = torch.ops.headloss.visit(tensors, sizes, text)
        places = [x.untyped_storage().data_ptr() for x in (*tensors, *out) if x.numel()]
        assert len(set(places)) == len(places)
        assert all(x.untyped_storage().nbytes() == x.numel() * x.element_size() for x in out)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("compiled", [False, True])
def test_checkpointing(reentrant: bool, compiled: bool) -> None:
    torch._dynamo.reset()
    model = Model()
    x, targets = batch(7)
    x.requires_grad_()

    def step(x: Tensor, targets: Tensor) -> Tensor:
        loss, logprob = checkpoint(model, x, targets, use_reentrant=reentrant)  # type: ignore[misc]
        return loss + logprob.square().mean()

    loss, logprob = model(x, targets)
    want = torch.autograd.grad(loss + logprob.square().mean(), [x, *model.parameters()])
    if compiled and reentrant:
        pytest.skip("torch.compile knows the other kind only")
    run = torch.compile(step, backend="aot_eager", fullgraph=True) if compiled else step
    run(x, targets).backward()
    same([x.grad, *(p.grad for p in model.parameters())], want)


def test_export_and_run_on_other_data() -> None:
    model = Model()
    rows = torch.export.Dim("rows", min=2, max=4096)
    shapes = {"x": {0: rows}, "targets": {0: rows}}
    program = torch.export.export(model, batch(7), dynamic_shapes=shapes)
    assert any("headloss.visit" in str(node.target) for node in program.graph.nodes)
    for n in (7, 12):
        x, targets = batch(n)
        found, want = program.module()(x, targets), model(x, targets)
        same(found, want)
        assert found[0].requires_grad
    exported = program.module()
    found, want = exported(x, targets), model(x, targets)
    same(grads(found[0] + found[1].sum(), exported), grads(want[0] + want[1].sum(), model))


def test_inputs_of_flat_rows_can_have_any_number_of_them() -> None:
    """Marked, they are no table of the vocabulary: a graph need not ask whether there are as many rows as columns."""

    class Policy(nn.Module):
        def forward(self, hidden: Tensor, weight: Tensor, targets: Tensor, advantage: Tensor) -> Tensor:
            given = {"advantage": hl.PerRow(advantage), "old_logprob": hl.PerRow(advantage - 3)}
            return hl.Objective(rl=hl.losses.grpo)(hl.Linear(hidden, weight), targets, **given).loss

    def arguments(rows: int) -> tuple[Tensor, ...]:
        hidden = torch.randn(rows, D, requires_grad=True)
        return hidden, torch.randn(V, D, requires_grad=True), torch.randint(V, (rows,)), torch.randn(rows)

    rows = {0: torch.export.Dim("rows", min=2, max=4096)}
    exported = torch.export.export(Policy(), arguments(7), dynamic_shapes=(rows, None, rows, rows)).module()
    for n in (5, V):
        same(exported(*(given := arguments(n))), Policy()(*given))


def test_a_gradient_that_an_exported_program_does_not_make_is_refused() -> None:
    """It was made for inputs that require none; a model for evaluation, exported under no_grad, takes all."""
    model, (x, targets) = Model(), batch(7)
    model.body.requires_grad_(False)
    exported = torch.export.export(model, (x, targets)).module()
    with pytest.raises(RuntimeError, match=r"^headloss: hidden requires grad, but did not when this graph was made"):
        exported(x.requires_grad_(), targets)
    with torch.no_grad():
        exported(x, targets)
        quiet = torch.export.export(Model(), (x, targets)).module()
    assert not quiet(x, targets)[0].requires_grad


def test_an_exported_program_can_be_kept() -> None:
    """All that the operator needs is in its string: nothing of this process."""
    model, (x, targets) = Model(), batch(7)
    file = io.BytesIO()
    torch.export.save(torch.export.export(model, (x, targets)), file)
    recipe.read_recipe.cache_clear()
    spec._SPECS.clear()
    same(torch.export.load(file).module()(x, targets), model(x, targets))


def half_kl(logp: Tensor, logq: Tensor) -> Tensor:
    return 0.5 * logq.exp() * (logq - logp)


def test_what_the_operators_return_has_a_version() -> None:
    """If they return something else now: raise OUTPUTS, then say here what that is."""
    teacher = hl.Logits(torch.randn(6, V, dtype=torch.float64))
    returned = []
    for term in (cross_entropy, jsd, half_kl):
        for source in (linear(6), logits(6)):
            given = {} if term is cross_entropy else {"teacher": teacher}
            objective = hl.Objective(t=term)
            tensors, sizes, text = arguments(source, batch(6)[1], objective=objective, **given)
            out = torch.ops.headloss.visit(tensors, sizes, text)
            returned.append([tuple(x.shape) for x in out])
    one, row, logits_, (hidden, weight, bias) = (), (6,), (6, V), ((6, D), (V, D), (V,))
    likelihood, divergence, counts = [one, (1,), (2,), row], [one, (1,), (0,), row], (3,)  # loss, terms, metrics, fact
    mark = one  # of what the user's function reads
    assert recipe.OUTPUTS == 3 and returned == [
        [*likelihood, one, hidden, weight, bias, (2, 6), counts],  # the gradients' scale, the gradients, the softmax
        [*likelihood, (2, 6), counts, row],  # a cotangent, where the gradient is made in the backward
        [*divergence, one, hidden, weight, bias, (5, 6), counts],
        [*divergence, (5, 6), counts, row],
        [*divergence, one, hidden, weight, bias, (5, 6), mark, counts],
        [*divergence, one, logits_, (5, 6), mark, counts],
    ]


def test_a_graph_of_another_version_is_refused() -> None:
    """What its operators returned is not what ours return: a kept graph would take one tensor for another."""
    tensors, sizes, text = arguments(logits(6), batch(6)[1])
    old = json.dumps({**json.loads(text), "outputs": recipe.OUTPUTS - 1})
    with pytest.raises(RuntimeError, match="exported with another version of headloss.*export it again"):
        torch.ops.headloss.visit(tensors, sizes, old)


def test_a_recipe_with_functions_of_its_own_stays_in_its_process() -> None:
    tensors, sizes, text = arguments(logits(6), batch(6)[1], objective=OWN)
    assert recipe.read_recipe(text).terms_of(sizes) is OWN
    tensors, _, ours = arguments(logits(6), batch(6)[1])
    assert recipe.read_recipe(ours).terms not in (None, OBJECTIVE)  # from its config
    with pytest.raises(RuntimeError, match="made in another process"):
        torch.ops.headloss.visit(tensors, [99], text)


def test_fake_tensors() -> None:
    with FakeTensorMode() as mode:
        model = Model()
        x = torch.empty(3, 4, D, dtype=torch.float64)
        loss, logprob = model(x, torch.zeros(3, 4, dtype=torch.long))
        loss.backward()
        assert model.head.weight.grad is not None and model.head.weight.grad.shape == (V, D)
        facts = hl.row_facts(
            hl.Logits(torch.empty(6, V, device="cuda")), torch.zeros(6, dtype=torch.long, device="cuda")
        )
    assert loss.fake_mode is mode and loss.shape == () and logprob.shape == (3, 4)  # type: ignore[attr-defined]
    assert facts.logprob.device.type == "cuda" and facts.logprob.dtype == torch.float32


def test_recipes_do_not_accumulate() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(lambda o, s, t: o(s, t).loss, backend="aot_eager", fullgraph=True)
    for i in range(12):
        source, (_, targets) = logits(6 + i), batch(6 + i)
        for objective in (OWN, hl.Objective(own=own)):
            compiled(objective, source, targets).backward()
        if i == 2:
            before = recipe.read_recipe.cache_info().currsize, len(spec._SPECS)
    assert (recipe.read_recipe.cache_info().currsize, len(spec._SPECS)) == before


def test_every_backward_is_once_differentiable() -> None:
    torch._dynamo.reset()
    exported = torch.export.export(Model(), batch(7)).module()
    x, targets = batch(7)
    _, logprob = exported(x.requires_grad_(), targets)
    (g,) = torch.autograd.grad(logprob.sum(), [exported.body.weight], create_graph=True)
    with pytest.raises(RuntimeError, match="once differentiable"):
        torch.autograd.grad(g.sum(), [exported.body.weight])


def test_a_divergence_that_differentiates_itself() -> None:
    """Its pull runs autograd inside the operator, where autograd is off by default."""
    torch._dynamo.reset()
    teacher = hl.Logits(torch.randn(6, V, dtype=torch.float64))
    objective = hl.Objective(js=jsd)
    source = logits(6)
    compiled = torch.compile(lambda s: objective(s, teacher=teacher).loss, backend="aot_eager", fullgraph=True)
    want, found = objective(source, teacher=teacher).loss, compiled(source)
    same(torch.autograd.grad(found, [source.logits]), torch.autograd.grad(want, [source.logits]))


def test_the_graph_says_what_it_computes() -> None:
    program = torch.export.export(Model(), batch(7))
    buffer = io.StringIO()
    print(program.graph_module.code, file=buffer)
    assert "cross_entropy" in buffer.getvalue() and "z_loss" in buffer.getvalue()


def test_a_vocabulary_shard_and_segments_of_a_group() -> None:
    torch._dynamo.reset()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        objective, group = hl.Objective(ce=cross_entropy, rl=gspo), dist.group.WORLD
        shard, segments = hl.VocabShard(group, 0, V), hl.Segments.from_ids(torch.arange(8) // 2, 4, group=group)
        targets, advantage, head = batch(8)[1], torch.randn(8, dtype=torch.float64), linear(8)

        def step(hidden: Tensor, weight: Tensor) -> Tensor:
            return objective(
                hl.Linear(hidden, weight, shard=shard), targets, segments=segments, advantage=advantage
            ).loss

        leaves = (head.hidden, head.weight)
        want, found = step(*leaves), torch.compile(step, backend="aot_eager", fullgraph=True)(*leaves)
        same(found, want)
        same(torch.autograd.grad(found, leaves), torch.autograd.grad(want, leaves))
    finally:
        dist.destroy_process_group()
