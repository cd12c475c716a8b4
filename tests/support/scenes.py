"""A ledger with everything that a report can show, and with names that try to be more than text."""

import contextlib

import httpx

from tests.support.merchant import Shop, accept, b64, client, receipt, required
from x402guard import X402GuardError

SCRIPT = "<script>alert(1)</script>"
RIGHT_TO_LEFT = "مترجم"
LONG = "host-" + "x" * 115
MARKUP = f"\"'><img src=x onerror=alert(2)>{SCRIPT}"


def forged(request, shop):
    """A receipt whose transaction is no hash but an address to click on."""
    return httpx.Response(
        200, headers={"PAYMENT-RESPONSE": b64(receipt(transaction="javascript:alert(3)"))}, json={"ok": True}
    )


def refused(call, *arguments):
    with contextlib.suppress(X402GuardError):
        call(*arguments)


def busy(guard, forward=lambda seconds: None, *, customer="Hartmann & Vogel"):
    """Two customers, a tree of agents, all kinds of calls and refusals, a payment and a tool still out, a stop. The run's id."""
    other = guard.budget("Kestrel", "$3.00", per="day", tz="Europe/Berlin")
    with other.session("audit", budget="$1.00", id="audit-1") as session:
        session.charge("serp", "$0.20")
    forward(3_600)
    budget = guard.budget(customer, "$20.00")
    with budget.session("brief-4471", budget="$1.50", id="brief-4471") as session:
        for step in range(4):
            client(session, Shop()).get(f"https://courts.example/dockets/{step}?key=secret-{step}")
            forward(1)
        with session.child(SCRIPT, budget="$0.90") as reader:
            for step in range(6):
                reader.charge("citations", f"$0.0{step + 1}")
                forward(2)
            refused(reader.charge, MARKUP, "$4.00")
            client(reader, Shop(terms=lambda request: required(accept(60_000), url=str(request.url)), paid=forged)).get(
                f"https://{LONG}.example/{MARKUP}"
            )
        with session.child(RIGHT_TO_LEFT, budget="$0.30") as translator:
            translator.record_usage("openai", "gpt-4o-mini", {"input_tokens": 5_200, "output_tokens": 900})
            translator.charge(RIGHT_TO_LEFT, "$0.05")
            refused(translator.charge, "render", "$0.40")
            refused(translator.charge, "render", "$0.50")
        forward(5)
        with contextlib.suppress(X402GuardError):
            client(session, Shop(paid=TimeoutError("gone"))).get("https://scans.example/big?token=veiled")
        session.hold("render", up_to="$0.11").__enter__()
        refused(session.charge, "render", "$9.00")
    return "brief-4471"
