"""`Terms`: the named terms and metrics of an objective and their backend, as the engine and graphs see them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from torch import Tensor

from headloss.backends import check_backend
from headloss.immutable import Immutable
from headloss.metrics import check_names, copied_metrics, read_metrics
from headloss.term import DEFAULTS, Term, as_term
from headloss.trace.call import Call


class Terms(Immutable):
    """Named terms and metrics, checked, and the plans of calls on them.  Immutable except for the plans."""

    __slots__ = (
        "__weakref__", "asked", "backend", "derives_inputs", "every_term", "metrics", "names", "on_all", "plans",
        "terms", "unmeasured",
    )  # fmt: skip
    asked: Any  # the metrics as they were given
    terms: Mapping[str, Term]
    metrics: tuple[tuple[str, Call], ...]
    backend: str
    derives_inputs: bool  # whether some term has targets, columns or reduction segments of its own
    names: tuple[str, ...]  # of the terms
    every_term: tuple[Term, ...]  # the terms, and those that metrics are made from
    on_all: tuple[str, ...]  # terms that stay on the whole vocabulary where a call has a support
    unmeasured: Any  # the same without metrics, made on first use
    plans: Any  # of earlier calls; see `engine.lookup.Plans`

    def __init__(
        self, terms: Mapping[str, Callable[..., Any] | Term], metrics: Any = (), backend: str = "auto"
    ) -> None:
        check_backend(backend)
        metrics = copied_metrics(metrics)
        checked = MappingProxyType({name: as_term(name, x) for name, x in terms.items()})
        calls = tuple(read_metrics(metrics))
        check_names(terms, [name for name, _ in calls])
        for name, call in calls:
            if isinstance(call.fn, Term):
                _check_measured(name, call.fn)
        functions: list[object] = [call.fn for _, call in calls]
        every = tuple(x for x in (*checked.values(), *functions) if isinstance(x, Term))
        self._set(
            asked=metrics, terms=checked, metrics=calls, backend=backend, names=tuple(checked),
            every_term=every, plans=None, derives_inputs=any(t.targets or t.top or t.reduction_segments for t in every),
            on_all=tuple(name for name, t in checked.items() if t.support == "all"), unmeasured=None,
        )  # fmt: skip

    def on(self, backend: str) -> Terms:
        """The same terms on another backend, without the plans."""
        other = object.__new__(Terms)
        other._set(
            **{name: getattr(self, name) for name in Terms.__slots__[1:]}
            | {"backend": backend, "plans": None, "unmeasured": None}
        )
        return other

    def without_metrics(self) -> Terms:
        if self.unmeasured is None:
            other = self.on(self.backend)
            other._set(asked=(), metrics=(), every_term=tuple(self.terms.values()))
            self._set(unmeasured=other)
        found: Terms = self.unmeasured
        return found


def _check_measured(name: str, term: Term) -> None:
    """Refuse a Term with settings that only matter for a sum, such as a weight: a metric has no use for them."""
    for key in ("weight", "reduction", "row_weight", "targets", "support"):
        said = getattr(term, key)
        if isinstance(said, Tensor) or said != DEFAULTS[key]:
            raise ValueError(
                f"metrics: {name!r} is a Term with {key}=, but a metric is a mean over all rows that count; leave "
                f"it out, or make it a term of the objective"
            )
