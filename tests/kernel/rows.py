"""Rows by hand, and one change set over them: what the kernel's check says of it, and nothing of a room's."""

from msgspec.structs import replace

from tests.support.ledger import START_MS, a_hold
from x402guard.errors import IllegalTransition
from x402guard.kernel.change_set import Before, Now, Opened, Token, mark_name
from x402guard.kernel.commit import check
from x402guard.kernel.rows import WALLET, HoldKind, HoldState, Nanos, Node, NodeKind
from x402guard.ledger.view import LedgerView, Loaded

TEN = 100_000_000
"""Ten cents in nano-dollars, what each hold is for."""

NOW_S = START_MS // 1000
TOKEN = "eip155:84532/0x036CbD53842c5426634e7929541eC2318f3dCF7e"
OPENED = Opened(tokens={TOKEN: Token(6)})
ONE = a_hold("one", "$0.10")
UPTO = a_hold("one", "$0.10", scheme="upto", chain_evidence=True)
TOOL = a_hold("tool", "$0.10", kind=HoldKind.TOOL)
LLM = a_hold("llm", "$0.10", kind=HoldKind.LLM)
NEW = a_hold("new", "$0.10")


def node(node_id, parent_id, kind=NodeKind.SESSION, limit=5 * TEN, **more):
    return Node(node_id, parent_id, kind, node_id, None if limit is None else Nanos(limit), START_MS, START_MS, **more)


def ended(hold, state, captured=0, **more):
    """A hold as it is after its end, which closed now."""
    closed_ms = START_MS if state is HoldState.CAPTURED else 0
    return replace(hold, **{"state": state, "captured": Nanos(captured), "closed_ms": closed_ms, **more})


def captured(hold, amount, **more):
    return ended(hold, **{"state": HoldState.CAPTURED, "captured": amount, **more})


class Rows:
    """A wallet of $1.00 and a session of $0.50 below it, as the holds in the session have left them."""

    def __init__(self, *holds, opened=None, now=None, marks=None, purchase=None, named=False, more=(), **fields):
        held = sum(hold.amount for hold in holds if hold.state is HoldState.HELD)
        taken = sum(hold.captured for hold in holds)
        wallet = node(WALLET, None, NodeKind.WALLET, 10 * TEN, granted_out=held + taken, live=held)
        session = node("s", WALLET, captured=taken, held=held, granted_in=held + taken, live=held)
        rows = {WALLET: wallet, "s": session, **{each.id: each for each in more}}
        rows |= {name: replace(rows[name], **fields[name]) for name in fields}
        self.now = Now(START_MS, START_MS)
        self.now = replace(self.now, **(now or {}))
        self.opened = replace(OPENED, **(opened or {}))
        self.before = Before(
            rows, {hold.id: hold for hold in holds}, {mark_name(key): value for key, value in (marks or {}).items()},
            purchase, named,
        )  # fmt: skip
        loaded = Loaded(self.before, self.now.clock_ms)
        loaded.marks = {key: value for key, value in (marks or {}).items() if value is not None}
        if self.opened.keeps_idle:
            loaded.look_for_busy(lambda: ())
        self.view = LedgerView(loaded)
        self.view.now_ms = self.now.now_ms

    def book(self, hold, *, held=0, taken=0, node_id="s"):
        """The entries that move a hold's amounts, and draw them from the wallet."""
        by = held + taken
        self.view.record(node_id, "event", hold_id=hold.id, held=held, captured=taken, granted_in=by)
        self.view.record(WALLET, "grant", granted_out=by)

    def begin(self, hold, proof=None, *, is_booked=True):
        self.look_for(hold.id)
        self.view.take_step("authorize", replace(hold, state=HoldState.HELD, captured=Nanos(0), closed_ms=0), proof)
        if is_booked:
            self.book(hold, held=hold.amount, node_id=hold.node_id)
        self.view.put_hold(hold)

    def step(self, name, after, proof=None):
        """One step of a hold in the session, with its entries."""
        was = self.view.hold(after.id)
        self.view.take_step(name, after, proof)
        held = [each.amount if each.state is HoldState.HELD else 0 for each in (was, after)]
        self.book(after, held=held[1] - held[0], taken=after.captured - was.captured)

    def put(self, node_id, **fields):
        self.view.put_node(replace(self.view.node(node_id), **fields))

    def look_for(self, hold_id):
        self.before.holds.setdefault(hold_id, None)

    def said(self, edit=None, *, durable=True):
        """What the check says of the change set: "" or the rule, the row and what differs."""
        change_set = self.view.change_set(durable=durable)
        if edit is not None:
            change_set = edit(change_set)
        try:
            check(self.opened, self.before, change_set, self.now)
        except IllegalTransition as error:
            return f"{error.rule} | {str(error).partition('its rule ')[2]}"
        return ""


def says(found, rule, what):
    """Compare what was said with a rule and a part of its sentence; ("", "") for a change that passes."""
    if rule == "":
        assert found == ""
    else:
        assert found.startswith(f"{rule} | '{rule}': ")
        assert what in found
