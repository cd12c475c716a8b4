"""The books beside the chain: every payment whose end is not proven is asked about, and what left the wallet is compared.

What the books say and the chain does not bear out is corrected in the books, and told. What left the wallet and stands in no book is
an alarm: nothing here can explain it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from x402guard.assets import Asset
from x402guard.evm import Address, parse_address
from x402guard.flow.context import Context
from x402guard.flow.drivers import run
from x402guard.flow.effects import AskChain, Flow, Transact
from x402guard.flow.ports import AccountFunds, HoldStatus, OutgoingTransfer, TransferNonce, Transfers, WalletTransfers
from x402guard.flow.shell import Shell
from x402guard.ledger.evidence import Finding, Unreadable, explain, proof_key, unshown_mark
from x402guard.ledger.model import WALLET, Claim, Evidence, Hold, HoldState
from x402guard.ledger.queries import ALLOWANCE, nodes_of
from x402guard.ledger.report import below
from x402guard.ledger.sessions import PAYER_MARK
from x402guard.ledger.transitions import Lapse, apply
from x402guard.ledger.view import LedgerView, MarkKey, Notice, Scope
from x402guard.money import format_dollars
from x402guard.x402.settlement import is_open, is_worth_asking, weighed


@dataclass(slots=True)
class Reconciliation:
    """What one look at the chain has changed. Amounts in nano-dollars.

    Attributes:
        asked: how many payments the chain was asked about.
        proven: how many are proven now by a final block, and were not before.
        captured, expired, voided, reopened: how many it has ended, or brought back to life.
        still_open: how many are not proven yet.
        freed, added: what the budgets got back, and what was counted on top.
        contradicted: ids of payments whose receipt the chain contradicts.
        unreadable: network → why it could not be read.
        unexplained: Transfers that left the wallet, and that no payment in the books explains.
        unexplained_total: what these are worth.
        allowances: what Permit2 may still move, one line a token.
        complete: False where there was more to look through than one look takes; the next one goes on.
    """

    asked: int = 0
    proven: int = 0
    captured: int = 0
    expired: int = 0
    voided: int = 0
    reopened: int = 0
    still_open: int = 0
    freed: int = 0
    added: int = 0
    contradicted: list[str] = field(default_factory=list)
    unreadable: dict[str, str] = field(default_factory=dict)
    unexplained: list[dict[str, Any]] = field(default_factory=list)
    unexplained_total: int = 0
    allowances: list[dict[str, Any]] = field(default_factory=list)
    complete: bool = True

    @property
    def is_alarming(self) -> bool:
        """True where money moved otherwise than the books say."""
        return bool(self.contradicted or self.unexplained)

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain values; amounts as decimal dollars."""
        rows: dict[str, Any] = dataclasses.asdict(self)
        for name in ("freed", "added", "unexplained_total"):
            rows[name] = format_dollars(rows[name])
        for row in (*rows["unexplained"], *rows["allowances"]):
            row |= {name: format_dollars(row[name]) for name in ("amount", "allowance", "exposed") if name in row}
        return rows

    def note(self, before: Hold, after: Hold) -> None:
        """Count what became of one payment."""
        counted, counts = _counted(before), _counted(after)
        self.freed += max(0, counted - counts)
        self.added += max(0, counts - counted)
        self.proven += after.evidence is Evidence.CHAIN and before.evidence is not Evidence.CHAIN
        if after.state is not before.state:
            self.captured += after.state is HoldState.CAPTURED
            self.expired += after.state is HoldState.EXPIRED
            self.voided += after.state is HoldState.VOIDED
            self.reopened += after.state is HoldState.HELD
        self.still_open += is_open(after)


def _counted(hold: Hold) -> int:
    return hold.amount if hold.state is HoldState.HELD else hold.captured


def reconcile_holds(context: Context, hold_ids: Iterable[str], result: Reconciliation) -> Flow[None]:
    """Ask the chain about payments, oldest first, and let what it shows take effect. A network out of reach is asked once."""
    for hold_id in hold_ids:
        hold = yield from _pick(context, hold_id, result)
        if hold is None:
            continue
        network = hold.payment().network
        if network not in context.chains:
            result.unreadable.setdefault(network, "no RPC is configured for it")
        if network in result.unreadable:
            result.still_open += 1
            continue
        finding = yield AskChain(HoldStatus(hold))
        if isinstance(finding, Unreadable):
            result.still_open += 1
            if not finding.alone:  # else who names what nobody can find would keep all others from being asked about
                result.unreadable[network] = finding.reason
            continue
        result.asked += 1
        yield from _book(hold, finding, result)


def _book(hold: Hold, finding: Finding, result: Reconciliation) -> Flow[None]:
    after, contradicted = yield from weighed(hold, finding)
    result.note(hold, after)
    if contradicted:
        result.contradicted.append(hold.id)


def _pick(context: Context, hold_id: str, result: Reconciliation) -> Flow[Hold | None]:
    """Return a payment that the chain is to be asked about; None for one whose answer is still on its way.

    What lapses at its deadline does so first. A payment from a time when no chain was configured can be proven from now on.
    """
    lapsed = False

    def change(view: LedgerView) -> Hold | None:
        nonlocal lapsed
        hold = view.hold(hold_id)
        lapsed = False
        if hold is None or hold.intent is None:
            return None
        if hold.intent.network in context.chains and not hold.chain_evidence:
            hold = dataclasses.replace(hold, chain_evidence=True)
            view.put_hold(hold)
        past = hold.state is HoldState.HELD and hold.deadline_unix < view.now_unix
        if past and not hold.chain_evidence and view.ahead_ms <= context.max_clock_jump_ms:
            hold, lapsed = apply(view, hold_id, Lapse()), True
        flying = hold.state is HoldState.HELD and not is_worth_asking(view, hold, context.flight_ms)
        return None if flying and not past else hold

    picked: Hold | None = yield Transact(Scope(holds=(hold_id,), durable=True), change)
    result.captured += lapsed
    return picked


def scan_mark(token: Asset, payer: Address) -> MarkKey:
    """Return the key under which it is remembered how far a wallet's Transfers were compared."""
    return "scan", f"{token.network}/{token.contract}/{payer}"


def reconcile_wallet(token: Asset, payer: Address, since_unix: int, result: Reconciliation) -> Flow[None]:
    """Compare what left the wallet with what the books have proven, and note what Permit2 may still move.

    *since_unix* (unix seconds) is where the first comparison begins; the next ones go on where the last one ended.
    """
    yield from _note_allowance(token, payer, result)
    after = _block_of((yield from _read_mark(scan_mark(token, payer))))
    found: Transfers | Unreadable = yield AskChain(
        WalletTransfers(token.network, token.contract, payer, after, since_unix)
    )
    if isinstance(found, Unreadable):
        result.unreadable.setdefault(token.network, found.reason)
        return
    strangers: list[OutgoingTransfer] = []
    for transfer in found.outgoing:
        if transfer.amount_atomic == 0:
            continue  # anybody can have a token say that nothing left a wallet
        known = yield from _explained(token, payer, transfer, result)
        if isinstance(known, Unreadable):
            result.unreadable.setdefault(token.network, known.reason)
            return  # nothing of it is remembered as compared
        if not known:
            strangers.append(transfer)
    result.complete = result.complete and found.complete
    told = yield from _note_scan(token, payer, after, found.upto, strangers)
    result.unexplained += told
    result.unexplained_total += sum(row["amount"] for row in told)


def _explained(
    token: Asset, payer: Address, transfer: OutgoingTransfer, result: Reconciliation
) -> Flow[bool | Unreadable]:
    """Is there a payment in the books that this Transfer proves? One whose proof was missing has it from now on."""
    proof = proof_key(token.network, transfer.transaction, transfer.log_index)
    if (yield from _read_mark(proof)) is not None:
        return True
    nonce: int | Unreadable | None = yield AskChain(TransferNonce(token.network, token.contract, payer, transfer))
    if isinstance(nonce, Unreadable):
        return nonce
    if nonce is None:
        return (yield from _stands_for_one(token, transfer, proof))
    hold_id = f"{nonce:064x}"
    hold = yield Transact(Scope(holds=(hold_id,)), lambda view: view.hold(hold_id))
    if hold is None or hold.intent is None:
        return False
    shown = dataclasses.replace(hold, claim=Claim(hold.amount, transfer.transaction))
    finding = yield AskChain(HoldStatus(shown))
    if isinstance(finding, Unreadable):
        return finding
    yield from _book(hold, finding, result)
    return (yield from _read_mark(proof)) is not None


def _stands_for_one(token: Asset, transfer: OutgoingTransfer, proof: MarkKey) -> Flow[bool]:
    """A settlement wrapped in a contract of the payee's shows no nonce: it is of one of the payments whose cause nobody knows."""
    key = unshown_mark(token.network, token.contract, transfer.payee)
    scope = Scope(marks=(key, proof))
    answer: bool = yield Transact(scope, lambda view: explain(view, key, proof, transfer.amount_atomic))
    return answer


def _read_mark(key: MarkKey) -> Flow[Mapping[str, Any] | None]:
    answer: Mapping[str, Any] | None = yield Transact(Scope(marks=(key,)), lambda view: view.mark(key))
    return answer


def _block_of(mark: Mapping[str, Any] | None) -> int | None:
    return None if mark is None else int(mark["block"])


def _note_scan(
    token: Asset, payer: Address, after: int | None, upto: int, strangers: list[OutgoingTransfer]
) -> Flow[list[dict[str, Any]]]:
    """Remember how far the wallet was compared, and tell of what stands in no book; return what was told."""
    key = scan_mark(token, payer)
    rows = [_stranger(token, transfer) for transfer in strangers]
    total = sum(row["amount"] for row in rows)

    def change(view: LedgerView) -> list[dict[str, Any]]:
        compared = _block_of(view.mark(key))
        if compared != after or compared == upto:
            return []  # somebody else has gone on from there, and told of it; what is beyond is for the next look
        view.put_mark(key, {"block": upto, "at_ms": view.now_ms})
        for row in rows:
            view.record(WALLET, "event", facts={"name": "unexplained_transfer", **row})
        if rows:
            what = "1 transfer" if len(rows) == 1 else f"{len(rows)} transfers"
            message = f"{what} of ${format_dollars(total)} left the wallet on {token.network} and stand in no book"
            view.notices.append(
                Notice("unexplained_transfer", message, {"total": format_dollars(total), "transfers": rows[:20]})
            )
        return rows

    answer: list[dict[str, Any]] = yield Transact(Scope(nodes=(WALLET,), marks=(key,)), change)
    return answer


def _stranger(token: Asset, transfer: OutgoingTransfer) -> dict[str, Any]:
    return {
        "network": token.network,
        "token": token.contract,
        "symbol": token.symbol,
        "transaction": transfer.transaction,
        "payee": transfer.payee,
        "amount": token.value_nanos(transfer.amount_atomic),
    }


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
    """Ask the chain about every unproven payment of a budget and all below it, and write down what it shows."""
    store = shell.store
    inside = {node.id for node in below(nodes_of(store, node_id), node_id)}
    result = Reconciliation()
    unsettled = store.unsettled(store.now_ms() // 1000)
    wanted = [hold_id for hold_id in unsettled if (hold := store.hold(hold_id)) is not None and hold.node_id in inside]
    run(reconcile_holds(context, wanted, result), shell)
    return result


def reconcile_ledger(shell: Shell, context: Context) -> Reconciliation:
    """The same for all of a ledger; then compare what left its wallet with what its payments have proven."""
    store = shell.store
    result = Reconciliation()
    run(reconcile_holds(context, store.unsettled(store.now_ms() // 1000), result), shell)
    row = store.marks(*PAYER_MARK).get(PAYER_MARK[1])
    if row is None:
        return result  # nobody has signed anything
    payer = parse_address(str(row["address"]))
    since_unix = min(node.created_ms for node in store.nodes() if node.id == WALLET) // 1000
    for token in context.registry.on(context.chains):
        run(reconcile_wallet(token, payer, since_unix, result), shell)
    return result
