"""An agent with one step of every kind: it pays, asks a model and uses tools, and counts what of that got out."""

import json

import httpx

from tests.support.llm_provider import CHAT, ask, completion
from tests.support.merchant import PAYEE, URL, Shop, accept, client, required
from x402guard import PaymentRefused
from x402guard.ledger.owner import reset_node
from x402guard.ledger.view import Scope
from x402guard.policy.loops import forget_before
from x402guard.policy.steps import reset_mark, run_of


class Agent:
    """The steps of one session, each of so many cents. The same *number* is the same step, in the same words."""

    KINDS = ("pay", "think", "charge", "hold", "use")

    is_apart = False
    """Each payee has a host of its own."""

    def __init__(self, session):
        self.session = session
        self.price, self.payee = 1, PAYEE
        self.shop = Shop(lambda request: required(accept(self.price * 10_000, payTo=self.payee), url=str(request.url)))
        self.asked = []
        self.ran = []

        @session.tool(cost="$0", name="look")
        def look():
            self.ran.append("look")

        @session.tool(mode="raw", render=lambda result, _mode: str(result), name="recall")
        def recall(number):
            self.ran.append(number)
            return number

        self.look, self.recall = look, recall

    def pay(self, number=0, cents=1):
        self.price = cents
        url = f"https://shop-{self.payee[-2:]}.example/x" if self.is_apart else URL
        return client(self.session, self.shop).get(url, params={"n": number})

    def think(self, number=0, cents=1):
        """Of gpt-4o, whose thousand tokens out are a cent; it uses all that it may."""
        words = [{"role": "user", "content": str(number)}]
        return client(self.session, self._answer).post(
            CHAT, json=ask(max_completion_tokens=1_000 * cents, messages=words)
        )

    def _answer(self, request):
        self.asked.append(request)
        used = {"prompt_tokens": 5, "completion_tokens": json.loads(request.content)["max_completion_tokens"]}
        return httpx.Response(200, json=completion(used))

    def charge(self, number=0, cents=1):
        self.session.charge("serp", f"$0.{cents:02d}", arguments={"n": number})
        self.ran.append(number)

    def hold(self, number=0, cents=1):
        with self.session.hold("serp", up_to=f"$0.{cents:02d}", arguments={"n": number}) as job:
            self.ran.append(number)
            job.capture(f"$0.{cents:02d}")

    def use(self, number=0, cents=1):
        @self.session.tool(cost=f"$0.{cents:02d}", name="serp")
        def serp(n):
            self.ran.append(n)

        return serp(number)

    def take(self, kind, number=0, cents=1):
        """Take a step; return None, or the rule that refused it. The agent swallows every refusal."""
        try:
            getattr(self, kind)(number, cents)
        except PaymentRefused as refused:
            return refused.rule
        return None

    @property
    def reached(self):
        """How many payments were sent, models asked, and tools run."""
        return len(self.shop.payments), len(self.asked), len(self.ran)

    def tries_everything(self):
        """Take a step of every kind, in new words, and two that cost nothing; return the rules that refused them."""
        rules = {self.take(kind, number) for number, kind in enumerate(self.KINDS, 9_000)}
        for free in (self.look, lambda: self.recall(9_999)):
            try:
                free()
                rules.add(None)
            except PaymentRefused as refused:
                rules.add(refused.rule)
        return rules


def owner_resets(store, node_id):
    """What ``x402guard reset`` does, on a store that is open already."""

    def change(view):
        node = reset_node(view, node_id, "the owner")
        forget_before(view, run_of(node_id))
        return node

    return store.transact(Scope(nodes=(node_id,), marks=(reset_mark(run_of(node_id)),), durable=True), change)
