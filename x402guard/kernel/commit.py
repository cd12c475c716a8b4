"""Checks a change set before anything of it is durable. It believes no decision, only the rows before and after.

Six rules, each a function below whose docstring is the rule:

    books         each balance moves by what its holds and children move, by sealed entries; only the owner raises a limit
    lifecycle     each step of a hold is in the table, and its fixed fields stay
    worth         a payment's hold counts at least what its signature can take
    giving back   what a hold counts falls by a typed proof alone
    room          a new hold fits, under nodes that are open; what is past its limit is tripped
    once          a purchase whose answer is lost is not paid again

A seventh, ``durable``, says what has to survive a power cut. A change set that breaks one raises ``IllegalTransition``, which
names the rule, the row and what differs. Then nothing is written, and nothing is signed.
"""

from __future__ import annotations

from operator import attrgetter
from typing import Final

from msgspec.structs import replace

from x402guard.kernel.change_set import Before, ChangeSet, Now, Opened
from x402guard.kernel.changes import Changes, Move, refuse
from x402guard.kernel.given_back import check_exposed, check_given_back, check_marks, is_of
from x402guard.kernel.moved import STILL, ZERO, check_loaded, moved
from x402guard.kernel.proofs import ByOwner, PayAgain, Undone
from x402guard.kernel.rows import (
    HOLD_FIXED,
    MAX_NANOS,
    Delivery,
    Evidence,
    Hold,
    HoldKind,
    HoldState,
    Node,
    NodeKind,
    NodeState,
)
from x402guard.kernel.table import FORGIVE
from x402guard.kernel.windows import closing_ms, past_after, window_start_ms

NAMED: Final = "named:"
"""How the key of a purchase begins that has a name of the caller's: it is paid once, also after success."""


def check(opened: Opened, before: Before, change_set: ChangeSet, now: Now) -> None:
    """Raise ``IllegalTransition`` for a change set that breaks a rule, whatever code has proposed it. Pure."""
    changes = Changes(opened, before, change_set, now)
    books(changes)
    lifecycle(changes)
    worth(changes)
    giving_back(changes)
    room(changes)
    once(changes)
    durable(changes)


def lifecycle(changes: Changes) -> None:
    """Each hold's step from before to after is in the table, and a change set names its steps in order.

    Its fixed fields stay; ``presented`` rises by one at most, ``instance`` changes only with it, and ``chain_evidence``
    only becomes true. What has an intent is a payment and nothing else is: its id is the nonce, its deadline the one that
    is signed, its network the chain id. Tokens lie in token nodes, all else in money nodes. A hold may begin and end in one
    change set (a charge, a recorded bill); a payment never. A purchase is forgiven by its owner or caller alone.
    """
    for hold_id in changes.idle_steps:
        refuse("lifecycle", f"hold {hold_id}", "it has a step, and its row is not written")
    for move in changes.moves:
        before, after = move.before, move.after
        if move.fault:
            refuse("lifecycle", move.place, move.fault)
        if before is None:
            _check_begun(changes, move)
        else:
            for name in HOLD_FIXED:
                was, now = getattr(before, name), getattr(after, name)
                if was is not now and was != now:
                    refuse("lifecycle", move.place, f"{name} was {was!r:.60} and would be {now!r:.60}")
            _check_presented(move, before)
        _check_closing(changes, move)
        if after.captured < 0 or (after.state is not HoldState.CAPTURED and after.captured):
            refuse("lifecycle", move.place, f"it is {after.state} with {after.captured} captured")
        if before is not None and not move.names - _KEEP and _ended(before) != _ended(after):
            refuse("lifecycle", move.place, "what it has captured, its evidence or its proof changes without a step")
        if "reopen" in move.names:
            _check_reopened(move)


_KEEP: Final = frozenset({"note", FORGIVE})
_ended: Final = attrgetter("state", "captured", "evidence", "proof", "ended_by")


def _check_begun(changes: Changes, move: Move) -> None:
    hold, now = move.after, changes.now
    is_tokens = changes.node(hold.node_id).kind is NodeKind.TOKENS
    intent = hold.intent
    if move.is_lost and hold.id not in now.lost:
        refuse("lifecycle", move.place, "it is entered as lost, and this process has not noted it")
    if not 0 < hold.amount <= MAX_NANOS:
        refuse("lifecycle", move.place, f"it would reserve {hold.amount}")
    if (hold.kind is HoldKind.TOKENS) is not is_tokens:
        refuse("lifecycle", move.place, f"a hold of kind {hold.kind} lies in no such node as {hold.node_id}")
    if (hold.kind is HoldKind.PAYMENT) is not (intent is not None):
        refuse("lifecycle", move.place, f"it is of kind {hold.kind}, and what has an intent is a payment")
    if not move.is_lost and (hold.deadline_unix < now.clock_ms // 1000 or hold.presented):
        refuse("lifecycle", move.place, f"it begins at {now.clock_ms // 1000}, with the deadline {hold.deadline_unix}")
    if intent is None:
        return
    if hold.state is not HoldState.HELD:
        refuse("lifecycle", move.place, f"a payment would begin and end {hold.state} in one change")
    if intent.amount_atomic <= 0:
        refuse("lifecycle", move.place, f"a signature for {intent.amount_atomic} units pays nothing")
    for name, ours, signed in (
        ("id", hold.id, f"{intent.nonce:064x}"),
        ("deadline", hold.deadline_unix, intent.valid_until),
        ("network", intent.network, f"eip155:{intent.chain_id}"),
    ):
        if ours != signed:
            refuse("lifecycle", move.place, f"its {name} is {ours!r}, and {signed!r} would be signed")


def _check_reopened(move: Move) -> None:
    """Only what a chain has ended is open again: a payment that was given back unsigned stays so."""
    proof, before = move.proof("reopen"), move.before
    if not isinstance(proof, Undone) or move.after.intent is None or not is_of(move.after, proof):
        refuse("lifecycle", move.place, "it is reopened, and no chain shows that its block was undone")
    if before is None or before.evidence not in (Evidence.CHAIN, Evidence.CHAIN_HEAD):
        refuse("lifecycle", move.place, "it is reopened, and no chain has ended it")


def _check_presented(move: Move, before: Hold) -> None:
    after = move.after
    if after.presented not in (before.presented, before.presented + 1):
        refuse("lifecycle", move.place, f"presented was {before.presented} and would be {after.presented}")
    if after.instance != before.instance and after.presented == before.presented:
        refuse("lifecycle", move.place, "another instance answers for it, and it is not presented again")
    if before.chain_evidence and not after.chain_evidence:
        refuse("lifecycle", move.place, "a chain could prove how it ended, and could no more")
    if after.delivery is Delivery.DONE and before.delivery not in (Delivery.OPEN, Delivery.DONE):
        refuse("lifecycle", move.place, f"its answer is {before.delivery}, and would be handed over")
    is_forgiven = after.delivery is Delivery.FORGIVEN and before.delivery is not Delivery.FORGIVEN
    if is_forgiven and not isinstance(move.proof(FORGIVE), PayAgain | ByOwner):
        refuse("lifecycle", move.place, "its purchase is closed, by neither its owner nor its caller")


def _check_closing(changes: Changes, move: Move) -> None:
    """``closed_ms`` is what the windows work out at the kernel's own clock."""
    if len(move.taken) == 1:
        if move.after.closed_ms != move.taken[0].closed_ms:
            _check_clocked(changes, move)
        return
    for was, after, step in move.played():
        expected = was.closed_ms
        if step.name == "reopen":
            expected = was.closed_ms if after.closed_ms and was.captured == move.after.amount else 0
        elif after.state is HoldState.CAPTURED and not was.closed_ms:
            hold = move.after
            since = [node.since_ms for node in changes.path(hold.node_id) if node.window is not None]
            lapses = max(hold.created_ms, hold.deadline_unix * 1000) if step.name == "lapse" else None
            expected = closing_ms(max(since, default=0), changes.now.clock_ms, lapses_ms=lapses)
        if after.closed_ms != expected:
            refuse("lifecycle", move.place, f"closed_ms would be {after.closed_ms} by {step.name}, and is {expected}")
    if move.after.closed_ms != move.taken[-1].closed_ms:
        _check_clocked(changes, move)


def _check_clocked(changes: Changes, move: Move) -> None:
    """The owner's clock command alone moves when a hold has closed: to now."""
    closed_ms = move.after.closed_ms
    by_clock = any(command == "clock" for _, command in changes.commands)
    if not by_clock or not closed_ms == changes.now.clock_ms < move.taken[-1].closed_ms:
        refuse(
            "lifecycle", move.place, f"closed_ms would be {closed_ms}, and its steps end at {move.taken[-1].closed_ms}"
        )


def worth(changes: Changes) -> None:
    """A payment's hold counts at least what its signature can take, by the kernel's own table of tokens.

    It is checked as the hold is written, and before it is first signed; never at load. A new payment in a token that the
    table lacks is refused; a live hold in another process's token passes unchanged.
    """
    for move in changes.moves:
        intent = move.after.intent
        known = intent is not None and (not move.is_lost or changes.opened.token(intent.network, intent.token))
        if move.before is None and known:
            check_worth(changes.opened, move.after)


def check_worth(opened: Opened, hold: Hold) -> None:
    """Raise ``IllegalTransition`` if the signature of a payment hold can take more than the hold counts."""
    intent = hold.payment()
    token = opened.token(intent.network, intent.token)
    if token is None:
        refuse("worth", f"hold {hold.id}", f"the token {intent.token} of {intent.network} is not in the kernel's table")
    value = token.worth(intent.amount_atomic)
    if hold.amount < value:
        refuse("worth", f"hold {hold.id}", f"it counts {hold.amount}, and its signature can take {value}")


def giving_back(changes: Changes) -> None:
    """What a hold counts falls only by a typed proof that names it; a step that lowers nothing takes none.

    ``kernel.given_back`` compares each proof with the hold's row. An ``exact`` is captured at its ceiling or not at all. One
    Transfer gives back for one hold: its mark is set here, and released as that hold's proof changes. What blocks give back
    that are not final stays within ``opened.most_exposed`` in sum.
    """
    for move in changes.moves:
        hold, amount = move.after, move.after.amount
        for was, now, step in move.played():
            if hold.intent is not None and now.state is HoldState.CAPTURED:
                if hold.intent.scheme == "exact" and now.captured not in (0, amount):
                    refuse(
                        "giving back", move.place, f"an exact payment of {amount} would be captured at {now.captured}"
                    )
                if now.captured > amount and hold.evidence not in (Evidence.CHAIN, Evidence.CHAIN_HEAD):
                    refuse("giving back", move.place, f"{now.captured} would be captured, and {amount} was signed")
            less = hold.intent is not None and now.captured < amount and now.state is HoldState.CAPTURED
            if now.counts(amount) < was.counts(amount) or (less and step.name in ("capture", "correct")):
                check_given_back(changes, move, was.state, step)
    check_exposed(changes)
    check_marks(changes)


def books(changes: Changes) -> None:
    """Each balance, ``live`` too, moves by exactly what its holds move, and by sealed entries.

    Each ``granted_out`` moves by exactly what the children draw, both ways. A child has drawn what it uses, and more only
    where its parent may lend. A token node also counts usage without a hold. An entry of a room is no authority: a limit
    rises or goes, and a window changes, by ``ByOwner`` alone. ``past`` and ``since_ms`` are what ``kernel.windows`` works out.
    There is one root, named at opening; every other money node hangs below it; no parent and no kind changes. A new node
    begins at zero, and all but the root with a limit. A row that was neither loaded nor looked for is not written.
    """
    check_loaded(changes)
    sums = moved(changes)
    for node_id, (before, after) in changes.nodes.items():
        was = ZERO if before is None else before
        by = sums.get(node_id, STILL)
        if (
            after.captured - was.captured != by.captured
            or after.held - was.held != by.held
            or after.granted_in - was.granted_in != by.granted_in
            or after.granted_out - was.granted_out != by.granted_out
        ):
            refuse("books", f"node {node_id}", "its balances move by another amount than its entries")
        if min(after.captured, after.held, after.granted_in, after.granted_out) < 0:
            refuse("books", f"node {node_id}", "a balance would be negative")
        usage = by.usage if after.kind is NodeKind.TOKENS else 0
        if by.captured - usage != by.holds_captured or by.held != by.holds_held:
            refuse("books", f"node {node_id}", "its balances move by another amount than its holds")
        if after.live - was.live != by.live:
            refuse(
                "books", f"node {node_id}", f"live would be {after.live}, and the holds below it move it by {by.live}"
            )
        if (after.seq, after.head) != ((by.seq, by.head) if by.seq else (was.seq, was.head)):
            refuse("books", f"node {node_id}", "its head is not its last entry")
        _check_node(changes, before, after)
    for node_id, by in sums.items():
        if by.granted_out != by.drawn:
            refuse("books", f"node {node_id}", f"its children draw {by.drawn}, and it has granted {by.granted_out}")
        if node_id not in changes.nodes and (by.holds_captured or by.holds_held or by.live or by.seq):
            refuse("books", f"node {node_id}", "its holds or entries move it, and its row is not written")


def _check_node(changes: Changes, before: Node | None, after: Node) -> None:
    place, by_clock = f"node {after.id}", (after.id, "clock") in changes.commands
    if before is None:
        _check_new(changes, after)
    else:
        free = after.window == before.window or before.limit is None or (after.id, "limit") in changes.commands
        fixed = after.parent_id == before.parent_id and after.kind is before.kind and free
        if not fixed or after.name != before.name or after.created_ms != before.created_ms:
            refuse("books", place, "its parent, kind, name, time of creation or window would change")
        rises = before.limit is not None and (after.limit is None or after.limit > before.limit)
        if rises and (after.id, "limit") not in changes.commands:
            refuse("books", place, f"its limit would rise from {before.limit} to {after.limit}, and no owner says so")
        if before.until_ms is not None and (after.until_ms is None or after.until_ms > before.until_ms):
            refuse("books", place, f"its end would move from {before.until_ms} to {after.until_ms}")
        clock_ms = changes.now.clock_ms
        is_now = clock_ms <= after.last_ms <= changes.now.now_ms
        if after.last_ms != before.last_ms and not is_now and not (by_clock and after.last_ms <= before.last_ms):
            refuse("books", place, f"last_ms would be {after.last_ms}, and now is {changes.now.now_ms}")
        begins_ms = before.since_ms
        if after.window is not None and (after.window != before.window or (by_clock and begins_ms > clock_ms)):
            begins_ms = window_start_ms(after.window, clock_ms)
        if after.since_ms not in (before.since_ms, begins_ms):
            refuse("books", place, f"its window began at {before.since_ms} and would begin at {after.since_ms}")
    expected = _past(changes, before, after)
    begins = before is not None and after.window != before.window and after.past == before.used - before.live
    if after.past != expected and not begins and not (by_clock and 0 <= after.past <= expected):
        refuse("books", place, f"past would be {after.past}, and the windows work out {expected}")
    used, drawn, parent_id = after.captured + after.held + after.granted_out, after.granted_in, after.parent_id
    keeps = drawn > used and parent_id is not None and after.state is NodeState.OPEN and changes.lends(parent_id)
    if drawn != (0 if parent_id is None else used) and not keeps:
        refuse("books", place, f"it uses {used}, and would have drawn {drawn} from {parent_id!r}")


def _check_new(changes: Changes, node: Node) -> None:
    place = f"node {node.id}"
    if node.parent_id is None:
        if node.kind is NodeKind.TOKENS:
            return
        if node.kind is not NodeKind.WALLET or node.id != changes.opened.root:
            refuse("books", place, f"it would be a second root beside {changes.opened.root!r}")
    elif NodeKind.TOKENS in (node.kind, changes.node(node.parent_id).kind) or node.kind is NodeKind.WALLET:
        refuse("books", place, f"a {node.kind} does not hang below {node.parent_id!r}")
    elif node.limit is None:
        refuse("books", place, "a new node has a limit")
    elif changes.path(node.id)[-1].id != changes.opened.root:
        refuse("books", place, f"it does not hang below {changes.opened.root!r}")
    since_ms = 0 if node.window is None else window_start_ms(node.window, node.created_ms)
    is_now = changes.now.clock_ms <= node.created_ms <= changes.now.now_ms
    if not is_now or node.since_ms != since_ms:
        refuse("books", place, "it begins at another time than now")


def _past(changes: Changes, before: Node | None, after: Node) -> int:
    """Return what the windows work out for ``past``: what it was, moved by the holds that close in a window that is over."""
    past = 0 if before is None else before.past
    if after.window is None:
        return past
    for move in changes.moves:
        if after.id in {each.id for each in changes.path(move.after.node_id)}:
            for was, now, _ in move.played():
                past = past_after(replace(after, past=past), was, now)
    return past


def room(changes: Changes) -> None:
    """A new hold that stays live fits, under nodes that are all open before and after and within ``until_ms``.

    A payment's lies in a session or scope. Past its limit a node is carried only by a bill, an upward correction, a
    step ``reopen``, a lower limit, ``ByOwner`` or ``Lost``, and is tripped in the same change set. A node leaves ``tripped``
    by ``ByOwner``, or as ``rolled`` says; a closed one resumes under its limit. A bill may begin and end in a node that is not open.
    """
    carriers: set[str] = set()
    for move in changes.moves:
        if move.is_new_and_live:
            _check_open(changes, move)
        if _carries(move):
            carriers.update(node.id for node in changes.path(move.after.node_id))
    for node_id, (before, after) in changes.nodes.items():
        place, left = f"node {node_id}", after.room
        if before is not None and _loosens(before, after) and (node_id, "reset") not in changes.commands:
            refuse("room", place, "it would be tripped no more, and no owner says so")
        if left is None or left >= 0 or after.kind is NodeKind.TOKENS:
            continue
        if after.state is NodeState.OPEN:
            refuse("room", place, f"it would be {-left} past its limit, and open")
        if before is not None and before.room is not None and before.room <= left:
            continue
        lowered = before is not None and (before.limit is None or (after.limit or 0) < before.limit)
        by_owner = (node_id, "limit") in changes.commands or (node_id, "clock") in changes.commands
        if not (lowered or by_owner or node_id in carriers):
            refuse("room", place, f"it would be {-left} past its limit, and no bill or correction carries it")
        if after.state is not NodeState.TRIPPED:
            refuse("room", place, f"it would be {-left} past its limit, and not tripped")


def _loosens(was: Node, now: Node) -> bool:
    """True for a tripped node that is tripped no more, now or at the end of its window (see ``rolled``)."""
    ends = now.terminated_by == "overshoot" and (was.terminated_by != "overshoot" or now.warned <= 10**6 < was.warned)
    return was.state is NodeState.TRIPPED and (now.state is not NodeState.TRIPPED or ends)


def _check_open(changes: Changes, move: Move) -> None:
    hold = move.after
    kind = changes.node(hold.node_id).kind
    if hold.intent is not None and kind not in (NodeKind.SESSION, NodeKind.SCOPE):
        refuse("room", move.place, f"a payment lies in a session or scope, and {hold.node_id!r} is a {kind}")
    for after in changes.path(hold.node_id):
        before = changes.old(after.id)
        for node in (after,) if before is None else (before, after):
            if node.state is not NodeState.OPEN:
                refuse("room", move.place, f"it would be held below {node.id!r}, which is {node.state}")
            if node.until_ms is not None and changes.now.now_ms >= node.until_ms:
                refuse("room", move.place, f"it would be held below {node.id!r}, whose time is over")
        left = after.room
        if left is not None and left < 0:
            refuse("room", move.place, f"it does not fit: {after.id!r} would be {-left} past its limit")


def _carries(move: Move) -> bool:
    """True for what may carry a node past its limit: what is owed already, or may be taken although it was given back."""
    if move.is_lost or "reopen" in move.names or "correct" in move.names:
        return True
    is_bill = move.after.kind is not HoldKind.PAYMENT and move.after.state is HoldState.CAPTURED
    return is_bill and (move.before is None or move.after.captured > move.before.counts)


def once(changes: Changes) -> None:
    """No new payment while one of its purchase key counts whose answer is lost.

    Nor for a named purchase that is open or was handed over, within ``opened.memory_ms``. ``PayAgain``, the caller's
    word, allows both.
    """
    for move in changes.moves:
        hold = move.after
        if move.before is not None or hold.intent is None or hold.purchase_key is None or move.is_lost:
            continue
        if isinstance(move.steps[0].proof, PayAgain):
            continue
        key, is_named = hold.purchase_key, hold.purchase_key.startswith(NAMED)
        if changes.before.purchase != key or (is_named and not changes.before.named):
            refuse("once", move.place, "the payments of its purchase were not loaded")
        after = {each.after.id: each.after for each in changes.moves}
        for known in {**{row.id: row for row in changes.before.holds.values() if row is not None}, **after}.values():
            if known.purchase_key != key or known.id == hold.id:
                continue
            if not _is_remembered(changes, known):
                continue
            if known.delivery is Delivery.LOST or (is_named and known.delivery is not Delivery.FORGIVEN):
                refuse("once", move.place, f"hold {known.id} has paid for the same purchase, which is {known.delivery}")


def _is_remembered(changes: Changes, hold: Hold) -> bool:
    if hold.state is not HoldState.CAPTURED:
        return hold.state is HoldState.HELD
    since_ms = max(hold.closed_ms, hold.flying_since_ms)
    return hold.captured > 0 and changes.now.now_ms - since_ms <= changes.opened.memory_ms


def durable(changes: Changes) -> None:
    """What restrains survives a power cut: whether a change does is worked out from the rows, not from a room's word."""
    if changes.change_set.durable:
        return
    for move in changes.moves:
        was = 0 if move.before is None else move.before.counts
        again = move.before is not None and move.after.presented > move.before.presented
        if again or (move.after.kind is not HoldKind.TOKENS and move.after.counts > was):
            refuse("durable", move.place, "it would count more, or go out again, in a change that a power cut may lose")
    for node_id, (before, after) in changes.nodes.items():
        if after.kind is NodeKind.TOKENS:
            continue
        lower = before is None or (after.limit is not None and (before.limit is None or after.limit < before.limit))
        trips = after.state is NodeState.TRIPPED and (before is None or before.state is not NodeState.TRIPPED)
        if lower or trips or changes.commands:
            refuse("durable", f"node {node_id}", "it is restrained, in a change that a power cut may lose")
