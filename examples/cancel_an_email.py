"""An agent schedules e-mails, and those that have not left yet are cancelled when its budget stops it.

Run it with ``python examples/cancel_an_email.py`` after ``pip install x402guard``.
"""

import x402guard
from x402guard import Action, BudgetExhausted, Guard

outbox: list[str] = []


def apologise(action: Action) -> None:
    """Undo ``send``: what has left cannot come back. It is not called for an e-mail that is still staged."""
    outbox.append(f"sorry, {action.arguments['to']}")


@x402guard.reversible(undo="__main__:apologise", delay_s=60)  # in a program of several files, its module's own name
def send(to: str) -> None:
    """Send an e-mail, a minute after it was asked for."""
    outbox.append(f"offer to {to}")


@x402guard.tool(cost="$0.10")
def look_up(person: str) -> str:
    """Find an address, at a service that bills by the search."""
    return f"{person}@example.com"


def main() -> None:
    """Write to people until the budget says no."""
    with Guard(ledger="sqlite:///spend.db") as guard:
        with guard.session("newsletter", budget="$0.50"):
            send(look_up("ada"))
        print("a run that ends well sends at its end:", outbox)
        outbox.clear()
        try:
            with guard.session("newsletter", budget="$0.25") as session:
                for person in ("bob", "eve", "mallory"):
                    send(look_up(person))
        except BudgetExhausted as refusal:
            print("stopped:", refusal.rule)
        print("a run that is stopped has sent:", outbox)
        events = [event["event"] for event in session.report().to_dict()["events"]]
        print([event for event in events if event.startswith("action_")])


if __name__ == "__main__":
    main()
