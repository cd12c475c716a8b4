"""A planner and three workers, each in a process of its own, on one ledger, with real HTTP and the local chain."""

import json
import time
from decimal import Decimal
from itertools import count

import pytest

from tests.support import processes
from tests.support.command_line import forked
from x402guard import Guard, LocalSigner, Owner, Policy, TaskRequest

pytestmark = [pytest.mark.chain, pytest.mark.xdist_group("delegation")]

DIME = Decimal("0.10")
numbers = count(1)


class World:
    """One ledger, the planner's guard, and workers as processes."""

    def __init__(self, net, folder):
        self.net, self.folder = net, folder
        self.url = f"sqlite:///{folder / 'spend.db'}"
        settings = {"signer": LocalSigner.from_key(net.payer_key), "chains": {net.network: net.rpc}}
        policy = Policy(loop=None, breaker=None)
        self.guard = Guard(ledger=self.url, policy=policy, background_checks=False, **settings)

    def page(self):
        """A document for a dime, which was not bought before."""
        return f"{self.net.merchant.url}/documents/{next(numbers)}"

    def request(self, *steps, **changes):
        usual = {"task_type": "research", "budget": "$0.30", "deadline": int(time.time()) + 120}
        return TaskRequest(payload=list(steps), **{**usual, **changes})

    def worker(self, token):
        """Start a worker; it is ready, or has said why it is not."""
        worker = processes.start(
            "tests.support.delegated_worker", self.url, self.net.rpc, self.net.payer_key, module=True
        )
        worker.stdin.write(f"{token}\n")
        worker.stdin.flush()
        said = worker.stdout.readline()
        if said == "ready\n":
            return worker
        worker.communicate()
        return json.loads(said)

    def ended(self, *workers):
        """Let the workers begin at once, and return what each has to say."""
        for worker in workers:
            worker.stdin.write("\n")
            worker.stdin.flush()
        return [json.loads(worker.communicate()[0]) for worker in workers]


@pytest.fixture
def world(net, tmp_path):
    processes.run("pass")  # what forks has loaded the package now: no deadline below waits for it
    made = World(net, tmp_path)
    with made.guard:
        yield made


def test_a_planner_with_three_workers(world, net):
    before = net.balance(net.payer)
    with world.guard.session("planner", budget="$0.60", tools={"search", "sum"}, id="plan") as planner:
        pages = [["get", world.page()] for _ in range(4)]
        host = net.merchant.url.partition("//")[2]
        narrow = planner.delegate(
            world.request(
                ["use", "search"], ["use", "sum"], ["get", world.page()], ["answer", "narrow"],
                allowed_tools=["search", "delete"], allowed_hosts=["other.example"],
            )
        )  # fmt: skip
        greedy = planner.delegate(world.request(*pages, ["answer", "greedy"], budget="$9.00", allowed_hosts=[host]))
        wrong = {"request_id": "t_other", "responder_id": "w", "status": "completed", "output": 1, "cost": "0.10",
                 "tokens": 0, "confidence": 1, "error": None}  # fmt: skip
        cheat = planner.delegate(
            world.request(
                ["get", world.page()],
                ["submit", wrong],
                ["submit", {**wrong, "request_id": "t_cheat", "cost": "0.31"}],
                ["submit", {**wrong, "request_id": "t_cheat", "cost": "0.09"}],
                request_id="t_cheat",
            )
        )
        assert narrow.removed == {"allowed_tools": ["delete"]}
        assert greedy.removed == {"budget": "8.40"}
        said = world.ended(*(world.worker(task.token) for task in (narrow, greedy, cheat)))
        assert said[0][0] == "done"
        assert said[0][1].startswith("PolicyDenied: tools: tool 'sum'")
        assert said[0][2].startswith("PolicyDenied: hosts: ")
        assert said[1][:4] == [200, 200, 200, 200]
        assert said[2][0] == 200
        assert said[2][1].startswith("ConfigError: request_id: 't_other' is not the 't_cheat'")
        assert said[2][2].startswith("ConfigError: cost: $0.31 are more than the budget")
        assert said[2][3].startswith("ConfigError: cost: $0.09 are less than the $0.10 in the ledger")
        results = [task.result() for task in (narrow, greedy, cheat)]
        assert [(each.status, each.cost) for each in results] == [
            ("completed", Decimal("0.01")), ("completed", 4 * DIME), ("failed", DIME),
        ]  # fmt: skip
        assert planner.spent == Decimal("0.51")
        tree = [line.split() for line in planner.report().to_text().splitlines() if "└ research" in line]
    assert sorted((row[-3], row[-1]) for row in tree) == [
        ("$0.01", "completed"),
        ("$0.10", "not_verified"),
        ("$0.40", "completed"),
    ]
    assert before - net.balance(net.payer) == 500_000
    assert world.guard.reconcile().unexplained == []


def test_siblings_never_spend_the_same_dollar(world, net):
    before = net.balance(net.payer)
    with world.guard.session("planner", budget="$0.50") as planner:
        tasks = [
            planner.delegate(world.request(*(["get", world.page()] for _ in range(3)), ["answer", "done"]))
            for _ in range(3)
        ]
        said = world.ended(*(world.worker(task.token) for task in tasks))
        got = [each for worker in said for each in worker[:3]]
        assert got.count(200) == 5
        assert all(str(each).startswith(("BudgetExhausted: budget: ", "200")) for each in got)
        assert planner.spent == sum(task.result().cost for task in tasks) == 5 * DIME
    assert before - net.balance(net.payer) == 500_000


def test_tokens_that_are_revoked_expired_or_used_open_nothing(world, net):
    before = net.balance(net.payer)
    with world.guard.session("planner", budget="$1.00") as planner:
        page = ["get", world.page()]
        revoked, expired, used = (planner.delegate(world.request(page)) for _ in range(3))
        expired = planner.delegate(world.request(page, deadline=int(time.time()) + 4))
        done = forked("delegations", "revoke", revoked.request.request_id, "--ledger", world.url, cwd=world.folder)
        assert done.stdout.startswith("revoked by "), done.stderr
        working = world.worker(used.token)
        time.sleep(max(0.0, expired.request.deadline + 1 - time.time()))
        [first] = world.worker(revoked.token)
        assert first.startswith("ConfigError: token: it is revoked: by its owner")
        [second] = world.worker(expired.token)
        assert second.startswith("ConfigError: token: it ended ")
        [third] = world.worker(used.token)
        assert "works on its task, and is not known to have ended" in third
        # What is revoked while its worker is at work signs nothing more.
        forked("delegations", "revoke", used.request.request_id, "--ledger", world.url, cwd=world.folder)
        [[refused]] = world.ended(working)
        assert refused.startswith("SessionTripped: ")
        listed = forked("delegations", "list", "--json", "--ledger", world.url, cwd=world.folder)
        assert [task.result().status for task in (revoked, expired, used)] == ["failed"] * 3
        assert planner.spent == 0
    assert net.balance(net.payer) == before
    states = {row["request_id"]: row["state"] for row in json.loads(listed.stdout)}
    assert states[expired.request.request_id] == "expired"
    assert states[revoked.request.request_id] == states[used.request.request_id] == "revoked"


def test_a_deadline_is_cut_to_that_of_who_delegates_and_ends_all_paying(world, net):
    before, soon = net.balance(net.payer), int(time.time()) + 12
    with world.guard.session("boss", budget="$1.00") as boss:
        own = boss.delegate(world.request(task_type="plan", deadline=soon))
        with world.guard.redeem(own.token) as planner:
            steps = (["get", world.page()], ["answer", "done"])
            in_time, late = (planner.delegate(world.request(*steps, budget="$0.10")) for _ in range(2))
            assert {task.request.deadline for task in (in_time, late)} == {soon}
            assert in_time.removed.keys() == {"deadline"}
            quick, slow = world.worker(in_time.token), world.worker(late.token)
            assert world.ended(quick) == [[200, "done"]]
            time.sleep(max(0.0, soon + 0.5 - time.time()))
            [[paid, answered]] = world.ended(slow)
            assert paid.startswith("SessionClosed: deadline: session 'research' had until ")
            assert answered.startswith("SessionClosed: deadline: ")
        assert own.result().status == "failed"
    assert before - net.balance(net.payer) == 100_000


def test_a_worker_that_is_killed_is_followed_by_another_one(world):
    with world.guard.session("planner", budget="$1.00") as planner:
        task = planner.delegate(world.request(["get", world.page()], ["answer", "done"]))
        killed = world.worker(task.token)
        killed.kill()
        killed.communicate()
        [said] = world.ended(world.worker(task.token))
        assert said == [200, "done"]
        assert (task.result().output, task.result().cost) == ("done", DIME)
    with Owner(world.url) as owner:
        assert owner.verify() == []
