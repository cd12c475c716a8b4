"""A response that runs in the background (``background: true`` of OpenAI's Responses): its poll captures its cost.

The answer to the request that creates it states no usage. Its hold stays until a poll shows what was used, in any process
of the ledger, or else until its deadline.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from msgspec.structs import replace as altered

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
from x402guard.ledger.view import Scope
from x402guard.llm.answer import AnswerRead
from x402guard.llm.bill import bill_answer
from x402guard.llm.ceiling import find_ceiling
from x402guard.llm.content import Unbounded, declared_tools
from x402guard.llm.meter import Meter, Polled
from x402guard.llm.request import Call
from x402guard.strict_json import NotReadable, read_object
from x402guard.vendors.routes import MeteredHost, Route

BACKGROUND: Final = "background"
RUNS: Final = "it runs in the background; the poll that shows its usage captures its cost"
_MOST_BYTES: Final = 8_388_608
_MOST_TOOLS: Final = 50
_GOES_ON: Final = frozenset({"queued", "in_progress"})
_ENDED: Final = frozenset({"completed", "incomplete", "failed", "cancelled"})


def runs_on(call: Call, body: Mapping[str, Any] | None) -> str:
    """Return the id of a response that goes on in the background, or "" if the answer is whole."""
    if body is None or call.route.flavour != "responses" or call.body.get("background") is not True:
        return ""
    found = body.get("id")
    goes_on = body.get("status") in _GOES_ON and not body.get("usage")
    return found if goes_on and isinstance(found, str) and 0 < len(found) <= 200 else ""


def _mark(host: str, response_id: str) -> MarkKey:
    return BACKGROUND, f"{host} {response_id}"


def note_background(hold: Hold, call: Call, response_id: str, limit: int) -> Flow[None]:
    """Remember whose cost the polls of a response capture, and what of its request decides about its price.

    Its hold stays. *limit* is the output limit that was sent. Nothing of what was said is kept.
    """
    key = _mark(hold.purpose.host, response_id)
    row = {
        "hold": hold.id,
        "node": hold.node_id,
        "model": call.model,
        "limit": limit,
        "context": dict(call.context),
        "long": call.keeps_long,
        "tools": [_priced_parts(tool) for _, tool in declared_tools(call.body) if isinstance(tool, dict)][:_MOST_TOOLS],
        "kinds": [[part.field, part.kind] for part in call.unbounded][:_MOST_TOOLS],
    }
    yield from transact_anyway(
        Scope(nodes=(hold.node_id,), holds=(hold.id,), marks=(key,), durable=True), lambda view: view.put_mark(key, row)
    )


def _priced_parts(tool: Mapping[str, Any]) -> dict[str, Any]:
    """Return of a tool what decides about its price."""
    kept = {name: tool[name] for name in ("type", "model") if isinstance(tool.get(name), str)}
    for name in ("container", "environment"):
        place = tool.get(name)
        if isinstance(place, dict):
            kept[name] = {key: str(place[key])[:20] for key in ("type", "memory_limit") if key in place}
    return kept


def polled(request: RequestFacts, route: Polled, context: Context, meter: Meter) -> Flow[tuple[Receipt | None, Reply]]:
    """Send a poll, and capture the cost of its response once it is stated. A poll of one that is not known costs nothing."""
    key = _mark(request.host, route.response_id)
    row: Mapping[str, Any] | None = yield Transact(
        Scope(nodes=(context.node_id,), marks=(key,)), lambda view: view.mark(key)
    )
    plain = (("accept-encoding", "identity"),) if row is not None else ()
    reply: Reply = yield Send(plain)
    # A poll that streams is its caller's: to look at it would hold its events back.
    streams = any(name.lower() == "content-type" and "event-stream" in value.lower() for name, value in reply.headers)
    if row is None or streams or not 200 <= reply.status < 300:
        return None, reply
    try:
        answer = read_object((yield PeekBody(_MOST_BYTES)) or b"")
    except (NotReadable, ProtocolError, SendFailed):
        return None, reply
    ended = answer.get("status") in _ENDED and answer.get("id") == route.response_id
    if not ended or not isinstance(answer.get("usage"), dict):
        return None, reply
    return (yield from _captured(row, route.endpoint, answer, context, meter)), reply


def _captured(
    row: Mapping[str, Any], endpoint: MeteredHost, answer: Mapping[str, Any], context: Context, meter: Meter
) -> Flow[Receipt | None]:
    hold_id, node_id = str(row["hold"]), str(row["node"])
    hold: Hold | None = yield Transact(Scope(nodes=(node_id,), holds=(hold_id,)), lambda view: view.hold(hold_id))
    if hold is None or hold.state is not HoldState.HELD:
        return None
    held = hold.amount

    def price(now_ms: int) -> Bill | None:
        call = _call_of(row, endpoint)
        found = find_ceiling(call, meter.settings, meter.book, meter.counter, now_ms // 1000)
        if isinstance(found, Refusal):
            return None  # no price any more: the hold lapses to its ceiling
        read = AnswerRead(answer, final=True)
        # What the request said is not kept, so no input is more than it allows.
        ceiling = altered(found, input_bound=None)
        return bill_answer(call, ceiling, meter.settings, meter.counter, read, held=held, limit=call.limit)

    bill: Bill | None = yield Compute(price, quick=False)
    if bill is None:
        return None
    payer = context if context.node_id == hold.node_id else replace(context, node_id=hold.node_id, tokens=None)
    try:
        after = yield from capture_bill(payer, hold, bill)
    except LedgerUnavailable:
        return None  # the next poll captures it
    return replace(receipt_of(after), model=hold.purpose.tool, usage=bill.usage, note=bill.note)


def _call_of(row: Mapping[str, Any], endpoint: MeteredHost) -> Call:
    """Return the call that a response answers, as far as it decides about the price."""
    return Call(
        route=Route(endpoint, "responses"),
        model=str(row["model"]),
        body={"tools": list(row["tools"])},
        streams=False,
        limit=int(row["limit"]),
        choices=1,
        texts=(),
        slack=0,
        media=(),
        unbounded=tuple(Unbounded(str(field), str(kind)) for field, kind in row["kinds"]),
        predicted=0,
        context=dict(row["context"]),
        us_only=False,
        caches=True,
        speaks=False,
        keeps_long=bool(row["long"]),
    )
