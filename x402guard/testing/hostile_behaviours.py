"""Defines the behaviours of a hostile server, each with a name and a description."""

import json
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from types import MappingProxyType

from starlette.responses import JSONResponse, RedirectResponse, Response

from x402guard.testing.engine import JSON
from x402guard.testing.hostile_answers import Dropped, dripped, encoded, receipt_header, terms_of
from x402guard.testing.hostile_visit import Visit

OTHER_PAYEE = "0x857b06519E91e3A54538791bDbb0E22373e36b66"
"""The payee that hostile offers switch to."""

_TEN_YEARS_S = 10 * 365 * 86_400
_HOPS = 20
_BASE = "eip155:8453"
_BASE_USDC = "0x833589fCD6eDb6E08f4c7C32D4f71b54bdA02913"
_ONE_HASH = "0x" + "5a" * 32
_MAX_HEADER = 90_000

Answering = Callable[[Visit], Response | Awaitable[Response]]


@dataclass(frozen=True)
class Behaviour:
    """One behaviour: its description `does`, and its answers to unpaid and to paid requests."""

    name: str
    does: str
    terms: Answering
    sale: Answering

    async def unpaid(self, visit: Visit) -> Response:
        """Answer a request without a payment."""
        return await _awaited(self.terms(visit))

    async def paid(self, visit: Visit) -> Response:
        """Answer a request with a payment."""
        return await _awaited(self.sale(visit))


async def _awaited(answer: Response | Awaitable[Response]) -> Response:
    return answer if isinstance(answer, Response) else await answer


def _ask(visit: Visit) -> Response:
    return visit.demand()


async def _sell(visit: Visit) -> Response:
    receipt = await visit.settle()
    return visit.deliver(receipt) if receipt["success"] else _ask(visit)


def _sell_unsettled(visit: Visit) -> Response:
    visit.keep()
    return visit.deliver()


HONEST = Behaviour("honest", "asks a price, settles, delivers", _ask, _sell)
"""The correct behaviour, for comparison."""


def _asking(offer: Callable[[Visit], JSON], *, version: int = 2) -> Answering:
    return lambda visit: visit.demand(offer(visit), version=version)


# ---- after the payment ----


async def _lose(visit: Visit) -> Response:
    await visit.settle()
    return Dropped()


async def _ask_again(visit: Visit) -> Response:
    await visit.settle()
    return visit.demand(visit.offer(visit.server.price + 1_000 * (1 + visit.paid_number)))


def _failed(visit: Visit) -> JSON:
    failure = {"success": False, "errorReason": "unexpected_settle_error", "transaction": ""}
    return failure | {"network": visit.server.network}


async def _fail_after_settling(visit: Visit) -> Response:
    await visit.settle()
    return visit.deliver(_failed(visit), status=500)


def _withhold(visit: Visit) -> Response:
    visit.keep()
    return visit.deliver(_failed(visit), status=500)


async def _one_hash(visit: Visit) -> Response:
    return visit.deliver(await visit.settle() | {"transaction": _ONE_HASH})


async def _drip(visit: Visit) -> Response:
    headers = receipt_header(await visit.settle(), 2 if visit.cheque is None else visit.cheque.version)
    return dripped(b'{"bought": "at last"}', seconds=visit.server.slow_s, headers=headers)


async def _under_report(visit: Visit) -> Response:
    return visit.deliver(await visit.settle() | {"amount": "1"})


# ---- redirects ----


def _next_hop(visit: Visit) -> int:
    last = visit.request.url.path.rsplit("/", 1)[1]
    return 1 + (int(last) if last.isascii() and last.isdigit() else 0)


async def _on(visit: Visit, origin: str) -> Response:
    receipt = await visit.settle()
    if not receipt["success"]:
        return visit.demand()  # the payment belongs to the previous hop
    if _next_hop(visit) > _HOPS:
        return visit.deliver(receipt)
    return RedirectResponse(f"{origin}/{visit.behaviour}/{_next_hop(visit)}", 302, receipt_header(receipt, 2))


async def _redirect_on(visit: Visit) -> Response:
    return await _on(visit, visit.server.url)


async def _redirect_across(visit: Visit) -> Response:
    here = str(visit.request.url).startswith(visit.server.url + "/")
    return await _on(visit, visit.server.elsewhere if here else visit.server.url)


def _redirect_to_collector(visit: Visit) -> Response:
    return RedirectResponse(f"{visit.server.elsewhere}/{visit.behaviour}/collect", 307)


def _ask_or_collect(visit: Visit) -> Response:
    collects = visit.request.url.path.endswith("/collect")
    return JSONResponse({"collected": True}) if collects else visit.demand()


# ---- terms ----


def _swap_payee(visit: Visit) -> JSON:
    return visit.offer() if visit.number == 0 else visit.offer(payTo=OTHER_PAYEE)


def _stranger(visit: Visit) -> JSON:
    return visit.offer(payTo=f"0x{visit.number + 1:040x}")


def _cheap_then_dear(visit: Visit) -> JSON:
    return visit.offer(1 if visit.request.method == "HEAD" else 500 * visit.server.price)


def _ramp(visit: Visit) -> JSON:
    return visit.offer(int(10 * visit.server.price * 1.05**visit.number))


def _extra(**extra: JSON) -> Answering:
    return _asking(lambda visit: visit.offer(extra={"name": "USDC", "version": "2"} | extra))


def _eighteen_decimals(visit: Visit) -> JSON:
    return visit.offer(10**16, extra={"name": "USDC", "version": "2", "decimals": 18})


def _sponsoring(visit: Visit) -> Response:
    # x402 specification, extension eip2612GasSponsoring: it asks the client to sign an allowance beside the payment.
    info = {"description": "The facilitator accepts an EIP-2612 permit to Permit2.", "version": "1"}
    fields = ["from", "asset", "spender", "amount", "nonce", "deadline", "signature"]
    extension = {"info": info, "schema": {"type": "object", "required": fields}}
    extra = {"name": "USDC", "version": "2", "assetTransferMethod": "permit2"}
    return visit.demand(visit.offer(extra=extra), extensions={"eip2612GasSponsoring": extension})


def _rotating(visit: Visit) -> JSON:
    return visit.upto(facilitator=f"0x{visit.number + 0x1000:040x}")


def _real_money(visit: Visit) -> JSON:
    return visit.offer(network=_BASE, asset=_BASE_USDC, extra={"name": "USD Coin", "version": "2"})


def _malformed(visit: Visit) -> JSON:
    odd = ("1e4", "１００００", " 10000", "+10000", "10000.0", "0x2710")
    return visit.offer() | {"amount": odd[visit.number % len(odd)]}


def _downgrade(visit: Visit) -> Response:
    return visit.demand() if visit.number == 0 else visit.demand(_v1_offer(visit), version=1)


def _v1_offer(visit: Visit) -> JSON:
    return visit.offer(payTo=OTHER_PAYEE, network=visit.server.network_v1)


# ---- headers and bodies ----


def _terms(visit: Visit, offer: JSON, **changes: JSON) -> JSON:
    return terms_of([offer], url=str(visit.request.url), **changes)


def _raw(*headers: str, content: JSON = None) -> Response:
    response = JSONResponse({} if content is None else content, 402)
    response.raw_headers.extend((b"payment-required", header.encode("latin-1")) for header in headers)
    return response


def _two_headers(visit: Visit) -> Response:
    offers = visit.offer(), visit.offer(payTo=OTHER_PAYEE)
    return _raw(*(encoded(_terms(visit, offer)) for offer in offers))


def _merged(visit: Visit) -> Response:
    offers = visit.offer(), visit.offer(payTo=OTHER_PAYEE)
    return _raw(", ".join(encoded(_terms(visit, offer)) for offer in offers))


def _huge(visit: Visit) -> Response:
    padded = encoded(_terms(visit, visit.offer(), extensions={"pad": "x" * (_MAX_HEADER * 3 // 4)}))
    return _raw(padded)


def _deep(visit: Visit) -> Response:
    nested: JSON = 0
    for _ in range(200):
        nested = [nested]
    return _raw(encoded(_terms(visit, visit.offer(), extensions={"deep": nested})))


def _two_stories(visit: Visit) -> Response:
    body = _terms(visit, visit.offer(payTo=OTHER_PAYEE))
    return _raw(encoded(_terms(visit, visit.offer())), content=body)


# ---- an LLM that lies ----


async def _inflate(visit: Visit) -> Response:
    """A chat completion (OpenAI's shape) that reports a billion tokens."""
    asked = json.loads(await visit.request.body() or b"{}")
    message = {"role": "assistant", "content": "Yes."}
    usage = {"prompt_tokens": 10**9, "completion_tokens": 10**9, "total_tokens": 2 * 10**9}
    choice = {"index": 0, "message": message, "finish_reason": "stop"}
    answer = {"id": "chatcmpl-1", "object": "chat.completion", "model": asked.get("model", "")}
    return visit.deliver(content=answer | {"choices": [choice], "usage": usage})


def _table(behaviours: Iterable[tuple[str, str, Answering, Answering]]) -> dict[str, Behaviour]:
    return {name: Behaviour(name, does, terms, sale) for name, does, terms, sale in behaviours}


_UPTO = _asking(lambda visit: visit.upto())

BEHAVIOURS = MappingProxyType(
    _table((
        ("lost_answer", "settles, then drops the connection without an answer", _ask, _lose),
        ("rechallenge", "settles, then asks for another payment at a higher price, each time", _ask, _ask_again),
        ("failure_after_settling", "settles, then says that it failed: 500 and success false", _ask, _fail_after_settling),
        ("withheld", "says that it failed and keeps the payment; see settle_withheld", _ask, _withhold),
        ("endless_validity", "wants payments that are valid for ten years",
         _asking(lambda visit: visit.offer(maxTimeoutSeconds=_TEN_YEARS_S)), _sell),
        ("payto_swap", "names another payee from the second offer on", _asking(_swap_payee), _sell),
        ("new_payees", "names a payee in each offer that it never named before", _asking(_stranger), _sell),
        ("cheap_then_dear", "quotes almost nothing to HEAD, and five hundred times the price to the rest",
         _asking(_cheap_then_dear), _sell),
        ("price_ramp", "raises its price by five per cent with each offer", _asking(_ramp), _sell),
        ("fake_asset", "asks for an unknown token, and calls it USDC",
         _asking(lambda visit: visit.offer(asset="0x" + "c0de" * 10)), _sell),
        ("fake_decimals", "says that USDC has 18 decimals, so that ten billion dollars look like a cent",
         _asking(_eighteen_decimals), _sell),
        ("poisoned_domain", "names a signing domain that is not the token's", _extra(name="Evil", version="9"), _sell),
        ("redirect_chain", "takes the money, and redirects to a page that asks again; twenty times", _ask, _redirect_on),
        ("redirect_across", "as redirect_chain, from one origin to another and back", _ask, _redirect_across),
        ("header_leak", "redirects the paid request, with its payment header, to another origin",
         _ask_or_collect, _redirect_to_collector),
        ("foreign_resource", "says that the payment is for another seller's resource",
         lambda visit: visit.demand(resource={"url": "https://victim.example/dear", "description": ""}), _sell),
        ("same_transaction", "shows the same transaction for every payment", _ask, _one_hash),
        ("gas_sponsoring", "asks for an allowance beside the payment", _sponsoring, _sell),
        ("always_ceiling", "settles every `upto` for its whole ceiling", _UPTO, _sell),
        ("under_report", "settles an `upto` for its whole ceiling, and says it was the smallest unit", _UPTO, _under_report),
        ("rotating_facilitator", "names another facilitator with each offer", _asking(_rotating), _sell_unsettled),
        ("unknown_flow", "wants a deposit in advance, by an unknown payment flow", _extra(paymentFlow="escrow"), _sell),
        ("malformed_amount", "writes a price that two readers read differently", _asking(_malformed), _sell),
        ("real_money", "asks for money of a real network over plain http",
         _asking(_real_money),
         _sell_unsettled),
        ("duplicate_header", "sends its terms twice, with two payees", _two_headers, _sell),
        ("merged_header", "sends two terms in one header, with two payees", _merged, _sell),
        ("huge_header", "sends terms of ninety kilobytes", _huge, _sell),
        ("deep_json", "sends terms that are nested two hundred levels deep", _deep, _sell),
        ("two_stories", "names one payee in the header and another in the body", _two_stories, _sell),
        ("version_downgrade", "speaks version 2 once, then version 1 with another payee", _downgrade, _sell),
        ("token_inflation", "answers an LLM call, and reports a billion tokens", _inflate, _sell),
        ("slow_drip", "settles, then sends the content one byte at a time", _ask, _drip),
    ))
)  # fmt: skip
"""Every behaviour by name. The name is also the first part of its path."""
