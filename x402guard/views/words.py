"""Says in words what a view holds: amounts, times, networks, why a session stopped. Text and HTML share it."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from decimal import ROUND_HALF_UP, Decimal
from typing import TYPE_CHECKING, Final

from x402guard.assets import V1_NAMES, resolve_network
from x402guard.evm import is_transaction
from x402guard.kernel.windows import zone
from x402guard.money import format_dollars, nanos_to_decimal

if TYPE_CHECKING:
    from x402guard.views.model import Call, Out, Stop, View

HELP: Final = {
    "proven": "payments, by a transaction on chain",
    "claimed": "payments, by the seller's receipt alone",
    "stated": "models, as their providers bill them",
    "priced": "tools, at the price you gave",
    "assumed": "no evidence: the most it can be",
    "out": "signed or sent, not taken yet",
    "left": "may be spent",
}
"""What each kind of evidence means."""

NAMES: Final = {"out": "still out", "alloc": "allocated"}
"""What a part of a bar is called, if not by its name."""

_STOPPED: Final = {
    "budget_exhausted": "Its budget stopped it.",
    "disputed_usage": "A disputed bill stopped it.",
    "kill_switch": "It was stopped by hand.",
    "loop_detected": "A loop stopped it.",
    "not_verified": "Its result was not verified.",
    "overshoot": "It went past its limit.",
    "rolled_back": "The ledger's server had lost entries.",
    "session_timeout": "Its time was over.",
    "spend_spike": "A spike stopped it.",
    "unexplained_transfer": "An unexplained transfer stopped it.",
    "watchdog": "The watchdog stopped it.",
}

_EXPLORERS: Final = {
    "eip155:1": "https://etherscan.io/tx/",
    "eip155:10": "https://optimistic.etherscan.io/tx/",
    "eip155:137": "https://polygonscan.com/tx/",
    "eip155:8453": "https://basescan.org/tx/",
    "eip155:42161": "https://arbiscan.io/tx/",
    "eip155:84532": "https://sepolia.basescan.org/tx/",
    "eip155:80002": "https://amoy.polygonscan.com/tx/",
    "eip155:11155111": "https://sepolia.etherscan.io/tx/",
}

_NETWORKS: Final = {
    network: name.replace("-", " ").title() for name in V1_NAMES if (network := resolve_network(name)) is not None
}


def printable(text: str) -> str:
    """Return *text* without control characters: servers choose part of it, and a terminal would execute them."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in text)


def json_text(value: object, indent: int | None = 2) -> str:
    """Return *value* as JSON in which all that a terminal would execute, or write from right to left, is escaped."""
    lines = json.dumps(value, indent=indent, ensure_ascii=False).split("\n")
    return "\n".join(line if line.isprintable() else _escaped(line) for line in lines)


def _escaped(text: str) -> str:
    return "".join(char if char.isprintable() else json.dumps(char)[1:-1] for char in text)


def dollars(nanos: int) -> str:
    """Return an exact amount: ``$0.0263475``, ``-$0.02``."""
    return f"-${format_dollars(-nanos)}" if nanos < 0 else f"${format_dollars(nanos)}"


def rounded(nanos: int) -> str:
    """Return an amount for a headline: exact up to three decimals, else in cents, half up, but never zero."""
    exact = nanos_to_decimal(abs(nanos))
    if exact == exact.quantize(Decimal("0.001")):
        return dollars(nanos)
    cents = exact.quantize(Decimal("0.01"), ROUND_HALF_UP)
    return dollars(nanos) if not cents else f"{'-' if nanos < 0 else ''}${cents:,}"


def clock(at_ms: int) -> str:
    """Return a time of day: ``14:45:15 UTC``."""
    return datetime.fromtimestamp(at_ms / 1000, UTC).strftime("%H:%M:%S UTC")


def moment(at_ms: int) -> str:
    """Return a day and a time: ``22 Nov 2026, 14:45:15 UTC``."""
    return f"{day(at_ms)}, {clock(at_ms)}"


def near(at_ms: int, now_ms: int) -> str:
    """Return a time of day, with the day if it is not that of *now_ms*."""
    return clock(at_ms) if day(at_ms) == day(now_ms) else moment(at_ms)


def day(at_ms: int, tz: str = "UTC") -> str:
    """Return a day in a time zone: ``22 Nov 2026``."""
    at = datetime.fromtimestamp(at_ms / 1000, zone(tz))
    return f"{at.day} {at:%b %Y}"


def span(ms: int) -> str:
    """Return how long something took: ``51 s``, ``4 min 42 s``, ``3 h 5 min``, ``12 days``."""
    seconds = max(0, ms) // 1000
    for unit, size, smaller, part in (("days", 86_400, "h", 3_600), ("h", 3_600, "min", 60), ("min", 60, "s", 1)):
        if seconds >= size:
            whole, rest = seconds // size, seconds % size // part
            word = "day" if unit == "days" and whole == 1 else unit
            return f"{whole} {word} {rest} {smaller}" if rest and whole < 10 else f"{whole} {word}"
    return f"{seconds} s"


def axis(nanos: int) -> str:
    """Return an amount for an axis: ``$0.05``, ``$12.50``, ``$100k``, ``$2M``."""
    for least, size, unit in ((10**15, 10**15, "M"), (10**13, 10**12, "k")):
        if nanos >= least:
            return f"${nanos / size:g}{unit}"
    return rounded(nanos)


def count(number: int, one: str, many: str = "") -> str:
    """Return ``1 call`` or ``2,300 calls``."""
    return f"{number:,} {one if number == 1 else many or one + 's'}"


def short(address: str) -> str:
    """Return an address or a hash as ``0x2322…1088``."""
    return f"{address[:6]}…{address[-4:]}" if len(address) > 13 and address.startswith("0x") else address


def network_name(network: str) -> str:
    """Return what people call a network: ``Base Sepolia``, or its CAIP-2 name."""
    return _NETWORKS.get(network, network)


def explorer(network: str, transaction: str) -> str | None:
    """Return the address of a transaction on the block explorer of its network; None if there is none, or no hash."""
    is_known = network in _EXPLORERS and is_transaction(transaction)
    return f"{_EXPLORERS[network]}{transaction}" if is_known else None


def stopped_words(stop: Stop | None) -> str:
    """Return why a session can spend no more, as a short sentence; "" if it can, or has ended by itself."""
    return "" if stop is None else _STOPPED.get(stop.word, "")


def stop_head(stop: Stop) -> str:
    """Return the reason of a stop in a few words: ``budget: $0.06 did not fit``."""
    word = stop.word.replace("_", " ")
    if stop.word == "budget_exhausted":
        return "budget" if stop.requested is None else f"budget: {dollars(stop.requested)} did not fit"
    return word


def stop_detail(stop: Stop, now_ms: int) -> str:
    """Return what is to be said beside that: what was left and when, or the reason in words."""
    at = "" if stop.at_ms is None else near(stop.at_ms, now_ms)
    if stop.word == "budget_exhausted" and stop.available is not None:
        return f"{dollars(stop.available)} was left when it was last asked, at {at}"
    reason = stop.reason or ""
    return f"{reason}{', ' if reason and at else ''}{'at ' + at if at else ''}"


def headline(view: View) -> str:
    """Return what was spent of which limit: the first sentence of a report."""
    if view.asked:
        between = period_words(view)
        return f"Spent {rounded(view.spent)} {between}."
    if view.limit is None:
        return f"Spent {rounded(view.spent)}, without a limit."
    period = (view.per or "").partition(" ")[0]
    per = {"": "", "day": " today"}.get(period, f" this {period}")
    return f"Spent {rounded(view.spent)} of {rounded(view.limit)}{per}."


def period_words(view: View) -> str:
    """Return the period of a view in words."""
    if view.since_ms is None:
        return "" if view.until_ms is None else f"before {moment(view.until_ms)}"
    since = moment(view.since_ms).replace(", 00:00:00 UTC", "")
    if view.until_ms is None:
        return f"since {since}"
    return f"from {since} to {moment(view.until_ms).replace(', 00:00:00 UTC', '')}"


def out_words(view: View) -> str:
    """Return what is still out and until when, as a sentence; "" if nothing is."""
    if not view.sums.out:
        return ""
    last = max((row.until_ms for row in view.outstanding), default=0)
    if last <= view.now_ms:
        return f"{rounded(view.sums.out)} is still out; its time is over, and it is not settled yet."
    return f"{rounded(view.sums.out)} is still out until {near(last, view.now_ms)}."


def whereabouts(*names: str) -> str:
    """Return customer, session and agent on one line; a name that is empty or the same as one before is left out."""
    return " · ".join(dict.fromkeys(name for name in names if name))


def out_line(row: Out) -> str:
    """Return to whom a live hold is out, and why."""
    payee = f" ({short(row.payee)})" if row.payee else ""
    return f"to {row.to}{payee}" + (f", {row.why}" if row.why else "")


def out_command(row: Out) -> str:
    """Return the command that takes a live payment back, or ""."""
    return f"x402guard holds cancel {row.hold[:8]}" if row.cancellable else ""


def chain_words(view: View) -> str:
    """Return how many payments are proven; "" without a payment."""
    chain = view.chain
    if not chain.payments:
        return ""
    words = f"{chain.proven:,} of {count(chain.payments, 'payment')} proven"
    if chain.claimed:
        words += f", {chain.claimed:,} claimed alone"
    if chain.assumed:
        words += f", {chain.assumed:,} assumed"
    return words


def unexplained_words(view: View) -> str:
    """Return the transfers that no payment explains, as a sentence; "" if there is none."""
    chain = view.chain
    if not chain.unexplained:
        return ""
    return f"{count(chain.unexplained, 'transfer')} out of the wallet, {dollars(chain.unexplained_amount)}, no payment explains."


def scheme_words(call: Call) -> str:
    """Return how a payment was signed: ``exact by EIP-3009``."""
    method = {"eip3009": "EIP-3009", "permit2": "Permit2"}.get(call.method, call.method)
    return f"{call.scheme} by {method}" if method else call.scheme


def gap_words(view: View) -> str:
    """Return that the books do not add up, as a sentence; "" if they do."""
    if not view.gap:
        return ""
    return f"The evidence does not add up to what is spent: {dollars(view.gap)} differs. Run x402guard verify."


def sum_line(view: View) -> str:
    """Return the sum as one line: ``$1.38 spent + $0.11 still out + $0.01 left = $1.50 limit``."""
    *parts, last = [f"{amount} {name}" for amount, name in sum_words(view)]
    return " + ".join(parts) + (" = " if view.limit is not None else " + ") + last


STOPPED: Final = "not to be spent while it is stopped"


def sum_words(view: View) -> list[tuple[str, str]]:
    """Return the sum as (amount, name): spent + still out + left = limit; without a limit what is spent and out."""
    terms = [(dollars(view.spent), "spent"), (dollars(view.sums.out), "still out")]
    if view.left is not None and view.limit is not None and view.left < 0:
        return [*terms, (dollars(view.limit + -view.left), f"in all, {dollars(-view.left)} past the limit")]
    if view.left is not None and view.limit is not None:
        stopped = [(dollars(view.left), STOPPED)] if view.state == "tripped" and view.left else []
        terms += [(dollars(0 if stopped else view.left), "left"), *stopped, (dollars(view.limit), "limit")]
    return terms


def is_sum(name: str) -> bool:
    """True for the last term of a sum, before which an equals sign stands."""
    return name == "limit" or name.startswith("in all")


def legend(view: View) -> list[tuple[str, int, str]]:
    """Return (kind, amount, what it means) of each part of the bar: the evidence, and what is left of a limit or past it."""
    parts = [(name, amount, HELP[name]) for name, amount in view.sums.parts()]
    if view.left is None:
        return parts
    if view.state == "tripped" and view.left > 0:
        return [*parts, ("left", view.left, STOPPED)]
    return [*parts, ("left", view.left, HELP["left"]) if view.left >= 0 else ("past", -view.left, "past the limit")]
