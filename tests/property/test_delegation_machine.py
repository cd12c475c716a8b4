"""A planner, workers, an owner and a clock, in any order: a worker never spends past its task, and its end is final."""

from decimal import Decimal

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.support.delegations import NOW_S, World, asked
from tests.support.examples import examples
from x402guard import ApprovalDenied, ConfigError, NeedsReview, PaymentRefused
from x402guard.kernel.rows import NodeState
from x402guard.ledger.delegations import DELEGATIONS, DelegationState, delegation_marks, read_delegation, revoke
from x402guard.ledger.owner import reset_node, trip_node
from x402guard.ledger.view import Scope

REFUSED = (ConfigError, PaymentRefused)
LIMIT, TASK, SPARE = Decimal("1.00"), Decimal("0.40"), 600
ENDED = {DelegationState.ANSWERED, DelegationState.TAKEN, DelegationState.DENIED, DelegationState.REVOKED}


class DelegationMachine(RuleBasedStateMachine):
    """Three tasks of one run. What a rule is refused is refused; what it is allowed has to keep the promises below."""

    def __init__(self):
        super().__init__()
        self.books = World("memory://")
        self.planner = self.books.guard().session("planner", budget="$1.00", id="plan")
        self.tasks, self.workers = [], {}
        self.seen, self.final, self.spent_at_end = {}, {}, {}

    def teardown(self):
        self.books.close()

    @initialize()
    def delegates(self):
        for number in range(3):
            deadline = NOW_S + SPARE * (number + 1)
            self.tasks.append(self.planner.delegate(asked(request_id=f"r{number}", deadline=deadline)))

    def allowed(self, call, *arguments, **more):
        """Return what a call returns, or None where it is refused."""
        try:
            return call(*arguments, **more)
        except (*REFUSED, TimeoutError):
            return None

    @rule(number=st.integers(0, 2))
    def redeem(self, number):
        guard = self.books.guard()
        session = self.allowed(guard.redeem, self.tasks[number].token)
        if session is not None:
            assert number not in self.workers, "two workers at one task"
            self.workers[number] = (guard, session)

    @precondition(lambda self: self.workers)
    @rule(data=st.data(), amount=st.sampled_from(["0.05", "0.20", "0.40"]))
    def charge(self, data, amount):
        _, session = self.workers[data.draw(st.sampled_from(sorted(self.workers)))]
        self.allowed(session.bind(session.charge), "search", amount)

    @precondition(lambda self: self.workers)
    @rule(
        data=st.data(),
        sure=st.booleans(),
        status=st.sampled_from(["completed", "partial", "needs_clarification", "failed"]),
    )
    def answer(self, data, sure, status):
        number = data.draw(st.sampled_from(sorted(self.workers)))
        said = {"error": "why"} if status in ("partial", "failed") else {}
        output = None if status == "failed" else number
        _, session = self.workers[number]
        self.allowed(session.task.answer, output, status=status, confidence=1.0 if sure else None, **said)

    @precondition(lambda self: self.workers)
    @rule(data=st.data())
    def leave(self, data):
        _, session = self.workers.pop(data.draw(st.sampled_from(sorted(self.workers))))
        session.close()

    @precondition(lambda self: self.workers)
    @rule(data=st.data())
    def crash(self, data):
        guard, _ = self.workers.pop(data.draw(st.sampled_from(sorted(self.workers))))
        guard.close()

    @rule(number=st.integers(0, 2))
    def take(self, number):
        try:
            result = self.tasks[number].result(timeout_s=0)
        except (NeedsReview, ApprovalDenied, TimeoutError, *REFUSED):
            return
        if result.status != "needs_clarification":
            assert self.final.setdefault(number, result) == result, "another result than before"

    @rule(number=st.integers(0, 2), allow=st.booleans())
    def review(self, number, allow):
        for key, row in self.books.store.marks("approval", "").items():
            if not row["taken"] and self.tasks[number].request.request_id in row["what"]:
                said = {**row, "said": {"ada": allow}}
                self.books.store.transact(
                    Scope(marks=(("approval", key),)),
                    lambda view, key=key, said=said: view.put_mark(("approval", key), said),
                )

    @rule(number=st.integers(0, 2))
    def reply(self, number):
        self.allowed(self.tasks[number].reply, "yes")

    @rule(number=st.integers(0, 2))
    def revoke(self, number):
        row = read_delegation(self.books.store.marks("delegation", "")[self.tasks[number].session_id])
        scope = Scope((row.session,), marks=delegation_marks(row), durable=True)
        self.allowed(self.books.store.transact, scope, lambda view: revoke(view, row.session, "by its owner"))

    @rule(node=st.sampled_from(["plan", 0, 1, 2]), reset=st.booleans())
    def trip_or_reset(self, node, reset):
        node_id = node if node == "plan" else self.tasks[node].session_id
        scope = Scope((node_id,), durable=True)
        change = (
            (lambda view: reset_node(view, node_id, "ada")) if reset else (lambda view: trip_node(view, node_id, "no"))
        )
        self.allowed(self.books.store.transact, scope, change)

    @rule(seconds=st.sampled_from([1, SPARE]))
    def wait(self, seconds):
        self.books.forward(seconds)

    @rule()
    def restart_the_planner(self):
        self.planner.close()
        self.planner = self.books.guard().session("planner", id="plan")
        self.tasks = [self.planner.delegated(task.request.request_id) for task in self.tasks]
        for number, task in enumerate(self.tasks):
            again = self.allowed(self.planner.delegate, task.request.model_copy(update={"issuer_id": ""}))
            self.tasks[number] = task if again is None else again

    @invariant()
    def promises(self):
        nodes = {node.id: node for node in self.books.store.nodes()}
        plan = nodes["plan"]
        assert plan.used <= LIMIT * 10**9
        for number, task in enumerate(self.tasks):
            node, row = (
                nodes[task.session_id],
                read_delegation(self.books.store.marks("delegation", "")[task.session_id]),
            )
            assert node.used <= TASK * 10**9
            before = self.seen.get(number, DelegationState.OFFERED)
            assert row.state is before or reaches(before, row.state)
            self.seen[number] = row.state
            over = row.state in ENDED or self.books.clock.now_ms >= row.until_ms or node.state is NodeState.TRIPPED
            if over and node.state is not NodeState.TRIPPED:
                assert self.spent_at_end.setdefault(number, node.used) == node.used, "it has spent after its end"
            if row.result is not None:
                assert row.result["request_id"] == f"r{number}"
                assert Decimal(row.result["cost"]) * 10**9 == node.spent
        waiting = [row["calls"] for row in self.books.store.marks("wait", "").values() if row["calls"]]
        assert waiting == []


def reaches(start, end):
    """True if the table allows to come from one state to another one."""
    found = {start}
    while (more := {after for state in found for after in DELEGATIONS[state]} | found) != found:
        found = more
    return end in found


TestDelegationMachine = DelegationMachine.TestCase
TestDelegationMachine.settings = settings(max_examples=examples(60), stateful_step_count=30, deadline=None)
