"""A person at a real terminal: what is shown, what is a yes, and that there may be no terminal at all."""

import io
import os
import pty
import select
import subprocess
import sys
import threading
import time
from decimal import Decimal

import pytest

from x402guard.guard.approvers import TerminalApprover, operating_user
from x402guard.policy import ApprovalRequest


def request(**changes):
    facts = {
        "id": "i",
        "session": "s",
        "kind": "tool",
        "what": "delete_user",
        "amount": Decimal("0.10"),
        "payee": "",
        "network": "",
        "arguments": None,
        "rule": "ask",
        "reason": "why",
        "approvers": 1,
        "timeout_s": 5,
    }
    return ApprovalRequest(**{**facts, **changes})


class Desk:
    """Both ends of a pseudo-terminal: *slave* is what the library asks at, and a person types at the other."""

    def __init__(self):
        self.fd, end = pty.openpty()
        self.slave = io.TextIOWrapper(io.FileIO(end, "r+"), encoding="utf-8", write_through=True)
        self.shown = ""

    def until(self, text, seconds=10.0, unless="\0"):
        """Read until so much is shown; False where it does not come in time, or something else does."""
        end = time.monotonic() + seconds
        while text not in self.shown and unless not in self.shown and (left := end - time.monotonic()) > 0:
            if select.select([self.fd], [], [], left)[0]:
                self.shown += os.read(self.fd, 10_000).decode()
        return text in self.shown

    def type(self, text):
        os.write(self.fd, text.encode())


@pytest.fixture
def desk():
    made = Desk()
    yield made
    made.slave.close()
    os.close(made.fd)


@pytest.mark.parametrize(
    ("typed", "allowed"),
    [
        ("y\n", True),
        ("YES \n", True),
        ("\n", False),
        ("n\n", False),
        ("yep\n", False),
        ("y es\n", False),
        ("\x04", False),
        ("1\n", False),
    ],
)
def test_at_a_terminal_only_yes_is_a_yes(desk, typed, allowed):
    answers = []
    asking = threading.Thread(target=lambda: answers.append(TerminalApprover(desk.slave).ask(request())), daemon=True)
    asking.start()
    assert desk.until("[y/N]")
    assert "delete_user" in desk.shown
    assert "$0.10" in desk.shown
    desk.type(typed)
    asking.join(10)
    [answer] = answers
    assert (answer.allowed, answer.by) == (allowed, (operating_user(),))


def test_what_was_typed_before_the_question_is_no_answer_to_it(desk):
    desk.type("y\n")
    answers = []
    asking = threading.Thread(target=lambda: answers.append(TerminalApprover(desk.slave).ask(request())), daemon=True)
    asking.start()
    assert desk.until("[y/N]")
    asking.join(0.5)
    desk.type("n\n")
    asking.join(10)
    assert [answer.allowed for answer in answers] == [False]


def test_two_questions_at_one_terminal_come_one_after_the_other(desk):
    approver, answers = TerminalApprover(desk.slave), {}

    def ask(what):
        answers[what] = approver.ask(request(what=what)).allowed

    threads = [threading.Thread(target=ask, args=(what,), daemon=True) for what in ("drop_one", "drop_two")]
    threads[0].start()
    assert desk.until("drop_one")
    threads[1].start()
    early = desk.until("drop_two", 0.5)
    desk.type("n\n")
    assert desk.until("drop_two")
    desk.type("y\n")
    for thread in threads:
        thread.join(10)
    assert not early, "a yes to one would be taken for the other"
    assert answers == {"drop_one": False, "drop_two": True}


ASKS = """
from tests.support.merchant import make_guard
from x402guard import PaymentRefused, Policy, Rule
with make_guard(policy=Policy(rules=[Rule(name="ask", action="ask")]), approver="terminal") as guard:
    with guard.session("s", budget="$1") as session:
        try:
            session.charge("serp", "$0.01", arguments={"q": "a\\x1b[2Jb"})
        except PaymentRefused as error:
            print("refused", error)
        print("spent", session.spent, flush=True)
"""


TAKES_IT = "import fcntl, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0)\n"


def run_at_a_terminal(desk, typed):
    """Run a program whose own terminal this is; return all that was shown on it."""
    end = desk.slave.fileno()
    program = subprocess.Popen(
        [sys.executable, "-c", TAKES_IT + ASKS], stdin=end, stdout=end, stderr=end, start_new_session=True
    )
    try:
        if desk.until("[y/N]", 30, unless="spent "):
            desk.type(typed)
        desk.until("spent ", 30)
        program.wait(30)
        desk.until("no more", 0.2)
    finally:
        program.kill()
        program.wait(30)
    return desk.shown


@pytest.mark.parametrize(("typed", "spent"), [("y\n", "spent 0.01"), ("n\n", "spent 0.00")])
def test_the_programs_own_terminal_is_asked(desk, typed, spent):
    shown = run_at_a_terminal(desk, typed)
    assert "session s_" in shown, "a person is asked"
    assert "wants serp" in shown
    assert "\x1b" not in shown
    assert spent in shown
    assert ("refused" in shown) is (typed == "n\n")


def test_without_a_terminal_it_is_denied():
    done = subprocess.run(
        [sys.executable, "-c", ASKS], capture_output=True, text=True, check=True, timeout=60, start_new_session=True
    )
    assert "no terminal" in done.stdout
    assert "spent 0.00\n" in done.stdout
