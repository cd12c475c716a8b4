"""A response that runs in the background (``background: true`` of OpenAI's Responses): its poll captures its cost.

The answer to the request that creates it states no usage. Its hold stays until a poll shows what was used, in any process
of the ledger, or else until its deadline.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from x402guard.errors import LedgerUnavailable, ProtocolError
from x402guard.flow.capture import Bill, capture_bill
from x402guard.flow.context import Context
from x402guard.flow.effects import Compute, Flow, PeekBody, Reply, Send, SendFailed, Transact, transact_anyway
from x402guard.flow.receipt import Receipt, receipt_of
from x402guard.flow.request import RequestFacts
from x402guard.frozen import replace
from x402guard.kernel.change_set import MarkKey
from x402guard.kernel.rows import Hold, HoldState
from x402guard.ledger.authorize import Refusal
from x402guard.ledger.view import LedgerView, Scope
from x402guard.llm.meter import Meter, Polled
from x402guard.llm.reported import Statement, price_statement
from x402guard.llm.request import Call
from x402guard.strict_json import NotReadable, read_object

BACKGROUND: Final = "background"
RUNS: Final = "it runs in the background; the poll that shows its usage captures its cost"
_MOST_BYTES: Final = 8_388_608
_GOES_ON: Final = frozenset({"queued", "in_progress"})


def runs_on(call: Call, body: Mapping[str, Any] | None) -> str:
    """Return the id of a response that goes on in the background, or "" if the answer is whole."""
    if body is None or call.route.flavour != "responses" or call.body.get("background") is not True:
        return ""
    found = body.get("id")
    goes_on = body.get("status") in _GOES_ON and not body.get("usage")
    return found if goes_on and isinstance(found, str) and 0 < len(found) <= 200 else ""


def _mark(host: str, response_id: str) -> MarkKey:
    return BACKGROUND, f"{host} {response_id}"


def note_background(hold: Hold, response_id: str, provider: str) -> Flow[None]:
    """Remember whose cost the polls of a response capture. Its hold stays."""
    key = _mark(hold.purpose.host, response_id)
    row = {"hold": hold.id, "node": hold.node_id, "model": hold.purpose.tool, "provider": provider}
    yield from transact_anyway(
        Scope(nodes=(hold.node_id,), holds=(hold.id,), marks=(key,), durable=True), lambda view: view.put_mark(key, row)
    )


def polled(request: RequestFacts, route: Polled, context: Context, meter: Meter) -> Flow[tuple[Receipt | None, Reply]]:
    """Send a poll, and capture the cost of its response once it is stated. A poll of one that is not known costs nothing."""
    key = _mark(request.host, route.response_id)
    row: Mapping[str, Any] | None = yield Transact(
        Scope(nodes=(context.node_id,), marks=(key,)), lambda view: view.mark(key)
    )
    plain = (("accept-encoding", "identity"),) if row is not None else ()
    reply: Reply = yield Send(plain)
    if row is None or not 200 <= reply.status < 300:
        return None, reply
    try:
        answer = read_object((yield PeekBody(_MOST_BYTES)) or b"")
    except (NotReadable, ProtocolError, SendFailed):
        return None, reply
    if not isinstance(answer.get("usage"), dict) or answer.get("status") in _GOES_ON:
        return None, reply
    return (yield from _captured(row, answer, context, meter)), reply


def _captured(
    row: Mapping[str, Any], answer: Mapping[str, Any], context: Context, meter: Meter
) -> Flow[Receipt | None]:
    statement = Statement(str(row["provider"]), str(row["model"]), "responses", answer)

    def price(now_ms: int) -> Bill | None:
        try:
            priced = price_statement(meter, statement, now_ms // 1000)
        except ValueError:
            return None  # contradictory counts: the hold lapses to its ceiling
        return None if isinstance(priced, Refusal) else priced[0]

    def held(view: LedgerView) -> Hold | None:
        return view.hold(str(row["hold"]))

    bill: Bill | None = yield Compute(price, quick=False)
    hold: Hold | None = yield Transact(Scope(nodes=(str(row["node"]),), holds=(str(row["hold"]),)), held)
    if bill is None or hold is None or hold.state is not HoldState.HELD:
        return None
    payer = context if context.node_id == hold.node_id else replace(context, node_id=hold.node_id, tokens=None)
    try:
        after = yield from capture_bill(payer, hold, bill)
    except LedgerUnavailable:
        return None  # the next poll captures it
    return replace(receipt_of(after), model=hold.purpose.tool, usage=bill.usage, note=bill.note)
