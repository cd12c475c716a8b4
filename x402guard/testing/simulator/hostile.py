"""A seller that does everything that sellers have been seen to do, and worse. Each run draws how often it does what."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from typing_extensions import override

from x402guard.flow.effects import Reply
from x402guard.frozen import replace
from x402guard.testing.simulator.draws import Draws
from x402guard.testing.simulator.market import SELLERS_WORDS, Answer, Seller, Selling, Signed, Visit, encoded

Terms = dict[str, Any]

SALES: Final = (
    "honest", "instant", "loses", "loses_unsettled", "late", "rechallenges", "rechallenges_settled", "fails", "fails_settled",
    "never_settles", "same_transaction", "claims_less", "claims_more", "fails_by_receipt", "no_receipt", "wrong_transaction",
    "batches", "garbage_receipt", "other_network", "other_payer", "always_ceiling",
)  # fmt: skip
OFFERS: Final = (
    "plain", "price", "payee", "asset", "decimals", "domain", "foreign_resource", "gas_sponsoring", "facilitator", "flow",
    "malformed", "two_headers", "merged", "deep", "two_stories", "version", "endless", "many", "words", "not_402", "garbage",
)  # fmt: skip


class HostileSeller(Seller):
    """Draws for each request how it behaves.

    Args:
        draws: the stream of how often it does what.
        offers: how many in a thousand of its offers are odd.
        redirects: some of its answers to payments lead to the place of the result.
    """

    def __init__(self, draws: Draws, payee: str = "", *, offers: int = 0, redirects: bool = False) -> None:
        super().__init__(payee)
        self._redirects = redirects
        self.sales = {sale: 1 + draws.below(1 + draws.below(60)) for sale in SALES}
        self.sales["honest"] += 120
        self._odd = offers
        self._shown: list[str] = []
        self._waiting: list[Signed] = []
        self.seen: list[str] = []

    @override
    def offer(self, visit: Visit, asset: Mapping[str, Any]) -> Answer:
        terms = visit.terms(asset, self.payee)
        if visit.calm or visit.draws.below(1000) >= self._odd:
            return visit.demand(terms)
        how = visit.draws.pick(OFFERS)
        self.seen.append(f"offer {how}")
        return _odd_offer(how, visit, terms)

    @override
    def sell(self, visit: Visit) -> Selling:
        sale = "honest" if visit.calm else visit.draws.weighted(self.sales)
        self.seen.append(f"sale {sale}")
        if visit.taken is not None and visit.draws.chance(0.4):
            return _nonce_used(visit)  # as facilitators answer an authorization that was taken
        answer = yield from self._sales(sale)(visit)
        if self._redirects and answer.reply.status == 200 and not visit.calm and visit.draws.chance(0.25):
            return replace(answer, reply=Reply(303, (*answer.reply.headers, ("location", "/result"))))
        return answer

    def _sales(self, sale: str) -> Callable[[Visit], Selling]:
        special: dict[str, Callable[[Visit], Selling]] = {
            "honest": super().sell,
            "batches": self._batches,
            "same_transaction": self._same_transaction,
        }
        return special.get(sale) or (lambda visit: _plainly(sale, visit))

    def _batches(self, visit: Visit) -> Selling:
        """Wait for another payment, and take both in one transaction."""
        others = [each for each in self._waiting if each is not visit.signed and each.settled_by is None][:2]
        if not others:
            self._waiting = [*self._waiting[-3:], visit.signed]
            yield 5
        transaction = visit.settle(batch=tuple(others))
        for each in others:
            each.settled_by = visit.signed.settled_by
        yield visit.draws.pick((0, 13, 30))
        return visit.deliver(transaction)

    def _same_transaction(self, visit: Visit) -> Selling:
        yield 0
        if visit.draws.chance(0.5):
            self._shown.append(visit.settle())
        shown = visit.draws.pick(self._shown) if self._shown else "0x" + "5a" * 32
        return visit.deliver(shown)


def _plainly(sale: str, visit: Visit) -> Selling:
    """The sales that need no memory."""
    draws, intent = visit.draws, visit.signed.intent
    upto = intent.scheme == "upto"
    amount = (
        draws.pick((None, None, 1, max(1, intent.amount_atomic // 4))) if upto and sale != "always_ceiling" else None
    )
    if sale not in ("loses_unsettled", "rechallenges", "fails", "never_settles", "other_payer"):
        if sale == "late":
            visit.settle(amount, after_s=draws.pick((20, 50, 100, 280)))
        elif sale != "fails_by_receipt" or draws.chance(0.6):
            visit.settle(amount, after_s=draws.pick((0, 0, 10, 40)))
    yield draws.pick((0, 0, 1, 5, 14, 30))
    fake = f"0x{draws.bits(256):064x}"
    named = fake if visit.signed.settled_by is None else visit.signed.settled_by.hash
    claim = {"amount": str(intent.amount_atomic if amount is None else amount)} if upto else {}
    status = draws.pick((402, 500, 503, 504))
    match sale:
        case "loses" | "loses_unsettled":
            return visit.lose()
        case "late":
            return visit.lose() if draws.chance(0.5) else Answer(Reply(504, ()))
        case "rechallenges" | "rechallenges_settled":
            return visit.demand(error=SELLERS_WORDS)
        case "fails" | "fails_settled":
            return Answer(Reply(status, (("content-type", "text/plain"),)), SELLERS_WORDS.encode())
        case "never_settles" | "wrong_transaction":
            return visit.deliver(fake, claim)
        case "claims_less":
            return visit.deliver(named, {"amount": "1"} if upto else None)
        case "claims_more":
            return visit.deliver(named, {"amount": str(intent.amount_atomic + 5)})
        case "fails_by_receipt":
            return visit.deliver(
                named, {"success": False, "errorReason": SELLERS_WORDS}, status=draws.pick((402, 500, 200))
            )
        case "no_receipt":
            return visit.deliver(receipt=False)
        case "garbage_receipt":
            return Answer(Reply(200, (("PAYMENT-RESPONSE", draws.pick(("e30=", "!!", "bnVsbA==", "A" * 90_000))),)))
        case "other_network":
            return visit.deliver(named, claim | {"network": "eip155:1"})
        case "other_payer":
            return visit.deliver(named, claim | {"payer": "0x" + "99" * 20})
        case _:
            return visit.deliver(named, claim)


def _nonce_used(visit: Visit) -> Answer:
    return visit.demand(error="authorization is used") if visit.draws.chance(0.5) else visit.deliver(receipt=False)


def _odd_offer(how: str, visit: Visit, terms: Terms) -> Answer:
    """An offer that is wrong, hostile or unusual in one way."""
    draws, extra = visit.draws, dict(terms["extra"])
    price = "maxAmountRequired" if visit.want.scheme == "v1" else "amount"
    other = terms | {"payTo": f"0x{draws.bits(160):040x}"}
    changed: Mapping[str, Terms] = {
        "price": terms | {price: str(max(1, int(terms[price]) + draws.pick((-1_000, 1_000, 10**7))))},
        "payee": other,
        "asset": terms | {"asset": "0x" + "c0de" * 10},
        "decimals": terms | {price: str(10**16), "extra": extra | {"decimals": 18}},
        "domain": terms | {"extra": extra | {"name": "Evil", "version": "9"}},
        "facilitator": terms | {"extra": extra | {"facilitatorAddress": f"0x{draws.bits(160):040x}"}},
        "flow": terms | {"extra": extra | {"paymentFlow": "escrow"}},
        "malformed": terms | {price: draws.pick(("1e4", " 10000", "+10000", "10000.0", "0x2710", "-5", "", "1" * 90))},
        "endless": terms | {"maxTimeoutSeconds": 10 * 365 * 86_400},
        "words": terms | {"description": SELLERS_WORDS, "extra": extra | {"note": SELLERS_WORDS}},
        "garbage": {"scheme": None, "payTo": []},
    }
    if how in changed:
        return visit.demand(changed[how])
    match how:
        case "many":
            return visit.demand(*[terms | {"payTo": f"0x{n + 1:040x}"} for n in range(12)], terms)
        case "foreign_resource":
            return visit.demand(terms, resource={"url": "https://victim.example/dear", "description": SELLERS_WORDS})
        case "gas_sponsoring":
            info = {"description": SELLERS_WORDS, "version": "1"}
            return visit.demand(
                terms, extensions={"eip2612GasSponsoring": {"info": info, "schema": {"type": "object"}}}
            )
        case "not_402":
            return Answer(Reply(draws.pick((200, 204, 404, 500)), ()), SELLERS_WORDS.encode())
        case "version":
            return visit.demand(terms, x402Version=draws.pick((0, 3, "2", None)))
        case _:
            return _odd_message(how, visit, terms, other)


def _odd_message(how: str, visit: Visit, terms: Terms, other: Terms) -> Answer:
    """Terms that two readers read differently, or that are too large to read."""
    plain = visit.demand(terms).reply.headers
    name, value = ("PAYMENT-REQUIRED", encoded({"x402Version": 2, "accepts": [other]}))
    if how == "two_headers":
        return Answer(Reply(402, (*plain, (name, value))))
    if how == "merged":
        return Answer(Reply(402, tuple((key, f"{text}, {value}") for key, text in plain)))
    if how == "two_stories":
        return Answer(Reply(402, plain), b'{"x402Version": 2, "accepts": [{"payTo": "0x01"}]}')
    nested: Any = 0
    for _ in range(200):
        nested = [nested]
    return visit.demand(terms, extensions={"deep": nested})
