"""The design, held by tests: what may know what, and what a new loss costs."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import headloss
from headloss.facts import FACTS
from headloss.losses import LOSSES

PACKAGE = Path(headloss.__file__).parent
TESTS = Path(__file__).parent


def modules(folder: str = "") -> list[Path]:
    return sorted(p for p in (PACKAGE / folder).rglob("*.py") if "__pycache__" not in p.parts)


def name_of(path: Path) -> str:
    return ".".join(("headloss", *path.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(".__init__")


FILES = {name_of(path): path for path in modules()}


def imports(path: Path) -> set[str]:
    """What a file imports, by its full name: also inside functions, for types alone, and by a string."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute here"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Constant) and node.value in FILES and node.value != "headloss":
            found.add(node.value)  # for import_module
    return found


def own_imports(path: Path) -> set[str]:
    """The files of the package that a file imports: `from headloss.rows import Rows` is headloss.rows."""
    found = {x if x in FILES else x.rpartition(".")[0] for x in imports(path)}
    return {x for x in found & FILES.keys() if FILES[x] != path}


def top_level_imports(path: Path) -> Iterator[str]:
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""


IMPORTS = {name: own_imports(path) for name, path in FILES.items()}
LAYERS = (  # from the bottom up: a file imports from its own layer and from those below
    ("fact_rule", "facts", "teachers", "losses"),  # the algebra
    ("bounded_cache", "immutable", "large_pages", "nested", "uncompiled", "writes"),  # torch alone
    ("derived_teachers", "options", "served"),
    ("deferred_checks", "parallel", "segments", "sources", "support", "vocab_ids"),
    ("support_layout", "prepared", "rows", "labels", "reductions", "row_weights"),
    ("routed",),
    ("trace",),
    ("divergence", "term", "metrics", "meter", "record"),
    ("backends",),
    ("terms", "config"),
    ("engine",),
    ("graph",),
    ("objective",),
    ("module", "head_parallel"),
    ("checks",),
    ("headloss",),
    ("integrations", "cli", "__main__"),
)


def area(name: str) -> str:
    return name.split(".")[1] if "." in name else name


def layer(name: str) -> int:
    return next(i for i, areas in enumerate(LAYERS) if area(name) in areas)


def test_imports_make_no_circle() -> None:
    """Not at run time, not inside a function, not for types."""
    try:
        TopologicalSorter(IMPORTS).prepare()
    except CycleError as error:
        pytest.fail(f"imports in a circle: {', which is imported by '.join(error.args[1])}")


def test_every_file_has_a_layer() -> None:
    assert {x for areas in LAYERS for x in areas} == {area(name) for name in FILES}


@pytest.mark.parametrize("name", FILES)
def test_imports_go_down_the_layers(name: str) -> None:
    above = [x for x in sorted(IMPORTS[name]) if layer(x) > layer(name)]
    assert not above, f"{name} imports {', '.join(above)} from above"


def test_packages_import_nothing_of_ours() -> None:
    """A package runs before any file in it, so what it imported would be imported by all of them, unseen."""
    for name, path in FILES.items():
        if path.name == "__init__.py" and layer(name) < layer("headloss"):
            assert not [x for x in top_level_imports(path) if x.startswith("headloss")], name


def test_only_backends_name_a_backend() -> None:
    """The engine calls the module that it was given."""
    for name, found in IMPORTS.items():
        if area(name) != "backends":
            assert not [x for x in found if x.startswith("headloss.backends.")], name


@pytest.mark.parametrize("path", modules("backends"), ids=lambda p: p.name)
def test_no_backend_knows_a_loss(path: Path) -> None:
    """Not as a name, an attribute, a string or a word of a comment; a fact may share a loss's name."""
    words = set(re.findall(r"[A-Za-z_][A-Za-z_0-9]*", path.read_text()))
    names = set(LOSSES) - set(FACTS)
    assert not words & names, f"{path.name} names {sorted(words & names)}"
    assert not any(m.startswith("headloss.losses") for m in imports(path))


def test_backends_do_not_import_each_other() -> None:
    for name, found in IMPORTS.items():
        for own, other in (("torch", "triton"), ("triton", "torch")):
            if name.startswith(f"headloss.backends.{own}"):
                assert not [x for x in found if x.startswith(f"headloss.backends.{other}")], name


@pytest.mark.parametrize("path", modules("losses"), ids=lambda p: p.name)
def test_losses_import_torch_and_siblings(path: Path) -> None:
    if path.name == "__init__.py":
        return
    allowed = {"__future__", "math", "torch"}
    for name in imports(path):
        sibling = name.startswith("headloss.losses")
        assert sibling or name.split(".")[0] in allowed, f"{path.name} imports {name}"


@pytest.mark.parametrize("path", modules("losses"), ids=lambda p: p.name)
def test_losses_are_small(path: Path) -> None:
    if not path.name.startswith("_"):
        lines = len(path.read_text().splitlines())
        assert lines <= 40, f"{path.name} has {lines} lines: if a loss needs more, the design is wrong"


def test_losses_have_a_docstring_and_no_gradient_code() -> None:
    for name, fn in LOSSES.items():
        assert fn.__doc__, name
        source = Path(fn.__code__.co_filename).read_text()
        assert "autograd" not in source and "backward" not in source, name


def test_importing_headloss_is_light() -> None:
    """Neither what only tracing and compiling need, nor triton, a trainer or what only the command line needs."""
    heavy = ["sympy", "mpmath", "torch.fx.experimental", "torch._dynamo", "torch._inductor", "torch._functorch"]
    heavy += ["torch.distributed.tensor", "triton", "numpy", "typer", "rich", "matplotlib"]
    heavy += ["transformers", "deepspeed", "trl", "verl", "megatron"]
    code = f"""
        import sys
        import torch
        before = set(sys.modules)
        import headloss
        new = set(sys.modules) - before
        found = [m for m in sorted(new) if any(m == h or m.startswith(h + ".") for h in {heavy!r})]
        print(*found)
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    found = subprocess.run(command, cwd=PACKAGE.parent, stdout=subprocess.PIPE, text=True, check=True).stdout.split()
    assert not found, f"import headloss loads {found}"


@pytest.mark.parametrize("path", modules(), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_files_are_short(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= 400


def test_functions_take_at_most_twenty_parameters() -> None:
    """Except public calls, whose parameters users write by name.  A kernel takes records: kernels/records.py."""
    for path in modules():
        if path.parent.name == "kernels" and path.stem.startswith("product"):
            continue  # not yet
        for owner in ast.walk(ast.parse(path.read_text())):
            for f in ast.iter_child_nodes(owner):
                if isinstance(f, ast.FunctionDef | ast.AsyncFunctionDef):
                    public = {f.name, getattr(owner, "name", None)} & set(headloss.__all__)
                    count = len(f.args.posonlyargs + f.args.args + f.args.kwonlyargs)
                    assert public or count <= 20, f"{path.name}: {f.name} takes {count} parameters"


def test_no_vague_names() -> None:
    vague = {"utils", "util", "helpers", "helper", "common", "misc"}
    assert not [p for p in modules() if vague & {p.stem, *p.relative_to(PACKAGE).parts[:-1]}]


def test_every_public_name_is_there() -> None:
    for name in headloss.__all__:
        assert hasattr(headloss, name), name
    core = ["Logits", "Linear", "Segments", "Inputs", "Term", "Objective", "Output", "row_facts", "FusedLMHead"]
    core += ["Meter", "count", "prepare", "shift_labels", "losses"]
    assert set(core) <= set(headloss.__all__)


def test_adding_a_loss_is_one_file(tmp_path: Path) -> None:
    """In a copy of the package, one new file is a loss: found, in configs, and held by the contract."""
    shutil.copytree(PACKAGE, tmp_path / "headloss", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "headloss" / "losses" / "squared_miss.py").write_text(
        textwrap.dedent(
            '''
            def squared_miss(logprob, entropy, reward, segments, *, power=2.0):
                """(1 - p[y])^power, weighted by the mean reward of the segment."""
                miss = (1 - logprob.exp()) ** power * segments.mean(reward)
                return miss - 0.1 * entropy, {"miss": miss, "miss_max": miss}
            '''
        )
    )
    code = f"""
        import sys
        sys.path[:0] = [{str(tmp_path)!r}, {str(TESTS)!r}]
        import headloss
        assert headloss.__file__.startswith({str(tmp_path)!r})
        import test_contract
        from headloss.losses import LOSSES, squared_miss
        assert LOSSES["squared_miss"] is squared_miss
        for kind in ("Logits", "Linear"):
            test_contract.assert_contract(squared_miss, kind, (23,), False, full=False)
        headloss.Objective.from_config({{"terms": {{"mine": {{"loss": "squared_miss", "power": 1.5}}}}}})
        import test_formulas
        try:
            test_formulas.test_every_loss_has_a_formula()
        except AssertionError as error:
            assert "squared_miss" in str(error)
        else:
            raise SystemExit("a loss without a formula went unnoticed")
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True, cwd=tmp_path)


def test_a_wrong_loss_fails_the_contract() -> None:
    """The contract can fail: a loss whose trace and call disagree is caught."""
    import test_contract

    calls = []

    def fickle(logprob):
        calls.append(1)
        return -logprob * (1.0 + 1e-6 * len(calls))

    with pytest.raises(AssertionError, match="close"):
        test_contract.assert_contract(fickle, "Logits", (9,), False, full=False)


def test_no_python_loop_over_rows_on_the_host() -> None:
    """`.item()`, `.tolist()` and `nonzero` in the hot path wait for the device: only rows.py reads, once."""
    for path in [PACKAGE / n for n in ("engine/sweeps.py", "engine/heads.py", "engine/loss.py", "facts.py")] + modules(
        "backends"
    ):
        calls = [n.attr for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Attribute)]
        assert not {"item", "tolist", "nonzero", "cpu"} & set(calls), path.name


def test_torch_is_the_only_hard_dependency() -> None:
    allowed = {"torch", "sympy", *sys.stdlib_module_names}  # sympy is torch's own
    for path in modules():
        if {"cli", "integrations", "triton"} & set(path.relative_to(PACKAGE).parts):
            continue
        roots = {m.split(".")[0] for m in top_level_imports(path)} - {"headloss"}
        assert roots <= allowed, f"{path.relative_to(PACKAGE)} imports {sorted(roots - allowed)}"


@pytest.mark.parametrize("path", sorted((PACKAGE / "backends" / "triton").rglob("*.py")), ids=lambda p: p.stem)
def test_no_kernel_names_a_constant_twice(path: Path) -> None:
    """A loop that Triton unrolls would, and older versions refuse that."""
    loops = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.For | ast.While)]
    named = [n for loop in loops for n in ast.walk(loop) if isinstance(n, ast.AnnAssign)]
    assert not [ast.unparse(n) for n in named if "constexpr" in ast.unparse(n.annotation)]


@pytest.mark.parametrize("path", sorted((PACKAGE / "backends" / "triton").rglob("*.py")), ids=lambda p: p.stem)
def test_no_kernel_names_a_parameter_that_it_lacks(path: Path) -> None:
    """Triton passes over such a name, and compiles the kernel again for each alignment or value."""
    for kernel in ast.walk(ast.parse(path.read_text())):
        if isinstance(kernel, ast.FunctionDef):
            parameters = {a.arg for a in kernel.args.args}
            options = [k for d in kernel.decorator_list if isinstance(d, ast.Call) for k in d.keywords]
            named = {name for k in options if (k.arg or "").startswith("do_not") for name in ast.literal_eval(k.value)}
            assert named <= parameters, f"{kernel.name}: {named - parameters}"
