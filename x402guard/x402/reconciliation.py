"""Reconciles the ledger with the chain: checks payments without a final proof, and compares the wallet's Transfers.

If the chain contradicts the ledger, the ledger is corrected and the owner is notified. A Transfer that no payment in
the ledger explains raises an alarm.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from typing import Any

from msgspec.structs import replace

from x402guard.assets import Asset
from x402guard.evm import parse_address
from x402guard.flow.context import Context
from x402guard.flow.drivers import run
from x402guard.flow.effects import AskChain, Flow, Transact
from x402guard.flow.ports import AccountFunds, HoldStatus, OutgoingTransfer, TransferNonce, Transfers, WalletTransfers
from x402guard.flow.shell import Shell
from x402guard.kernel.change_set import MarkKey
from x402guard.kernel.evm import Address
from x402guard.kernel.given_back import proof_key
from x402guard.kernel.intent import Intent
from x402guard.kernel.rows import WALLET, Claim, Evidence, Hold, HoldState
from x402guard.ledger.authorize import lapse_due
from x402guard.ledger.budgets import UNEXPLAINED, trip
from x402guard.ledger.events import Lapse
from x402guard.ledger.evidence import explain, fitting_payments, make_provable, proven_by, unshown_payee
from x402guard.ledger.findings import Finding, Unreadable
from x402guard.ledger.queries import ALLOWANCE, nodes_of
from x402guard.ledger.sessions import PAYER_MARK
from x402guard.ledger.store import LedgerStore
from x402guard.ledger.transitions import apply
from x402guard.ledger.tree import below
from x402guard.ledger.view import LedgerView, Scope
from x402guard.money import format_dollars
from x402guard.x402.reconciled import Reconciliation
from x402guard.x402.settlement import is_open, is_worth_asking, weighed_alone
from x402guard.x402.tokens import doubt_of, facts_of
from x402guard.x402.unexplained import (
    note_explained,
    note_unexplained,
    note_waiting,
    unexplained_in,
    unexplained_mark,
    waiting_in,
)


def reconcile_holds(context: Context, hold_ids: Iterable[str], result: Reconciliation) -> Flow[None]:
    """Ask the chain about payments, oldest first, and apply its findings. An unreadable network is asked only once."""
    for hold_id in hold_ids:
        hold = yield from _pick(context, hold_id, result)
        if hold is None:
            continue
        network = hold.payment().network
        if network not in context.chains:
            result.unreadable.setdefault(network, "no RPC is configured")
        if network in result.unreadable:
            result.still_open += 1
            continue
        finding = yield AskChain(HoldStatus(hold))
        if isinstance(finding, Unreadable):
            result.still_open += 1
            if not finding.alone:  # one unreadable payment must not stop the checks of the others
                result.unreadable[network] = finding.reason
            continue
        result.asked += 1
        yield from _apply_finding(context, hold, finding, result)


def _apply_finding(context: Context, hold: Hold, finding: Finding, result: Reconciliation) -> Flow[None]:
    taken = yield from weighed_alone(context, hold, finding)
    if taken is None:
        result.still_open += 1
        return
    after, contradicted = taken
    result.note(hold, after)
    if contradicted:
        result.contradicted.append(hold.id)


def _pick(context: Context, hold_id: str, result: Reconciliation) -> Flow[Hold | None]:
    """Return a payment to check on the chain; None if its request is still in flight.

    Lapses it first if its deadline is past. A payment from before a chain was configured can be proven from now on.
    """
    lapsed = False

    def change(view: LedgerView) -> Hold | None:
        nonlocal lapsed
        hold = view.hold(hold_id)
        lapsed = False
        if hold is None or hold.intent is None:
            return None
        if hold.intent.network in context.chains and not hold.chain_evidence:
            hold = make_provable(view, hold)
        past = hold.state is HoldState.HELD and hold.deadline_unix < view.now_unix
        if past and not hold.chain_evidence and view.ahead_ms <= context.max_clock_jump_ms:
            hold, lapsed = apply(view, hold_id, Lapse()), True
        flying = hold.state is HoldState.HELD and not is_worth_asking(view, hold, context.flight_ms)
        return None if flying and not past else hold

    picked: Hold | None = yield Transact(Scope(holds=(hold_id,), durable=True), change)
    result.captured += lapsed
    return picked


def scan_mark(token: Asset, payer: Address) -> MarkKey:
    """Return the key of the mark with the last block up to which a wallet's Transfers were compared."""
    return "scan", f"{token.network}/{token.contract}/{payer}"


Unshown = Callable[[str], Mapping[str, Mapping[str, Any]]]
"""Returns the marks of payments that show no transaction, by what their keys begin with."""


Waiting = Callable[[Asset, Address], Iterable[tuple[OutgoingTransfer, frozenset[str]]]]
"""Returns the Transfers of a token that wait, each with the ids of the payments that it waits for."""


def reconcile_wallet(
    context: Context,
    token: Asset,
    payer: Address,
    since_unix: int,
    result: Reconciliation,
    *,
    undecided: Callable[[], Sequence[Intent]] = tuple,
    unshown: Unshown = lambda _: {},
    waiting: Waiting = lambda *_: [],
) -> Flow[None]:
    """Compare the wallet's outgoing Transfers with the proven payments, and note the allowance of Permit2.

    *since_unix* (unix seconds) is the start of the first comparison; later ones continue from the last block compared.
    A Transfer that may be one of the *undecided* payments *waits* for those that were undecided when it was first seen: no
    payment that is signed later keeps it from being told, and it keeps no other one. They are read after the Transfers, so
    that a payment made while the chain was read is among them.
    """
    yield from _note_allowance(token, payer, result)
    after = _block_of((yield from _read_mark(scan_mark(token, payer))))
    found: Transfers | Unreadable = yield AskChain(
        WalletTransfers(token.network, token.contract, payer, after, since_unix)
    )
    if isinstance(found, Unreadable):
        result.unreadable.setdefault(token.network, found.reason)
        return
    open_now, compares = undecided(), _Comparison(context, token, payer, result, unshown)
    told = _Told()
    for transfer, waited_for in [*((each, None) for each in found.outgoing), *waiting(token, payer)]:
        if transfer.amount_atomic == 0:
            continue  # anyone can cause a Transfer of zero from any wallet
        may_be = {f"{intent.nonce:064x}" for intent in open_now if _may_be(transfer, intent, token)}
        waits = (may_be if waited_for is None else may_be & waited_for) if transfer.block > 0 else set()
        known = yield from _explained(compares, transfer, waits=bool(waits))
        if isinstance(known, Unreadable):
            result.unreadable.setdefault(token.network, known.reason)
            return  # the next run compares all of them again
        if known is True and waited_for is not None:
            told.explained.append(transfer)
        elif known is None or not (known or waits):
            told.unexplained.append(transfer)
        elif not known:
            told.waiting.append((transfer, waits))
    result.complete = result.complete and found.complete and not told.waiting
    compared = replace(found, upto_unix=0) if told.waiting else found
    yield from _note_scan(token, payer, after, compared, told)


@dataclass(frozen=True)
class _Told:
    """What a comparison says of Transfers: no payment explains them, they wait for payments, or they do no more."""

    unexplained: list[OutgoingTransfer] = field(default_factory=list)
    waiting: list[tuple[OutgoingTransfer, set[str]]] = field(default_factory=list)
    explained: list[OutgoingTransfer] = field(default_factory=list)


def _may_be(transfer: OutgoingTransfer, intent: Intent, token: Asset) -> bool:
    """True if a Transfer may have taken a payment that the chain has not decided yet."""
    if (intent.network, intent.token, intent.payee) != (token.network, token.contract, transfer.payee):
        return False
    if intent.scheme == "exact":
        return transfer.amount_atomic == intent.amount_atomic
    return transfer.amount_atomic <= intent.amount_atomic


@dataclass(frozen=True)
class _Comparison:
    """One comparison of a wallet's Transfers with the ledger."""

    context: Context
    token: Asset
    payer: Address
    result: Reconciliation
    unshown: Unshown


def _explained(compares: _Comparison, transfer: OutgoingTransfer, *, waits: bool) -> Flow[bool | Unreadable | None]:
    """True if this Transfer proves a payment in the ledger; None if it shows a nonce that is of no payment.

    Records the proof if the payment had none. One that shows no nonce and *waits* for a payment that is not decided yet
    explains no other one meanwhile.
    """
    token = compares.token
    proof = proof_key(token.network, transfer.transaction, transfer.log_index)
    if proven_by((yield from _read_mark(proof))) is not None:
        return True
    nonce: int | Unreadable | None = yield AskChain(
        TransferNonce(token.network, token.contract, compares.payer, transfer)
    )
    if isinstance(nonce, Unreadable):
        return nonce
    if nonce is None:
        return not waits and (yield from _explained_without_nonce(compares, transfer, proof))
    hold_id = f"{nonce:064x}"
    hold = yield Transact(Scope(holds=(hold_id,)), lambda view: view.hold(hold_id))
    if hold is None or hold.intent is None:
        return None
    # A payment that has another proof is asked about as well: the block of that one may be undone, with its node behind.
    # Or the event before this Transfer belongs to another Transfer of the same transaction.
    shown = replace(hold, claim=Claim(hold.amount, transfer.transaction))
    finding = yield AskChain(HoldStatus(shown))
    if isinstance(finding, Unreadable):
        return finding
    yield from _apply_finding(compares.context, hold, finding, compares.result)
    if proven_by((yield from _read_mark(proof))) is not None:
        return True
    return not waits and (yield from _explained_without_nonce(compares, transfer, proof))


def _explained_without_nonce(compares: _Comparison, transfer: OutgoingTransfer, proof: MarkKey) -> Flow[bool]:
    """True if a settlement inside a contract, which shows no nonce, fits a taken payment without a transaction."""
    marks = compares.unshown(unshown_payee(compares.token.network, compares.token.contract, transfer.payee))
    for key, hold_id in fitting_payments(marks, transfer.amount_atomic):
        change = partial(explain, key=key, proof=proof, hold_id=hold_id)
        if (yield Transact(Scope(marks=(key, proof)), change)):
            return True
    return proven_by((yield from _read_mark(proof))) is not None  # another reconciliation may have explained it


def _read_mark(key: MarkKey) -> Flow[Mapping[str, Any] | None]:
    answer: Mapping[str, Any] | None = yield Transact(Scope(marks=(key,)), lambda view: view.mark(key))
    return answer


def _block_of(mark: Mapping[str, Any] | None) -> int | None:
    return None if mark is None else int(mark["block"])


def _note_scan(token: Asset, payer: Address, after: int | None, found: Transfers, told: _Told) -> Flow[None]:
    """Record up to where Transfers were compared and what that says of them, and notify the owner of unexplained ones."""
    key = scan_mark(token, payer)
    names = [*told.unexplained, *told.explained, *(each for each, _ in told.waiting)]
    keys = tuple(unexplained_mark(token.network, each.transaction, each.log_index) for each in names)

    def change(view: LedgerView) -> None:
        before = view.mark(key)
        compared = _block_of(before)
        if compared != after:
            return  # another reconciliation has compared these blocks; the next one continues
        unix = max(found.upto_unix, int((before or {}).get("unix", 0)))
        view.put_mark(key, {"block": found.upto, "at_ms": view.now_ms, "unix": unix})
        for transfer in told.explained:
            note_explained(view, token, transfer)
        for transfer, hold_ids in told.waiting:
            note_waiting(view, token, payer, transfer, hold_ids)
        noted = [note_unexplained(view, token, transfer) for transfer in told.unexplained]
        rows = [row for row in noted if row is not None]
        if rows:
            total = sum(row["amount"] for row in rows)
            message = f"{_left(len(rows), total)} on {token.network}, not explained by the ledger"
            facts = {"total": format_dollars(total), "transfers": rows[:20]}
            view.tell(UNEXPLAINED, "critical", message, session=WALLET, amount=total, facts=facts)

    yield Transact(Scope(nodes=(WALLET,), marks=(key, *keys)), change)


def _left(count: int, total: int) -> str:
    what = "1 transfer" if count == 1 else f"{count} transfers"
    return f"{what} of ${format_dollars(total)} left the wallet"


def _tell_unacknowledged(store: LedgerStore, context: Context, result: Reconciliation) -> Flow[None]:
    """Return what is unexplained and not acknowledged, from this comparison or an earlier one; it trips the wallet anew.

    A reset does not say that its owner knows of them.
    """
    result.unexplained = unexplained_in(store)
    result.unexplained_total = total = sum(row["amount"] for row in result.unexplained)
    if result.unexplained and context.policy.unexplained_transfer == "trip":
        ids = " ".join(row["id"] for row in result.unexplained[:5])
        reason = f"{_left(len(result.unexplained), total)}, not explained by the ledger: x402guard acknowledge {ids}"
        scope = Scope(nodes=(WALLET,), durable=True)
        yield Transact(scope, lambda view: trip(view, WALLET, UNEXPLAINED, reason))


def _note_allowance(token: Asset, payer: Address, result: Reconciliation) -> Flow[None]:
    funds = yield AskChain(AccountFunds(token.network, token.contract, payer))
    if funds is None:
        return
    row = {
        "network": token.network,
        "token": token.contract,
        "symbol": token.symbol,
        "allowance": token.value_nanos(funds.permit2_allowance),
        "exposed": token.value_nanos(min(funds.permit2_allowance, funds.balance)),
    }
    key = ALLOWANCE, f"{token.network}/{token.contract}"
    yield Transact(Scope(marks=(key,)), lambda view: view.put_mark(key, {**row, "at_ms": view.now_ms}))
    if funds.permit2_allowance:
        result.allowances.append(row)


def reconcile_node(shell: Shell, context: Context, node_id: str) -> Reconciliation:
    """Reconcile every unproven payment of a budget and its descendants with the chain."""
    store = shell.store
    inside = {node.id for node in below(nodes_of(store, node_id), node_id)}
    result = Reconciliation()
    unsettled = store.unsettled(store.now_ms() // 1000)
    wanted = [hold_id for hold_id in unsettled if (hold := store.hold(hold_id)) is not None and hold.node_id in inside]
    run(reconcile_holds(context, wanted, result), shell)
    return result


def _lapse(context: Context, result: Reconciliation) -> Flow[None]:
    """Lapse what is past its own deadline, whatever session it is in: a process that died leaves such holds."""

    def change(view: LedgerView) -> list[Hold]:
        due = [] if view.ahead_ms > context.max_clock_jump_ms else list(view.live(view.due))
        if due:
            lapse_due(view)
        return due

    while lapsed := (yield Transact(Scope(nodes=(WALLET,), durable=True), change)):
        result.captured += sum(hold.intent is not None for hold in lapsed)


def reconcile_ledger(shell: Shell, context: Context) -> Reconciliation:
    """Reconcile every unproven payment of a ledger, then compare the wallet's Transfers with the proven payments."""
    result = Reconciliation()
    run(ledger_reconciled(shell.store, context, result), shell)
    return result


def ledger_reconciled(store: LedgerStore, context: Context, result: Reconciliation) -> Flow[None]:
    """Return the flow of ``reconcile_ledger``. It adds what it finds to *result*."""
    yield from _lapse(context, result)
    yield from reconcile_holds(context, store.unsettled(store.now_ms() // 1000), result)
    row = store.marks(*PAYER_MARK).get(PAYER_MARK[1])
    if row is None:
        return  # nothing was ever signed
    payers = [parse_address(str(each)) for each in (row["address"], *row.get("before", ()))]
    yield from _look_at_added(context, result)
    since_unix = store.path(WALLET)[0].created_ms // 1000
    undecided, unshown = partial(_undecided, store), partial(store.marks, "unshown")
    waiting = partial(waiting_in, store)
    for token, payer in product(context.registry.on(context.chains), payers):
        yield from reconcile_wallet(
            context, token, payer, since_unix, result, undecided=undecided, unshown=unshown, waiting=waiting
        )
    yield from _tell_unacknowledged(store, context, result)


def _look_at_added(context: Context, result: Reconciliation) -> Flow[None]:
    """Ask the contracts of the tokens that the owner has added what they are: a wrong figure proves itself otherwise."""
    for asset in context.registry.added():
        if asset.network in context.chains:
            says = yield AskChain(facts_of(asset))
            doubt = None if says is None else doubt_of(asset, says)
            if doubt is not None:
                result.unproven_tokens.append(doubt)


def _undecided(store: LedgerStore) -> list[Intent]:
    """Return the payments that the chain may have taken, and that no proof of a final block decides yet."""
    found = map(store.hold, store.unsettled(store.now_ms() // 1000))
    return [hold.payment() for hold in found if hold is not None and _is_undecided(hold)]


def _is_undecided(hold: Hold) -> bool:
    """True for a payment that a Transfer may still turn out to have taken: its block may be undone, and another takes it."""
    return hold.evidence is Evidence.CHAIN_HEAD or (hold.proof is None and is_open(hold))
