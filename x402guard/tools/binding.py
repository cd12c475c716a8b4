"""Binds a function's arguments: as plain values for comparison, and as they are passed to the function."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, Final

from msgspec import Struct

from x402guard.errors import ConfigError
from x402guard.policy import Narrow
from x402guard.tools.arguments import fingerprint_of, plain_arguments, shown_arguments

_NAMED: Final = (
    inspect.Parameter.POSITIONAL_ONLY,
    inspect.Parameter.POSITIONAL_OR_KEYWORD,
    inspect.Parameter.KEYWORD_ONLY,
)


class Bound(Struct, frozen=True):
    """The arguments of one call.

    Attributes:
        arguments: as plain values, or None if they are not comparable.
        shown: the same for approvers.
        needs: names of the required arguments.
        known: names that a rule can remove; None for any name, if no argument is only positional.
        groups: name of the ``**`` parameter → the names in it.
        given: positional and keyword arguments as given.
        named: the arguments by parameter name, or None if the signature is unknown.
    """

    arguments: Mapping[str, Any] | None
    shown: Mapping[str, Any] | None
    needs: frozenset[str]
    known: frozenset[str] | None
    groups: Mapping[str, frozenset[str]]
    given: tuple[tuple[Any, ...], dict[str, Any]]
    named: inspect.BoundArguments | None

    def changed(self, fingerprint: str, narrow: Narrow | None) -> bool:
        """True if the caller has changed the arguments since *fingerprint* was computed."""
        if not fingerprint or self.named is None:
            return False
        now = plain_named(self.named)
        if now is not None and narrow is not None:
            now = {name: value for name, value in now.items() if name not in narrow.remove}
        return fingerprint_of(now) != fingerprint

    def call_on(self, function: Callable[..., Any], narrow: Narrow | None) -> Callable[[], Any]:
        """Return the call without the arguments that a rule removes."""
        args, kwargs = self.given
        if narrow is None or not narrow.remove or self.named is None:
            return lambda: function(*args, **kwargs)
        names, parameters = self.named.arguments, self.named.signature.parameters
        rest = next((p.name for p in parameters.values() if p.kind is p.VAR_KEYWORD), None)
        for name in narrow.remove:
            kind = parameters[name].kind if name in parameters else None
            if kind in _NAMED:
                names[name] = parameters[name].default  # later arguments may be positional
            elif kind is not None:
                names[name] = () if kind is inspect.Parameter.VAR_POSITIONAL else {}
            elif rest is not None and rest in names:
                names[rest] = {key: value for key, value in names[rest].items() if key != name}
        narrowed = self.named
        return lambda: function(*narrowed.args, **narrowed.kwargs)


def _without_self(bound: inspect.BoundArguments) -> dict[str, Any]:
    return {name: value for name, value in bound.arguments.items() if name not in ("self", "cls")}


def plain_named(bound: inspect.BoundArguments) -> Mapping[str, Any] | None:
    """Return arguments by their names as plain values, or None if they are not comparable."""
    return _plain_or_none(_without_self(bound))


def _plain_or_none(named: Mapping[str, Any]) -> Mapping[str, Any] | None:
    try:
        return plain_arguments(named)
    except ConfigError:
        return None  # too large to compare


class Binding:
    """The signature of a function, to bind the arguments of its calls."""

    def __init__(self, function: Callable[..., Any]) -> None:
        try:
            self._signature: inspect.Signature | None = inspect.signature(function, follow_wrapped=False)
        except (TypeError, ValueError):
            self._signature = None
        parameters = () if self._signature is None else self._signature.parameters.values()
        self._many = next((p.name for p in parameters if p.kind is p.VAR_POSITIONAL), None)
        self._more = next((p.name for p in parameters if p.kind is p.VAR_KEYWORD), None)
        self._needs = frozenset(p.name for p in parameters if p.kind in _NAMED and p.default is p.empty)

    def _spread(self, named: dict[str, Any]) -> dict[str, Any]:
        """Return arguments by the names for rules: those in the ``**`` parameter by their own names."""
        more = named.get(self._more or "")
        return named if not isinstance(more, dict) else {**{k: v for k, v in named.items() if k != self._more}, **more}

    def bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Bound:
        """Return the arguments of one call. Raises ``TypeError`` if they do not fit the signature."""
        bound = None if self._signature is None else self._signature.bind(*args, **kwargs)
        if bound is None:
            named: dict[str, Any] = {"args": args, "kwargs": kwargs}
            plain = _plain_or_none(named)
        else:
            bound.apply_defaults()
            named, plain = _without_self(bound), plain_named(bound)
        by_place = args if bound is None else bound.arguments.get(self._many or "")
        known = frozenset(() if self._signature is None else self._signature.parameters) if by_place else None
        more = named.get(self._more or "")
        groups = {self._more: frozenset(more)} if self._more is not None and isinstance(more, dict) else {}
        named = self._spread(named)
        return Bound(plain, shown_arguments(named), self._needs, known, groups, (args, kwargs), bound)
