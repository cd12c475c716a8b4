"""Defines what a report shows: figures and facts without markup or rounding. Each rendering draws from it.

Amounts are integers of nano-dollars, times are unix milliseconds. Text that a server or an agent chose stands in it as it
is: a rendering escapes it.
"""

from __future__ import annotations

from typing import Final

from msgspec import Struct
from msgspec.structs import astuple

from x402guard.frozen import readable

VIEW_SCHEMA: Final = "x402guard.view.v1"

MOST_ROWS: Final = 25
"""The maximum number of rows of one group; the others are summed in one more row."""

MOST_CALLS: Final = 500
"""The maximum number of calls in a view: the dearest and the latest ones."""


class Sums(Struct, frozen=True):
    """Amounts by why they are believed. All but ``out`` are spent.

    Attributes:
        proven: payments that a transaction on chain shows.
        claimed: payments that the seller's receipt alone shows.
        stated: LLM calls, as their provider bills them.
        priced: tools, at the price that their owner gave.
        assumed: without evidence, booked at the most it can be.
        out: signed or sent, and not taken yet: the ceilings of live holds.
    """

    proven: int = 0
    claimed: int = 0
    stated: int = 0
    priced: int = 0
    assumed: int = 0
    out: int = 0

    @property
    def spent(self) -> int:
        """What was captured."""
        return self.proven + self.claimed + self.stated + self.priced + self.assumed

    @property
    def total(self) -> int:
        """What was captured, and what is still out."""
        return self.spent + self.out

    def parts(self) -> tuple[tuple[str, int], ...]:
        """Return (name, amount) in the order of certainty."""
        return tuple(zip(EVIDENCE, astuple(self), strict=True))


EVIDENCE: Final[tuple[str, ...]] = Sums.__struct_fields__
"""The six kinds of evidence, the most certain first."""


class Row(Struct, frozen=True):
    """One line of a group: what a model, tool, seller, agent, customer or session has used, with what is still out.

    Attributes:
        key: what the group is by: an id, a host and payee, a name.
        detail: a second line: a payee, a customer.
        calls: holds that ended in a capture, and live ones.
        limit: its own limit, or None.
        depth: how deep an agent stands below the view's session.
        state, word: of an agent or a session: ``open``, ``tripped``, ``closed``, and why it ended.
        opened_ms: of a session.
    """

    key: str
    name: str
    sums: Sums
    calls: int
    detail: str = ""
    limit: int | None = None
    tokens_in: int = 0
    tokens_out: int = 0
    refused: int = 0
    depth: int = 0
    state: str = ""
    word: str | None = None
    opened_ms: int = 0


class Customer(Struct, frozen=True):
    """What one named budget has used, with the days of the view.

    Attributes:
        per: the period and time zone of its limit, or None.
        window_spent: what counts against its limit now.
        yesterday, today: None in a view that does not reach from yesterday to now.
        days: what was captured on each day of the view.
    """

    row: Row
    per: str | None
    window_spent: int
    yesterday: int | None
    today: int | None
    sessions: int
    days: tuple[int, ...]


class Day(Struct, frozen=True):
    """What was captured on a day (``2026-11-22``) or in a month (``2026-11``), and what was stopped and refused."""

    name: str
    sums: Sums
    stops: int
    refusals: int


class Stop(Struct, frozen=True):
    """Why a session can spend no more. *word* is one of ``terminated_by``."""

    word: str
    reason: str | None
    at_ms: int | None
    requested: int | None = None
    available: int | None = None


class Out(Struct, frozen=True):
    """A live hold: what may still be taken, by whom, and until when.

    Attributes:
        to: the host, model or tool.
        why: the doubt about it, or None.
        until_ms: the first moment at which nothing of it can be taken.
        cancellable: True if its signature can be cancelled on chain.
    """

    hold: str
    kind: str
    amount: int
    to: str
    payee: str
    path: str
    agent: str
    session: str
    customer: str
    why: str | None
    until_ms: int
    transaction: str
    cancellable: bool


class RefusalRow(Struct, frozen=True):
    """What one rule has refused. Amounts and words are those of the last one.

    Attributes:
        is_least: True if there were more in a period: of a rule the first and the last hundred are kept one by one.
    """

    rule: str
    count: int
    first_ms: int
    last_ms: int
    requested: int | None
    available: int | None
    reason: str
    agents: tuple[str, ...]
    is_least: bool = False


class Chain(Struct, frozen=True):
    """How far payments are proven. The first four count payments.

    Attributes:
        asked_ms: when the wallet's transfers were last compared with the ledger, or None.
        unexplained: transfers out of the wallet that no payment explains; unexplained_amount: their sum.
    """

    payments: int
    proven: int
    claimed: int
    assumed: int
    networks: tuple[str, ...]
    asked_ms: int | None
    unexplained: int = 0
    unexplained_amount: int = 0


class Point(Struct, frozen=True, array_like=True):
    """What was spent, and held above that, from a moment on."""

    ms: int
    spent: int
    held: int


class Mark(Struct, frozen=True):
    """A moment that a chart of time marks: ``soft_limit``, ``trip``, ``reset``, ``limit`` or ``close``; of which node."""

    ms: int
    kind: str
    key: str
    node: str
    words: str
    amount: int | None = None


class Lane(Struct, frozen=True):
    """When an agent has made calls; refused: (first, last, how many, rule)."""

    key: str
    name: str
    calls: tuple[int, ...]
    refused: tuple[tuple[int, int, int, str], ...]


class Call(Struct, frozen=True):
    """One call, refusal, stop or reset, as a line.

    Attributes:
        kind: ``payment``, ``llm``, ``tool``, ``refusal``, ``trip`` or ``reset``.
        to: the host of a payment, the model, the tool, or the rule.
        amount: captured, or held while it is out; requested for a refusal; None if there is none.
        evidence: one of ``EVIDENCE``, ``nothing`` for a call that cost nothing in the end, or "".
        words: the doubt about it, or the reason of a refusal or stop.
    """

    ms: int
    agent: str
    session: str
    kind: str
    to: str
    amount: int | None
    evidence: str
    host: str = ""
    path: str = ""
    scheme: str = ""
    method: str = ""
    payee: str = ""
    provider: str = ""
    tokens_in: int = 0
    tokens_out: int = 0
    network: str = ""
    transaction: str = ""
    hold: str = ""
    words: str = ""


class Tokens(Struct, frozen=True):
    """A budget of tokens and what has used them: (name, tokens)."""

    total: int
    used: int
    reserved: int
    left: int
    rows: tuple[tuple[str, int], ...]
    soft: int | None = None


class Bound(Struct, frozen=True):
    """The budget above that leaves less than a session has left itself."""

    kind: str
    id: str
    name: str
    left: int


class Remark(Struct, frozen=True):
    """A fact beside the sums, as a sentence: an allowance, a spike, what passed in shadow mode."""

    name: str
    words: str


@readable
class View(Struct, frozen=True):
    """Everything that a report of a session, a named budget, the wallet or a period shows.

    Attributes:
        since_ms, until_ms: the period in which *sums* were captured: as asked, or the current window of a budget that
            begins again; None for all time.
        asked: True if the period was asked for. Then it has no limit of its own.
        per: period and time zone of such a budget: ``day Europe/Berlin``.
        tz: the time zone of the days.
        customer: the nearest named budget around it, or "".
        wallet: the address of the payer, or "".
        limit, left: in nano-dollars; None without a limit. ``left`` is below zero past the limit.
        spent: what counts against the limit, without what is out; spent_total: since the beginning.
        remaining: the largest payment that fits here and above; None without a limit.
        bound_by: the budget above that leaves less.
        reserve: the part of ``left`` that is kept for the last LLM calls.
        soft: the soft limits, in millionths of the limit.
        sums: what was captured in the period, and what is out now.
        stops: how many sessions ended for a reason, by that reason; of the wallet and of a named budget.
        outstanding_count, refused, calls_count: how many there are in all.
        sessions: the dearest ones below the wallet or a named budget; sessions_count: how many there are.
    """

    schema: str
    kind: str
    id: str
    name: str
    state: str
    now_ms: int
    opened_ms: int
    closed_ms: int | None
    since_ms: int | None
    until_ms: int | None
    asked: bool
    per: str | None
    tz: str
    customer: str
    wallet: str
    limit: int | None
    spent: int
    spent_total: int
    left: int | None
    remaining: int | None
    bound_by: Bound | None
    reserve: int
    soft: tuple[int, ...]
    chain: Chain
    sums: Sums
    stopped: Stop | None = None
    stops: tuple[tuple[str, int], ...] = ()
    outstanding: tuple[Out, ...] = ()
    outstanding_count: int = 0
    refusals: tuple[RefusalRow, ...] = ()
    refused: int = 0
    kinds: tuple[Row, ...] = ()
    agents: tuple[Row, ...] = ()
    sellers: tuple[Row, ...] = ()
    models: tuple[Row, ...] = ()
    tools: tuple[Row, ...] = ()
    customers: tuple[Customer, ...] = ()
    sessions: tuple[Row, ...] = ()
    sessions_count: int = 0
    days: tuple[Day, ...] = ()
    series: tuple[Point, ...] = ()
    marks: tuple[Mark, ...] = ()
    lanes: tuple[Lane, ...] = ()
    calls: tuple[Call, ...] = ()
    calls_count: int = 0
    tokens: Tokens | None = None
    remarks: tuple[Remark, ...] = ()

    @property
    def gap(self) -> int:
        """What the evidence lacks of what is spent: 0, or the books do not add up.

        In the present window it is not judged: a clock that was set back closes a hold in another window than the
        journal's time says.
        """
        return 0 if self.asked or self.per is not None else self.spent - self.sums.spent
