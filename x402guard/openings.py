"""What opening a session takes: its arguments checked, the guard that it belongs to, and the tokens that it counts."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Protocol

from x402guard.agent.context import TokenBudget
from x402guard.drivers import Shell
from x402guard.errors import ConfigError
from x402guard.guarded import Payer
from x402guard.ledger.model import WALLET, Node
from x402guard.ledger.tokens import MOST_TOKENS, TokenLimit, tokens_node
from x402guard.money import Dollars, Nanos, dollars_to_nanos
from x402guard.purchase import Terms

__all__ = ["Owner", "as_budget", "bind_tokens", "check_name", "check_tokens", "parse_limit"]


class Owner(Payer, Protocol):
    """What a session needs of the guard that it belongs to."""

    @property
    def terms(self) -> Terms:
        """What every request of the guard works under."""

    def opener(self) -> str:
        """Return a token for one opening of a session."""


def parse_limit(budget: Dollars | None, *, field: str) -> Nanos | None:
    """Return a budget in nano-dollars. Raises ``ConfigError`` naming *field*; zero is a budget that nothing fits into."""
    if budget is None:
        return None
    try:
        return dollars_to_nanos(budget, field=field)
    except (TypeError, ValueError) as error:
        raise ConfigError(str(error)) from error


def check_name(name: object) -> None:
    """Raise ``ConfigError`` for what cannot be the name of a session: a report has to print it."""
    if not isinstance(name, str) or not name or not name.isprintable() or len(name) > 200 or name == WALLET:
        raise ConfigError(f"name: {name!r} is not a name for a session; write text such as 'court-research'")


def as_budget(tokens: TokenBudget | int | None) -> TokenBudget | None:
    """Return what is to count a session's tokens, a number of them being a budget. Raises ``ConfigError`` for what is none."""
    if isinstance(tokens, int):
        try:
            return TokenBudget(tokens)
        except ConfigError:
            shown = tokens if -MOST_TOKENS < tokens < MOST_TOKENS else "that"
            raise ConfigError(f"tokens: {shown} is not a positive whole number of tokens, such as 100_000") from None
    return tokens


def check_tokens(shell: Shell, path_ids: Collection[str], tokens: object) -> None:
    """Raise ``ConfigError`` for what cannot count a session's tokens: no budget of tokens, or one of other books or sessions.

    *path_ids* are the session and those around it, whose budgets it may share.
    """
    if tokens is None:
        return
    if not isinstance(tokens, TokenBudget):
        raise ConfigError(
            f"tokens: {tokens!r} is no TokenBudget; write TokenBudget(total=100_000), or a number of tokens"
        )
    kept = tokens.kept_in(shell)
    if kept is False or (kept and tokens.limit.session_id not in path_ids):
        raise ConfigError("tokens: this TokenBudget is in use elsewhere; give the session one of its own")


def bind_tokens(guard: Owner, terms: Terms, node: Node, given: TokenBudget | None) -> TokenBudget:
    """Return what counts a session's tokens: the budget given, or one as the ledger has it."""
    budget = given or TokenBudget()
    if budget.kept_in(guard.shell) is None:
        limit = TokenLimit(tokens_node(node.id), budget.asked[1], node.id)
        budget.bind(guard.shell, replace(terms, tokens=limit), limit)
    return budget
