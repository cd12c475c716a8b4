"""What a chain shows, in any order, against a ten-line model of one whose blocks may be undone."""

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, precondition, rule

from tests.support.examples import examples
from tests.support.ledger import START_MS, Books, an_intent, weigh_proven
from x402guard.frozen import replace
from x402guard.kernel.rows import Claim, HoldState, NodeState
from x402guard.ledger.events import Void
from x402guard.ledger.evidence import claim_settlement, receipt_mark, weigh_marks
from x402guard.ledger.findings import Cancelled, Settled, Unreadable, Unused, Used
from x402guard.ledger.upto_sellers import ceiling_mark
from x402guard.money import format_dollars

NOW, DEADLINE = START_MS // 1000, START_MS // 1000 + 60
LIMIT_NANOS, UNIT = 10**9, 1000


class OneChain:
    """All that a chain is to one payment: what its head says of the nonce, what its final block says, and the final block's time."""

    def __init__(self, ceiling, *, exact=False):
        self.exact = exact  # its Transfer has this amount, and no other
        self.ceiling, self.head, self.final, self.dead = ceiling, None, None, False
        self.proven = False  # the books were shown a settlement as final

    def could_cost(self):
        """What may be gone at the worst, now and later, in atomic units: only what is final is sure."""
        if self.final is not None and self.final == self.head:
            return self.final[0]
        return 0 if self.dead and (self.head is None or self.head[0] == 0) else self.ceiling

    def finding(self, *, tells):
        if self.head is None:
            return Unused(DEADLINE + 1 if self.dead else NOW + 40)  # surely later than the last look
        (amount, transaction), final = self.head, self.final == self.head
        if not tells:
            return Used(final=final)
        return Settled(amount, transaction, 0, final=final) if amount else Cancelled(transaction, final=final)


class ChainMachine(RuleBasedStateMachine):
    holds = Bundle("holds")

    def __init__(self):
        super().__init__()
        self.books = Books(wallet=None, session=format_dollars(LIMIT_NANOS))
        self.chains, self.count = {}, 0

    def counted(self, hold_id):
        row = self.books.store.hold(hold_id)
        return row.amount if row.state is HoldState.HELD else row.captured

    def weighed(self, hold_id, finding):
        hold = self.books.store.hold(hold_id)
        marks, nodes, holds = weigh_marks(hold, finding), (hold.node_id,), (hold_id,)
        return self.books.change(
            lambda view: weigh_proven(view, hold_id, finding), nodes=nodes, holds=holds, marks=marks
        )

    def new_transaction(self):
        self.count += 1
        return f"0x{self.count:064x}"

    @precondition(lambda self: len(self.chains) < 2)
    @rule(
        target=holds,
        units=st.integers(2, 90_000),
        claimed=st.sampled_from([None, "exact", "upto"]),
        exact=st.booleans(),
    )
    def authorize(self, units, claimed, exact=False):
        """*exact* is the scheme of one that nobody claims."""
        self.count += 1
        hold_id = f"{self.count:064x}"
        scheme = claimed or ("exact" if exact else "upto")
        method = "permit2" if scheme == "upto" else "eip3009"
        intent = an_intent(self.count, units, DEADLINE, scheme=scheme, method=method)
        made = self.books.hold(hold_id, format_dollars(units * UNIT), chain_evidence=True, intent=intent)
        if self.books.store.hold(hold_id) is None:
            return None
        self.chains[hold_id] = OneChain(units, exact=scheme == "exact")
        if claimed:
            self.claim(made, units if claimed == "exact" else 1, believe=claimed == "exact")
        return hold_id

    def claim(self, hold, units, *, believe):
        claim = Claim(units * UNIT, self.new_transaction())
        payment = hold.payment()
        marks = (ceiling_mark(payment.payee), receipt_mark(payment.network, claim.transaction))
        self.books.change(
            lambda view: claim_settlement(view, hold.id, claim, believe=believe),
            nodes=(hold.node_id,), holds=(hold.id,), marks=marks,
        )  # fmt: skip

    # ---- the chain ----

    @rule(hold=holds, share=st.integers(1, 100), for_good=st.booleans())
    def is_settled(self, hold, share, for_good):
        chain = self.chains.get(hold)
        if chain and chain.head is None and not chain.dead:
            share = 100 if chain.exact else share
            chain.head = (max(1, chain.ceiling * share // 100), self.new_transaction())
            if for_good:
                chain.final, chain.proven = chain.head, True
                self.weighed(hold, chain.finding(tells=True))

    @rule(hold=holds)
    def is_cancelled(self, hold):
        chain = self.chains.get(hold)
        if chain and chain.head is None:
            chain.head = (0, self.new_transaction())

    @rule(hold=holds)
    def its_block_becomes_final(self, hold):
        chain = self.chains.get(hold)
        if chain:
            chain.final = chain.head

    @rule(hold=holds)
    def its_block_is_undone(self, hold):
        """However deep."""
        chain = self.chains.get(hold)
        if chain and not chain.dead:
            chain.head = chain.final = None

    @rule(hold=holds)
    def the_deadline_passes(self, hold):
        if self.chains.get(hold):
            self.chains[hold].dead = True

    # ---- the books ----

    @rule(hold=holds, tells=st.booleans())
    def is_looked_at(self, hold, tells):
        chain = self.chains.get(hold)
        if chain is None:
            return
        finding = chain.finding(tells=tells)
        self.weighed(hold, finding)
        if isinstance(finding, Used) and finding.final and chain.proven:
            return  # a node that tells no more cannot say that another final block has settled it than the proven one
        assert self.counted(hold) >= chain.could_cost() * UNIT
        chain.proven |= isinstance(finding, Settled) and finding.final
        if isinstance(finding, Cancelled) and chain.proven:
            return  # it came too late for what the books know: Permit2 shows one of a nonce that was used before
        if tells and chain.final == chain.head and (chain.head or chain.dead):
            assert self.counted(hold) == chain.could_cost() * UNIT, "what is final and known is counted to the unit"

    @rule(hold=holds)
    def cannot_be_read(self, hold):
        if self.chains.get(hold):
            before = self.books.store.hold(hold)
            after = self.weighed(hold, Unreadable("down"))
            assert replace(after, checked_ms=0) == replace(before, checked_ms=0)

    @invariant()
    def the_session_counts_what_its_payments_do(self):
        row = self.books.node("s")
        assert row.used == sum(self.counted(hold) for hold in self.chains)
        assert row.used <= LIMIT_NANOS or row.state is NodeState.TRIPPED

    def teardown(self):
        self.books.close()


TestChainMachine = ChainMachine.TestCase
TestChainMachine.settings = settings(max_examples=examples(150), stateful_step_count=30, deadline=None)


findings = st.one_of(
    st.builds(
        Settled,
        st.integers(1, 100),
        st.sampled_from(["0x" + "01" * 32, "0x" + "02" * 32]),
        st.integers(0, 1),
        final=st.booleans(),
    ),
    st.builds(Used, final=st.booleans()),
    st.builds(Cancelled, st.just("0x" + "03" * 32), final=st.booleans()),
    st.builds(Unused, st.sampled_from([NOW, DEADLINE, DEADLINE + 1])),
    st.just(Unreadable("down")),
)


def is_final(finding):
    return isinstance(finding, Unused) or getattr(finding, "final", False)


@given(
    st.sampled_from(["held", "claimed", "captured", "captured for less", "voided"]),
    st.lists(findings, min_size=1, max_size=12),
    st.sampled_from(["eip3009", "permit2"]),
)
@settings(max_examples=examples(400))
def test_whatever_is_shown_in_whatever_order_the_books_hold(start, shown, method):
    """Told anything by anybody they never break; what is not final never lowers what counts; the same again changes nothing."""
    machine = ChainMachine()
    hold_id = f"{1:064x}"
    intent = an_intent(1, 100, DEADLINE, scheme="upto", method=method)
    no_chain = start == "captured for less"  # as long as none can be read, and only for who believes receipts
    machine.books.open_kernel(unsafe_trust_receipts=no_chain, most_exposed=100 * UNIT if no_chain else 0)
    made = machine.books.hold(hold_id, "$0.0001", chain_evidence=not no_chain, intent=intent)
    machine.chains[hold_id] = OneChain(100)
    if start == "claimed" or start.startswith("captured"):
        machine.claim(made, 100 if start == "captured" else 40, believe=start != "claimed")
    if no_chain:  # from now on one can
        machine.books.change(
            lambda view: view.put_hold(replace(view.known_hold(hold_id), chain_evidence=True)), holds=(hold_id,)
        )
    if start == "voided":  # it was never signed
        machine.books.step(hold_id, Void("it never left"))
    for finding in shown:
        before = machine.counted(hold_id)
        after = machine.weighed(hold_id, finding)
        assert machine.counted(hold_id) <= after.amount
        assert is_final(finding) or machine.counted(hold_id) >= before
        assert machine.weighed(hold_id, finding) == after
        assert after.state is not HoldState.CAPTURED or after.evidence is not None
    machine.the_session_counts_what_its_payments_do()
    machine.books.close()


def test_a_cancellation_that_can_be_undone_frees_nothing_of_a_settlement_that_was():
    """Found by the machine: a final block is undone, a cancellation takes its place, and may be undone itself."""
    state = ChainMachine()
    hold = state.authorize(claimed=None, units=2)
    state.is_settled(for_good=True, hold=hold, share=1)
    state.its_block_is_undone(hold=hold)
    state.is_cancelled(hold=hold)
    state.is_looked_at(hold=hold, tells=True)
    state.the_session_counts_what_its_payments_do()
    state.teardown()


def test_a_cancellation_that_can_be_undone_frees_nothing_in_place_of_one_that_was():
    """Found by the machine: the final block of a cancellation is undone, and another cancellation takes its place."""
    state = ChainMachine()
    hold = state.authorize(claimed=None, units=2)
    state.is_cancelled(hold=hold)
    state.its_block_becomes_final(hold=hold)
    state.is_looked_at(hold=hold, tells=True)
    state.its_block_is_undone(hold=hold)
    state.is_cancelled(hold=hold)
    state.is_looked_at(hold=hold, tells=True)
    assert state.books.store.hold(hold).state is HoldState.HELD
    state.its_block_becomes_final(hold=hold)
    state.is_looked_at(hold=hold, tells=True)
    assert state.books.store.hold(hold).state is HoldState.VOIDED
    cancellation = state.chains[hold].head[1]
    assert state.weighed(hold, Cancelled(cancellation, final=False)).state is HoldState.VOIDED  # a node that is behind
    state.teardown()


def test_of_two_cancellations_in_turn_none_that_can_be_undone_frees_anything():
    """A payment that was captured on a claim: its mark names the first cancellation, its end the second."""
    state = ChainMachine()
    hold = state.authorize(claimed="exact", units=2)
    first, second = state.new_transaction(), state.new_transaction()
    counted = []
    for transaction, final in ((first, True), (second, False), (second, True), (first, False), (first, True)):
        state.weighed(hold, Cancelled(transaction, final=final))
        counted.append(state.counted(hold) // UNIT)
    assert counted == [0, 2, 0, 2, 0]
    state.teardown()


def test_no_chain_shows_less_of_an_exact_payment_than_was_signed():
    """A token that keeps a fee shows less, and all that was signed is gone: it is captured in full."""
    state = ChainMachine()
    hold = state.authorize(claimed=None, units=2, exact=True)
    state.weighed(hold, Settled(1, state.new_transaction(), 0, final=True))
    after = state.books.store.hold(hold)
    assert (after.state, after.captured) == ("captured", after.amount)
    state.teardown()
