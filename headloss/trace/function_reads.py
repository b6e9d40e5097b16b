"""What a function reads besides its arguments, found in its bytecode: a cache key, and the names of what is unknown.

Later calls reuse a trace, so we trace only functions that read nothing but their arguments and values that the library
can identify and compare: plain constants (`cache_keys.py`), functions of torch and math, and Python functions for which
the same holds, all the way down.  The rule is an allowlist.  Whatever is not on it (an attribute of an object or a
class, `getattr`, `globals()`, an import, a captured tensor, module, list or dict, a method, state of torch such as
`is_grad_enabled()`) means that the function is called untraced, every time.

    BETA = 0.1
    def known(logprob): return -BETA * logprob            # BETA is part of the key: another value, another trace
    def unknown(logprob): return -config.beta * logprob   # `config` may change without notice: called untraced

With `Term(fn, pure=True)` the user vouches that a function reads nothing that changes.
"""

from __future__ import annotations

import dis
import enum
import functools
import types
import weakref
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch._ops import OpOverload, OpOverloadPacket
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext

from headloss.trace.allowlist import (
    allowed,
    allowed_attributes,
    is_aten,
    is_immutable,
    is_unpatched,
    name_of,
    operators_of,
    original_attribute,
)
from headloss.trace.cache_keys import ByIdentity, fields_of, key_of, plain_key
from headloss.trace.guards import Guards, active_guards, builtins_of, is_fixed


class Reads(NamedTuple):
    """The key of everything that a function reads, and a description of each part that is unknown."""

    key: Any
    unknown: tuple[str, ...] = ()
    variable_floats: bool = True  # whether it has numbers, such as options, that may take other values


def reads_of(fn: Callable[..., Any], options: Mapping[str, Any] | None = None, *, pure: bool = False) -> Reads:
    """What a function reads when it is called with these options.

    A lambda created anew in every step has the same code and the same captured numbers, hence the same key.
    """
    walk = _Walk()
    if options:
        walk.guards.all_of(options)
    if pure or is_ours(fn):
        walk.trust(fn)
        if not options:
            return Reads((defaults(), *key_of_ours(fn)), (), bool(getattr(fn, "__kwdefaults__", None)))
    key = key_of_ours(fn) if pure else walk.value("", fn)
    values = tuple([(name, walk.value(f"option {name}", x)) for name, x in sorted((options or {}).items())])
    return Reads((defaults(), key, values), walk.finish(), walk.variable_floats)


def defaults() -> tuple[torch.dtype, torch.device | None]:
    """The default dtype and device: of tensors made without naming them, and of a float combined with integers."""
    return torch.get_default_dtype(), _device() if torch._C._len_torch_function_stack() else None


def _device() -> torch.device | None:
    """Like `torch.get_default_device`, which fails in torch 2.8 after a default device was reset."""
    contexts = [mode for mode in _get_current_function_mode_stack() if isinstance(mode, DeviceContext)]
    return contexts[-1].device if contexts else None


def is_ours(fn: Any) -> bool:
    """Whether a function belongs to this package, whose functions read nothing that changes."""
    if type(fn) is not types.FunctionType:
        return False
    module, name = fn.__globals__.get("__name__") or "", fn.__code__.co_qualname  # decorators copy `fn.__qualname__`
    fixed = hasattr(fn, "fixed") and not hasattr(fn, "__wrapped__")
    return module.startswith("headloss.") and ("<locals>" not in name or fixed)


def is_all_ours(fn: Any) -> bool:
    """Whether all code that a function runs is ours: it then branches on no size and no value, whatever its options."""
    return is_ours(fn) or (type(fn) is types.FunctionType and fn in _MADE_OF_OURS)


def mark_all_ours(fn: Any) -> None:
    """Note that a function which we built calls no functions but ours."""
    _MADE_OF_OURS.add(fn)


_MADE_OF_OURS: weakref.WeakSet[Any] = weakref.WeakSet()


def key_of_ours(fn: Any) -> tuple[Any, ...]:
    """The key of a function of ours: its identity, and the defaults of its options, which a user may set."""
    options = getattr(fn, "__kwdefaults__", None)
    return (ByIdentity(fn), *map(key_of, options.values())) if options else (ByIdentity(fn),)


def writes_uncounted(fn: Any) -> bool:
    """Whether a function may write to a tensor without raising its version, or has no bytecode to check."""
    code = getattr(fn, "__code__", None)
    return code is None or bool(_uses(code).attributes & {"__array__", "data", "data_ptr", "numpy", "untyped_storage"})


class _Uses(NamedTuple):
    """What a code object names, read off its bytecode once."""

    # whether it is captured (else global), name, the attributes that follow, and whether it is called at once
    roots: tuple[tuple[bool, str, tuple[str, ...], bool], ...]
    attributes: frozenset[str]  # of any other values
    operators: frozenset[str]  # `__mul__` for a `*`, whatever it is applied to
    refused: tuple[str, ...]  # what it does that no trace can repeat


@functools.lru_cache(4096)
def _uses(code: types.CodeType) -> _Uses:
    roots: dict[tuple[bool, str, tuple[str, ...], bool], None] = {}
    attributes: set[str] = set()
    operators: set[str] = set()
    refused: list[str] = []
    formats = same = False  # whether it formats text; whether it compares with `is`
    pending = [code]
    while pending:
        inner = pending.pop()
        pending += [x for x in inner.co_consts if isinstance(x, types.CodeType)]
        steps = [x for x in dis.get_instructions(inner) if x.opname not in ("EXTENDED_ARG", "CACHE")]
        texts = [x for x in inner.co_consts if isinstance(x, str)]
        last = 0  # the last step that is part of a name and its attributes
        for i, step in enumerate(steps):
            name = str(step.argval)
            captured = step.opcode in dis.hasfree
            formats |= step.opname.startswith("FORMAT_") or (
                step.opname == "BINARY_OP" and step.argrepr.startswith("%") and any("%" in x for x in texts)
            )
            same |= step.opname == "IS_OP" and not (steps[i - 1].opname == "LOAD_CONST" and steps[i - 1].argval is None)
            operators.update(operators_of(step))
            if step.opname in ("LOAD_GLOBAL", "LOAD_DEREF"):
                if captured and name not in code.co_freevars:
                    continue  # a local variable
                chain, called = [], "NULL" in step.argrepr  # a call's empty slot for `self`
                for after in steps[i + 1 :]:
                    if after.opname not in _ATTRIBUTE or after.is_jump_target:
                        break
                    chain.append(str(after.argval))
                    called |= after.opname == "LOAD_METHOD" or "NULL" in after.argrepr
                last = i + len(chain)
                roots[captured, name, tuple(chain), called] = None
            elif step.opname in _ATTRIBUTE:
                if i > last:
                    attributes.add(name)
            elif step.opname == "PUSH_EXC_INFO" and steps[i + 1].opname != "WITH_EXCEPT_START":
                refused.append("what a try hides (under a trace other things raise)")
            elif step.opname == "MATCH_CLASS":  # `case Point(x=0)` reads the names in the constant before it
                attributes.update(str(x) for x in (steps[i - 1].argval or ()))
            elif captured:
                if name in code.co_freevars and step.opname not in ("COPY_FREE_VARS", "LOAD_CLOSURE", "MAKE_CELL"):
                    refused.append(f"{name} (it writes to it)")
            elif step.opcode in dis.hasname:
                refused.append(_VERBS.get(step.opname, "{} ({})").format(name, step.opname.lower()))
    names = {name for _, name, _, _ in roots}
    measures = attributes & {"nelement", "numel", "shape", "size"}  # the tracer sees len() of a tensor itself
    reveals = sorted(names & set(_REVEALING) | attributes & set(_REVEALING_ATTRIBUTES))
    reveals += ["a formatted string"] * formats + ["is"] * same
    if measures and reveals:  # a size is an int in a call, but a symbol under a tracer
        refused.append(f"the type or text of sizes ({', '.join(reveals)})")
    operators.update(f"__{name}__" for name in names & {"abs", "divmod", "len", "pow", "reversed", "round"})
    return _Uses(tuple(roots), frozenset(attributes), frozenset(operators), tuple(dict.fromkeys(refused)))


_ATTRIBUTE = ("LOAD_ATTR", "LOAD_METHOD")
_REVEALING = ("format", "isinstance", "issubclass", "repr", "str", "type")
_REVEALING_ATTRIBUTES = ("__class__", "__format__", "__repr__", "__str__", "format")
_VERBS = {
    "IMPORT_NAME": "{} (an import inside)",
    "IMPORT_FROM": "{} (an import inside)",
    "STORE_GLOBAL": "{} (it writes to it)",
    "DELETE_GLOBAL": "{} (it writes to it)",
    "STORE_ATTR": ".{} (it writes to it)",
    "DELETE_ATTR": ".{} (it writes to it)",
}


class _Walk:
    """A walk over everything that a function reads."""

    def __init__(self) -> None:
        self.unknown: list[str] = []
        self.attributes: set[str] = set()
        self.operators: set[str] = set()
        self.settable: list[tuple[str, Any]] = []  # known functions and types on which a user could set attributes
        self.fields: set[str] = set()
        self.variable_floats = False
        self.typed = False  # whether it reads `type`: an attribute may then be a class's instead of a field
        self.numbers: dict[int, int] = {}  # by a function's id, when it was visited
        self.guards = active_guards() or Guards()

    def trust(self, fn: Any) -> None:
        """Guard a function that is not walked over: the defaults of its options may still change."""
        if type(fn) is types.FunctionType:
            self.guards.function(fn)
        else:
            self.guards.checkable = False

    def finish(self) -> tuple[str, ...]:
        every = self.attributes | self.operators
        for name in self.attributes:
            self.guards.attribute(torch.Tensor, name)
        for name in self.operators:
            self.guards.entry(vars(torch.Tensor), name)
        for label, x in self.settable:
            for name in self.attributes:
                self.guards.entry(vars(x), name)
                if vars(x).get(name) is not original_attribute(x, name):
                    self.unknown.append(f"{label}.{name} (an attribute of {_what(x)})")
        others = sorted(self.attributes - allowed_attributes() - (set() if self.typed else self.fields))
        patched = [f"torch.Tensor.{x} (not torch's own)" for x in sorted(every) if not is_unpatched(x)]
        return tuple(dict.fromkeys([*self.unknown, *(f".{name}" for name in others), *patched]))

    def value(self, name: str, x: Any, called: bool = False) -> Any:
        """The key of a value that is read or, with `called`, only called; an unknown value is noted by name."""
        key = plain_key(x)
        if key is not None:
            self.guards.checkable &= is_fixed(x)
            self.variable_floats |= not isinstance(x, _NO_FLOATS)
            self.fields.update(("name", "value") if isinstance(x, enum.Enum) else fields_of(type(x)) or ())
            return key
        self.typed |= x is type
        if id(x) in allowed() or (isinstance(x, OpOverload | OpOverloadPacket) and is_aten(x)):
            if not called and hasattr(x, "__dict__") and x is not torch.Tensor and not is_immutable(x):
                self.settable.append((name, x))
            return ByIdentity(x)
        if is_ours(x):
            self.trust(x)
            self.variable_floats |= bool(x.__kwdefaults__)
            return key_of_ours(x)
        if type(x) is types.FunctionType:
            return self.function(x)
        if type(x) is functools.partial:
            for part in ("func", "args", "keywords"):  # `__setstate__` may replace them
                self.guards.attribute(x, part)
            self.guards.all_of(x.keywords)
            self.guards.all_of(vars(x))
            named = tuple([(k, self.value(f"{name} {k}".strip(), y)) for k, y in sorted(x.keywords.items())])
            more = tuple([(k, self.value(f"{name}.{k}", y)) for k, y in sorted(vars(x).items())])
            return (functools.partial, self.value(name, x.func), *(self.value(name, y) for y in x.args), named, more)
        if type(x) is tuple or isinstance(x, types.UnionType):
            return (type(x), *(self.value(name, y) for y in tuple(getattr(x, "__args__", x))))  # type: ignore[arg-type]
        self.unknown.append(f"{name or name_of(x)} ({_what(x)})")
        return ByIdentity(x)

    def function(self, fn: types.FunctionType) -> Any:
        if id(fn) in self.numbers:
            return self.numbers[id(fn)]
        self.numbers[id(fn)] = len(self.numbers)
        self.guards.function(fn)
        uses = _uses(fn.__code__)
        self.unknown += uses.refused
        self.attributes |= uses.attributes
        self.operators |= uses.operators
        cells = dict(zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True))
        items = []
        for captured, name, chain, called in uses.roots:
            try:
                if captured:
                    x = cells[name].cell_contents
                    self.guards.cells.append((cells[name], x))
                else:  # guarded first: another thread may change it, and the guard must then fail
                    self.guards.global_of(fn, name)
                    x = _global(fn, name)
            except (ValueError, KeyError):  # not assigned yet
                self.guards.checkable = False
                self.unknown.append(f"{name} (not assigned yet)")
                continue
            items.append(self.follow(name, x, chain, called))
        fields = [(k, self.value(f"{fn.__name__}.{k}", x)) for k, x in sorted(vars(fn).items()) if k not in _DECLARED]
        defaults = [self.value("default", x) for x in fn.__defaults__ or ()]
        options = [(k, self.value(f"default of {k}", x)) for k, x in sorted((fn.__kwdefaults__ or {}).items())]
        return (fn.__code__, tuple(items), tuple(defaults), tuple(options), tuple(fields))

    def follow(self, name: str, x: Any, chain: tuple[str, ...], called: bool) -> Any:
        """The key of `name.attribute...`, resolved through modules and enums, whose attributes are like globals."""
        rest = list(chain)
        while rest:
            if x is torch.ops or x is torch.ops.aten or isinstance(x, OpOverloadPacket):
                self.guards.attribute(x, rest[0])
                entries: Any = {rest[0]: getattr(x, rest[0], None)}
            elif isinstance(x, types.ModuleType) and type(x).__getattribute__ is types.ModuleType.__getattribute__:
                # not attributes of the module's type: Python looks at a property there first
                entries = {} if any(rest[0] in vars(kind) for kind in type(x).__mro__) else vars(x)
                self.guards.attribute(x, "__class__")
                self.guards.checkable &= type(x) is types.ModuleType
                self.guards.entry(vars(x), rest[0])
            elif isinstance(x, enum.EnumMeta):
                entries, self.guards.checkable = x.__members__, False
            else:
                break
            if rest[0] not in entries:
                break
            x = entries[rest[0]]
            name = f"{name}.{rest.pop(0)}"
        key = self.value(name, x, called and not rest)
        if rest and callable(x) and x is not torch.Tensor and not is_immutable(x):
            self.unknown.append(f"{name}.{rest[0]} (an attribute of {_what(x)})")
        self.attributes.update(rest)
        return key


def _global(fn: types.FunctionType, name: str) -> Any:
    return fn.__globals__[name] if name in fn.__globals__ else builtins_of(fn)[name]


def _what(x: Any) -> str:
    if isinstance(x, torch.Tensor):
        return "a tensor"
    if isinstance(x, types.ModuleType):
        return "a module"
    if isinstance(x, type):
        return "a class"
    if isinstance(x, types.MethodType):
        return f"a method of {type(x.__self__).__name__}"
    if isinstance(x, types.BuiltinFunctionType):
        return "a built-in function"
    article = "an" if type(x).__name__[:1].lower() in "aeiou" else "a"
    return f"{article} {type(x).__name__}"


_DECLARED = frozenset({"__wrapped__", "__signature__", "per_segment", "returns"})  # read when a term is made
_NO_FLOATS = (bool, int, str, bytes, type(None), torch.dtype, torch.device)
