"""Binds a function's arguments: as plain values for comparison, and as they are passed to the function."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, Final

from msgspec import Struct

from x402guard.errors import ConfigError
from x402guard.policy import Narrow
from x402guard.tools.arguments import Readable, plain_arguments
from x402guard.tools.flow import Approved

_NAMED: Final = (
    inspect.Parameter.POSITIONAL_ONLY,
    inspect.Parameter.POSITIONAL_OR_KEYWORD,
    inspect.Parameter.KEYWORD_ONLY,
)


class Bound(Struct, frozen=True):
    """The arguments of one call.

    Attributes:
        arguments: as plain values, or None if they are not comparable.
        shown: the same for the owner's code and for approvers.
        needs: names of the required arguments.
        known: names that a rule can remove; None for any name, if no argument is only positional.
        groups: name of the ``**`` parameter → the names in it.
        more: name of the ``**`` parameter, or "".
        given: positional and keyword arguments as given.
        named: the arguments by parameter name, or None if the signature is unknown.
    """

    arguments: Mapping[str, Any] | None
    shown: Readable
    needs: frozenset[str]
    known: frozenset[str] | None
    groups: Mapping[str, frozenset[str]]
    more: str
    given: tuple[tuple[Any, ...], dict[str, Any]]
    named: inspect.BoundArguments | None

    def changed(self, approved: Approved | None) -> bool:
        """True if the caller has changed the arguments since they were *approved*; False if none were.

        An object that is no plain value is compared by the name of its class.
        """
        if approved is None:
            return False
        removed = frozenset() if approved.narrow is None else frozenset(approved.narrow.remove)
        grouped = removed.union(*(self.groups.get(name, ()) for name in removed))
        try:
            return Readable(_spread(self.by_name(), self.more), grouped).seen().digest != approved.digest
        except Exception:  # noqa: BLE001 - what cannot be read any more is not what was approved
            return True

    def by_name(self) -> dict[str, Any]:
        """Return the arguments by the names of their parameters."""
        args, kwargs = self.given
        return {"args": args, "kwargs": kwargs} if self.named is None else _without_self(self.named)

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
    first = next(iter(bound.signature.parameters), "")
    return {name: value for name, value in bound.arguments.items() if name != first or name not in ("self", "cls")}


def _plain_or_none(named: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return arguments by their names as plain values, or None if they are not comparable."""
    try:
        return plain_arguments(named)
    except ConfigError:
        return None  # too large to compare


def _spread(named: dict[str, Any], more: str) -> dict[str, Any]:
    """Return arguments by the names for rules: those in the ``**`` parameter, *more*, by their own names."""
    found = named.get(more)
    if not isinstance(found, dict):
        return named
    own = {name: value for name, value in named.items() if name != more}
    # A name that only goes by place may stand in the group as well.
    return {**own, **{f"**{name}" if name in own else name: value for name, value in found.items()}}


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

    def bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Bound:
        """Return the arguments of one call. Raises ``TypeError`` if they do not fit the signature."""
        bound = None if self._signature is None else self._signature.bind(*args, **kwargs)
        if bound is None:
            named: dict[str, Any] = {"args": args, "kwargs": kwargs}
        else:
            bound.apply_defaults()
            named = _without_self(bound)
        by_place = args if bound is None else bound.arguments.get(self._many or "")
        known = frozenset(() if self._signature is None else self._signature.parameters) if by_place else None
        more = named.get(self._more or "")
        groups = {self._more: frozenset(more)} if self._more is not None and isinstance(more, dict) else {}
        shown = Readable(_spread(named, self._more or ""))
        return Bound(_plain_or_none(named), shown, self._needs, known, groups, self._more or "", (args, kwargs), bound)
