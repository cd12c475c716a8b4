"""Validates the arguments of ``session()`` and ``budget()`` and builds the ledger request."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from contextvars import ContextVar
from typing import Final, Literal, Self, get_args

from msgspec import Struct

from x402guard.assets import TEST_NETWORKS
from x402guard.errors import ConfigError, InconsistentLedger
from x402guard.flow.context import Context
from x402guard.flow.shell import Shell
from x402guard.flow.surroundings import here
from x402guard.flow.threads import finish_closing
from x402guard.frozen import replace
from x402guard.kernel.change_set import Opened
from x402guard.kernel.rows import WALLET, Nanos, Node, NodeKind, Window
from x402guard.ledger.sessions import NodeRequest, begin_finalizing, check_window, part_of
from x402guard.ledger.store import CheckedInParts, LedgerStore
from x402guard.ledger.token_budget import MOST_TOKENS, TokenLimit, tokens_node
from x402guard.ledger.view import Notice, Scope
from x402guard.llm.meter import Meter
from x402guard.money import Dollars, dollars_to_nanos, format_dollars
from x402guard.policy.checks import SoftLimits, check_choice, check_dollars, parts_of
from x402guard.stores.transacts import tokens_of
from x402guard.tools.token_budget import TokenBudget

_NONE: Final[frozenset[str]] = frozenset()
_FINALIZING: Final[ContextVar[tuple[Finalizing, ...]]] = ContextVar("x402guard_finalizing", default=())


def finalizing_ids() -> frozenset[str]:
    """Return the sessions with an open ``finalizing`` block in this context; none in a task that outlives a block."""
    blocks = _FINALIZING.get()
    return frozenset(block.node_id for block in blocks if block.is_open) if blocks else _NONE


def undoing_ids() -> frozenset[str]:
    """Return the sessions in whose reserve the undo of an action may spend in this context."""
    blocks = _FINALIZING.get()
    return frozenset(block.node_id for block in blocks if block.is_open and block.of_undo) if blocks else _NONE


BUDGET_PREFIX: Final = "budget:"  # begins the id of every named budget, and of no session
_ID: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,99}", re.ASCII)
_PERCENT: Final = re.compile(r"([0-9]{1,2})\s*%", re.ASCII)


class Basis(Struct, frozen=True):
    """What a guard shares with its sessions and named budgets.

    Attributes:
        shell: the adapters that flows run on.
        context: the settings that flows work under.
        meter: how LLM calls are held and priced.
    """

    shell: Shell
    context: Context
    meter: Meter


def kernel_opened(context: Context) -> Opened:
    """Return what the kernel is opened with for a guard: its tokens, and what no change may pass."""
    return Opened(
        tokens=tokens_of(context.registry.all()),
        most_exposed=context.policy.most_exposed,
        unsafe_trust_receipts=context.unsafe_trust_receipts,
        memory_ms=context.memory_ms,
        test_networks=TEST_NETWORKS,
    )


def parse_limit(budget: Dollars | None, *, field: str) -> Nanos | None:
    """Return a budget in nano-dollars; nothing fits a budget of zero. Raises ``ConfigError`` naming *field*."""
    return None if budget is None else check_dollars(field, budget)


WalletBudget = Dollars | Mapping[str, str]
"""Dollars for good, or ``{"amount": "20.00", "per": "month", "tz": "Europe/Berlin"}``."""

WalletLimit = tuple[Nanos | None, Window | None]
"""The wallet's limit in nano-dollars, and when its spending restarts; None for no limit, and for never."""

_OF_A_BUDGET: Final = frozenset({"amount", "per", "tz"})


def parse_wallet_budget(budget: WalletBudget | None) -> WalletLimit:
    """Return the wallet's limit in nano-dollars, and when its spending restarts. Raises ``ConfigError`` naming the field."""
    if not isinstance(budget, Mapping):
        return parse_limit(budget, field="budget"), None
    if not _OF_A_BUDGET.issuperset(budget) or "amount" not in budget or ("tz" in budget and "per" not in budget):
        raise ConfigError(f"budget: {dict(budget)!r:.80} is no budget; {_AS_A_TABLE}")
    limit, per = check_dollars("budget.amount", budget["amount"]), budget.get("per")
    try:
        return limit, None if per is None else check_window(per, budget.get("tz", "UTC"))
    except ConfigError as error:
        raise ConfigError(f"budget.{error}") from None


_AS_A_TABLE: Final = 'write {"amount": "20.00", "per": "month", "tz": "Europe/Berlin"}, or "20.00" for good'


def parse_reserve(reserve: Dollars | None, limit: Nanos | None) -> tuple[Nanos | None, int | None]:
    """Return the reserve for last LLM calls: in nano-dollars, or as a part of the budget in percent, such as ``10%``.

    Raises ``ConfigError`` for anything else, and for a reserve as large as the budget.
    """
    if reserve is None:
        return None, None
    percent = _PERCENT.fullmatch(reserve.strip()) if isinstance(reserve, str) else None
    try:
        kept = None if percent is not None else dollars_to_nanos(reserve, field="reserve")
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{error}; or a part of the budget, such as '10%'") from error
    part = None if percent is None else int(percent[1])
    least = part_of(limit, part) if part is not None and limit is not None else kept
    if limit is not None and least is not None and least >= limit:
        raise ConfigError(
            f"reserve: ${format_dollars(least)} of a budget of ${format_dollars(limit)} would leave nothing for payments"
        )
    return kept, part


def session_request(
    basis: Basis,
    parent_id: str,
    name: str,
    *,
    budget: Dollars | None,
    session_id: str | None,
    reserve: Dollars | None,
    soft_limit: SoftLimits | None,
) -> NodeRequest:
    """Return the ledger request that opens a session. Raises ``ConfigError`` naming the argument."""
    check_name(name)
    if session_id is not None and (
        not isinstance(session_id, str)
        or not _ID.fullmatch(session_id)
        or session_id == WALLET
        or session_id.startswith(BUDGET_PREFIX)
    ):
        raise ConfigError(
            f"id: {session_id!r} cannot be a session's id; use letters, digits, and . _ : - (at most 100)"
        )
    limit = parse_limit(budget, field="budget")
    resumes = session_id is not None and bool(basis.shell.store.path(session_id))
    if limit is None and not resumes:
        limit = basis.context.session_budget
    kept, percent = parse_reserve(reserve, limit)
    parts = basis.context.policy.soft_parts if soft_limit is None else parts_of("soft_limit", soft_limit)
    return NodeRequest(
        id=session_id or f"s_{here().random_bytes(8).hex()}",
        parent_id=parent_id,
        kind=NodeKind.SESSION,
        name=name,
        limit=limit,
        opener=opener_of(basis.context),
        gone=basis.context.gone,
        reserve=kept,
        reserve_percent=percent,
        soft=None if resumes and soft_limit is None else parts,
    )


def opener_of(context: Context) -> str:
    """Return a token for one opening of a session by this instance."""
    return f"{context.instance}#{here().random_bytes(4).hex()}"


class Finalizing:
    """The block (``with`` or ``async with``) of a session's last LLM calls, which may use its reserve; only once."""

    def __init__(self, store: LedgerStore, node_id: str, *, of_undo: bool = False) -> None:
        self._store, self.node_id, self.of_undo = store, node_id, of_undo
        self._before: tuple[Finalizing, ...] = ()
        self.is_open = False

    def _begin(self) -> None:
        scope = Scope(nodes=(self.node_id,), durable=True)
        self._store.transact(scope, lambda view: begin_finalizing(view, self.node_id))

    def _enter(self) -> Self:
        self._before, self.is_open = _FINALIZING.get(), True
        _FINALIZING.set((*self._before, self))
        return self

    def _leave(self) -> None:
        self.is_open = False
        _FINALIZING.set(self._before)

    def __enter__(self) -> Self:
        self._begin()
        return self._enter()

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        self._leave()

    async def __aenter__(self) -> Self:
        await finish_closing(self._begin, of_a_guard=True)
        return self._enter()

    async def __aexit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        self._leave()


@contextmanager
def undoing(store: LedgerStore, node_id: str) -> Iterator[None]:
    """A block in which whatever is spent may use the session's reserve, if it has one that is left."""
    with ExitStack() as reserve:
        with suppress(ConfigError):  # it has none, or its last LLM calls have taken it: what fits is paid all the same
            reserve.enter_context(Finalizing(store, node_id, of_undo=True))
        yield


def check_name(name: object) -> None:
    """Raise ``ConfigError`` unless *name* can name a session: reports print it."""
    if not isinstance(name, str) or not name or not name.isprintable() or len(name) > 200 or name == WALLET:
        raise ConfigError(f"name: {name!r} is not a name for a session; write text such as 'court-research'")


TokenLimiting = Literal["count", "refuse"]


def limited_tokens(
    tokens: TokenBudget | int | None, limiting: TokenLimiting, *, of: TokenBudget | None = None
) -> TokenBudget | None:
    """Return a session's token budget, under a hard limit if *limiting* says ``refuse``. Raises ``ConfigError``.

    *of* is the token budget of the session around it: one without tokens of its own shares it, and its hard limit holds
    for those that it does not share.
    """
    check_choice("token_limit", limiting, get_args(TokenLimiting))
    budget = as_budget(tokens)
    if of is not None and budget is None:
        if limiting == "refuse" and not of.hard:
            raise ConfigError(
                "token_limit: a child shares the tokens of its session; give it tokens of its own, tokens=20_000, or open "
                'the session with token_limit="refuse"'
            )
        return None
    if limiting == "refuse" or (of is not None and of.hard):
        budget = TokenBudget() if budget is None else budget
        if isinstance(budget, TokenBudget):
            budget.refuse_calls()
    return budget


def as_budget(tokens: TokenBudget | int | None) -> TokenBudget | None:
    """Return a session's token budget; a number becomes one. Raises ``ConfigError`` for any other value of a number."""
    if isinstance(tokens, int):
        try:
            return TokenBudget(tokens)
        except ConfigError:
            shown = tokens if -MOST_TOKENS < tokens < MOST_TOKENS else "that"
            raise ConfigError(f"tokens: {shown} is not a positive whole number of tokens, such as 100_000") from None
    return tokens


def check_tokens(shell: Shell, path_ids: Collection[str], tokens: object) -> None:
    """Raise ``ConfigError`` unless *tokens* is None or a token budget that this session may use.

    A budget in use by another ledger or session is refused. *path_ids* are the session and those around it.
    """
    if tokens is None:
        return
    if not isinstance(tokens, TokenBudget):
        raise ConfigError(
            f"tokens: {tokens!r} is not a TokenBudget; write TokenBudget(total=100_000), or a number of tokens"
        )
    kept = tokens.kept_in(shell)
    if kept is False or (kept and tokens.limit.session_id not in path_ids):
        raise ConfigError("tokens: this TokenBudget is in use elsewhere; give the session one of its own")


def bind_tokens(shell: Shell, context: Context, node: Node, given: TokenBudget | None) -> TokenBudget:
    """Return a session's token budget: the one given, or the one in the ledger."""
    budget = given or TokenBudget()
    if budget.kept_in(shell) is None:
        limit = TokenLimit(tokens_node(node.id), budget.asked[1], node.id, budget.hard)
        budget.bind(shell, replace(context, tokens=limit), limit)
    return budget


_PAUSE_S: Final = 0.1


def check_on(shell: Shell, is_over: Callable[[], bool]) -> None:
    """Check what of the ledger its opening has left, piece by piece; what is found is a notice and stops the ledger."""
    store = shell.store
    if not isinstance(store, CheckedInParts):
        return
    try:
        while not is_over() and not store.check_on():
            time.sleep(_PAUSE_S)
    except InconsistentLedger as error:
        words, at_s = str(error), store.now_ms() / 1000
        shell.notifier.notify(
            (Notice("ledger_inconsistent", "critical", words, rule="inconsistent_ledger", time=at_s),)
        )
