"""Losses and divergences that all read one number, each from another place, and a way to turn it.

A knob is (loss, set): `loss` is -x logprob, plus the entropy where x > 2, so that a trace made at x <= 2 has never seen
the entropy used.  `set` changes x where the function reads it.
"""

import dataclasses
import functools
import math
import os
import threading
import types
from collections import namedtuple

import torch

GLOBAL = 1.0
NAMED = namedtuple("NAMED", "x")(1.0)
TUPLE = (1.0, 2.0)
MAYBE = 1


class Config:
    x = 1.0


class Nested:
    inner = Config


@dataclasses.dataclass
class Mutable:
    x: float = 1.0


@dataclasses.dataclass(frozen=True)
class Frozen:
    x: float = 1.0


FROZEN = Frozen()


class WithProperty:
    held = 1.0

    @property
    def x(self):
        return self.held


settings = types.ModuleType("settings")
settings.x = 1.0
settings.inner = types.ModuleType("settings.inner")
settings.inner.x = 1.0
local = threading.local()


def combine(x, logprob, entropy):
    return -x * logprob + entropy if x > 2 else -x * logprob


def read(config):
    return config.x


def by_global():
    def loss(logprob, entropy):
        return combine(GLOBAL, logprob, entropy)

    def turn(x):
        global GLOBAL  # noqa: PLW0603
        GLOBAL = x

    turn(1.0)
    return loss, turn


def by_cell():
    held = 1.0

    def loss(logprob, entropy):
        return combine(held, logprob, entropy)

    def turn(x):
        nonlocal held
        held = x

    return loss, turn


def by_inner_function():
    held = 1.0

    def loss(logprob, entropy):
        def get():
            return held

        return combine(get(), logprob, entropy)

    def turn(x):
        nonlocal held
        held = x

    return loss, turn


def by_named_tuple():
    def loss(logprob, entropy):
        return combine(NAMED.x, logprob, entropy)

    def turn(x):
        global NAMED  # noqa: PLW0603
        NAMED = NAMED._replace(x=x)

    turn(1.0)
    return loss, turn


def by_tuple():
    def loss(logprob, entropy):
        return combine(TUPLE[0], logprob, entropy)

    def turn(x):
        global TUPLE  # noqa: PLW0603
        TUPLE = (x, 2.0)

    turn(1.0)
    return loss, turn


def by_frozen_record():
    def loss(logprob, entropy):
        return combine(FROZEN.x, logprob, entropy)

    def turn(x):
        global FROZEN  # noqa: PLW0603
        FROZEN = Frozen(x)

    turn(1.0)
    return loss, turn


def by_class():
    return (lambda logprob, entropy: combine(Config.x, logprob, entropy)), functools.partial(setattr, Config, "x")


def by_class_handed_on():
    return (lambda logprob, entropy: combine(read(Config), logprob, entropy)), functools.partial(setattr, Config, "x")


def by_nested_class():
    return (lambda logprob, entropy: combine(Nested.inner.x, logprob, entropy)), functools.partial(setattr, Config, "x")


def by_getattr():
    return (lambda logprob, entropy: combine(getattr(Config, "x"), logprob, entropy)), functools.partial(  # noqa: B009
        setattr, Config, "x"
    )


def by_object():
    held = Mutable()
    return (lambda logprob, entropy: combine(held.x, logprob, entropy)), functools.partial(setattr, held, "x")


def by_property():
    held = WithProperty()
    return (lambda logprob, entropy: combine(held.x, logprob, entropy)), functools.partial(setattr, held, "held")


def by_dict():
    held = {"x": 1.0}
    return (lambda logprob, entropy: combine(held["x"], logprob, entropy)), functools.partial(held.__setitem__, "x")


def by_list():
    held = [1.0]
    return (lambda logprob, entropy: combine(held[0], logprob, entropy)), functools.partial(held.__setitem__, 0)


def by_tuple_of_a_list():
    held = ([1.0],)
    return (lambda logprob, entropy: combine(held[0][0], logprob, entropy)), functools.partial(held[0].__setitem__, 0)


def by_default_list():
    def loss(logprob, entropy, *, held=[1.0]):  # noqa: B006
        return combine(held[0], logprob, entropy)

    return loss, functools.partial(loss.__kwdefaults__["held"].__setitem__, 0)


def by_keyword_default():
    def loss(logprob, entropy, *, x=1.0):
        return combine(x, logprob, entropy)

    return loss, lambda x: loss.__kwdefaults__.update(x=x)


def by_helper_default():
    def get(x=1.0):
        return x

    def loss(logprob, entropy):
        return combine(get(), logprob, entropy)

    def turn(x):
        get.__defaults__ = (x,)

    return loss, turn


def by_function_attribute():
    def loss(logprob, entropy):
        return combine(loss.x, logprob, entropy)

    loss.x = 1.0
    return loss, functools.partial(setattr, loss, "x")


def by_rebound_helper():
    held = {"get": lambda: 1.0}
    get = held["get"]

    def loss(logprob, entropy):
        return combine(get(), logprob, entropy)

    def turn(x):
        nonlocal get
        get = lambda: x

    return loss, turn


def by_module():
    return (lambda logprob, entropy: combine(settings.x, logprob, entropy)), functools.partial(setattr, settings, "x")


def by_inner_module():
    return (lambda logprob, entropy: combine(settings.inner.x, logprob, entropy)), functools.partial(
        setattr, settings.inner, "x"
    )


def by_module_handed_on():
    return (lambda logprob, entropy: combine(read(settings), logprob, entropy)), functools.partial(
        setattr, settings, "x"
    )


def by_method():
    class Loss:
        x = 1.0

        def loss(self, logprob, entropy):
            return combine(self.x, logprob, entropy)

    held = Loss()
    return held.loss, functools.partial(setattr, held, "x")


def by_callable_object():
    class Loss:
        x = 1.0

        def __call__(self, logprob, entropy):
            return combine(self.x, logprob, entropy)

    held = Loss()
    return held, functools.partial(setattr, held, "x")


def by_partial():
    held = functools.partial(lambda logprob, entropy, *, x: combine(x, logprob, entropy), x=1.0)
    return held, lambda x: held.keywords.update(x=x)


def by_tensor():
    held = torch.tensor(1.0, dtype=torch.float64)
    return (lambda logprob, entropy: combine(held.item(), logprob, entropy)), held.fill_


def by_buffer():
    held = torch.nn.BatchNorm1d(1)
    held.running_mean = torch.ones(1, dtype=torch.float64)
    return (lambda logprob, entropy: combine(float(held.running_mean), logprob, entropy)), held.running_mean.fill_


def by_optimizer():
    held = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    return (lambda logprob, entropy: combine(held.param_groups[0]["lr"], logprob, entropy)), (
        lambda x: held.param_groups[0].update(lr=x)
    )


def by_environment():
    os.environ["HEADLOSS_X"] = "1.0"
    return (lambda logprob, entropy: combine(float(os.environ["HEADLOSS_X"]), logprob, entropy)), (
        lambda x: os.environ.update(HEADLOSS_X=str(x))
    )


def by_import():
    def loss(logprob, entropy):
        import math as hidden

        return combine(getattr(hidden, "headloss_x", 1.0), logprob, entropy)

    math.headloss_x = 1.0
    return loss, functools.partial(setattr, math, "headloss_x")


def by_globals():
    return (lambda logprob, entropy: combine(globals()["settings"].x, logprob, entropy)), functools.partial(
        setattr, settings, "x"
    )


def by_thread_local():
    local.x = 1.0
    return (lambda logprob, entropy: combine(local.x, logprob, entropy)), functools.partial(setattr, local, "x")


def by_decorator():
    held = {"x": 1.0}

    def scaled(fn):
        @functools.wraps(fn)
        def wrapper(logprob, entropy):
            return fn(logprob, entropy, held["x"])

        wrapper.__wrapped__ = lambda logprob, entropy: None
        return wrapper

    @scaled
    def loss(logprob, entropy, x):
        return combine(x, logprob, entropy)

    return loss, functools.partial(held.__setitem__, "x")


def by_generator():
    held = [1.0]
    return (lambda logprob, entropy: combine(next(x for x in held), logprob, entropy)), functools.partial(
        held.__setitem__, 0
    )


def by_dtype():
    """torch.get_default_dtype() is state as well."""
    held = {"x": 1.0}

    def loss(logprob, entropy):
        return combine(held.get("x") if torch.get_default_dtype() is not None else 0.0, logprob, entropy)

    return loss, functools.partial(held.__setitem__, "x")


def by_record_with_more():
    """An attribute that is no field, under a name that tensors have too."""
    held = Frozen()

    def turn(x):
        object.__setattr__(held, "mean", x)

    turn(1.0)
    return lambda logprob, entropy: combine(held.mean, logprob, entropy), turn


def by_attribute_of_a_type():
    """`eps` is a name of torch.finfo's."""

    def turn(x):
        torch.Tensor.eps = x

    turn(1.0)
    return lambda logprob, entropy: combine(torch.Tensor.eps, logprob, entropy), turn


def by_attribute_of_tensors():
    def turn(x):
        torch.Tensor.resolution = x

    turn(1.0)
    return lambda logprob, entropy: combine(logprob.resolution, logprob, entropy), turn


def by_attribute_of_a_guard():
    def turn(x):
        torch.no_grad.max = x

    turn(1.0)
    return lambda logprob, entropy: combine(torch.no_grad.max, logprob, entropy), turn


KNOBS = {name.removeprefix("by_"): fn for name, fn in list(globals().items()) if name.startswith("by_")}
# Everything these read is compared in every call, so they stay traced.
TRACED = {
    "global", "cell", "inner_function", "named_tuple", "tuple", "frozen_record", "keyword_default", "helper_default",
    "rebound_helper", "module", "inner_module", "partial",
}  # fmt: skip
