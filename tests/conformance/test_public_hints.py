"""Agent frameworks make tools of methods by their type hints: those of a run can be read."""

import inspect
import typing

import pytest

import x402guard

RUN = (x402guard.Session, x402guard.Guard, x402guard.NamedBudget)
NEEDS_AN_EXTRA = {"delegate", "adelegate", "delegated", "adelegated", "task", "work_on", "__init__"}
"""Their hints name classes that load with pydantic, or with a client's library."""

METHODS = [
    (kind, name)
    for kind in RUN
    for name, method in inspect.getmembers(kind, inspect.isfunction)
    if not name.startswith("_") and name not in NEEDS_AN_EXTRA
]


@pytest.mark.parametrize(("kind", "name"), METHODS, ids=[f"{kind.__name__}.{name}" for kind, name in METHODS])
def test_the_hints_of_a_public_method_can_be_read(kind, name):
    assert "return" in typing.get_type_hints(getattr(kind, name))


@pytest.mark.parametrize(
    "function", [x402guard.install, x402guard.uninstall, x402guard.tool, x402guard.current_session]
)
def test_the_hints_of_a_public_function_can_be_read(function):
    assert "return" in typing.get_type_hints(function)
