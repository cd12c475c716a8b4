"""A function's arguments: as plain values that tell one call from another, and as they are given to it in the end."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from x402guard.arguments import plain_arguments
from x402guard.errors import ConfigError
from x402guard.policy import Narrow

__all__ = ["Binding", "Bound"]

_NAMED: Final = (
    inspect.Parameter.POSITIONAL_ONLY,
    inspect.Parameter.POSITIONAL_OR_KEYWORD,
    inspect.Parameter.KEYWORD_ONLY,
)


@dataclass(frozen=True, slots=True)
class Bound:
    """The arguments of one call.

    Attributes:
        arguments: as plain values, or None where nobody can tell them apart.
        needs: names of those that the function cannot be called without.
        given: positional and named arguments as they were given.
        named: the same by the function's own names, where those are known.
    """

    arguments: Mapping[str, Any] | None
    needs: frozenset[str]
    given: tuple[tuple[Any, ...], dict[str, Any]]
    named: inspect.BoundArguments | None

    def call_on(self, function: Callable[..., Any], narrow: Narrow | None) -> Callable[[], Any]:
        """Return the call, without the arguments that a rule removes."""
        args, kwargs = self.given
        if narrow is None or not narrow.remove:
            return lambda: function(*args, **kwargs)
        if self.named is None:
            kept = {name: value for name, value in kwargs.items() if name not in narrow.remove}
            return lambda: function(*args, **kept)
        names = self.named.arguments
        rest = next((p.name for p in self.named.signature.parameters.values() if p.kind is p.VAR_KEYWORD), None)
        for name in narrow.remove:
            if name != rest and name in names:
                default = self.named.signature.parameters[name].default
                names[name] = default  # those after it may be given by their place
            elif rest is not None and rest in names:
                names[rest] = {key: value for key, value in names[rest].items() if key != name}
        narrowed = self.named
        return lambda: function(*narrowed.args, **narrowed.kwargs)


class Binding:
    """How a function takes its arguments."""

    def __init__(self, function: Callable[..., Any]) -> None:
        try:
            # What is called is what has to be called right.
            self._signature: inspect.Signature | None = inspect.signature(function, follow_wrapped=False)
        except (TypeError, ValueError):
            self._signature = None
        parameters = () if self._signature is None else self._signature.parameters.values()
        self._needs = frozenset(p.name for p in parameters if p.kind in _NAMED and p.default is p.empty)

    def bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Bound:
        """Return the arguments of one call. Raises ``TypeError`` for those that do not fit."""
        bound = None if self._signature is None else self._signature.bind(*args, **kwargs)
        if bound is None:
            named: dict[str, Any] = {"args": args, "kwargs": kwargs}
        else:
            bound.apply_defaults()
            named = {name: value for name, value in bound.arguments.items() if name not in ("self", "cls")}
        try:
            plain = plain_arguments(named)
        except ConfigError:
            plain = None  # a function may be given what is too large to be told apart by it
        return Bound(plain, self._needs, (args, kwargs), bound)
