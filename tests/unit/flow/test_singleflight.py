"""Who asks about a payment while the chain is being asked about it shares that answer; every other question has its own."""

import threading
import time

import pytest

from tests.support.chain import MockChain
from tests.support.ledger import a_hold
from x402guard.flow import singleflight
from x402guard.flow.ports import HoldStatus
from x402guard.flow.singleflight import SingleFlight
from x402guard.frozen import replace
from x402guard.kernel.rows import Claim
from x402guard.ledger.findings import Unused, proven

ONE, OTHER = a_hold("h1"), a_hold("h2")


def claiming(hold, transaction="0x" + "ab" * 32):
    return replace(hold, claim=Claim(hold.amount, transaction))


class SlowChain(MockChain):
    """A chain that answers each question by its number, once two have come or half a second is over."""

    def __init__(self):
        super().__init__()
        self.begun, self.both = threading.Event(), threading.Event()

    def read(self, hold):
        self.asked.append(hold.id)
        number = self.reads
        self.begun.set()
        if number == 2:
            self.both.set()
        self.both.wait(0.5)
        return Unused(number)


def ask_at_once(first, second):
    """Return the answers to two questions, the second asked while the chain is busy with the first."""
    flight, chain, answers = SingleFlight(), SlowChain(), {}

    def ask(name, hold):
        answers[name] = flight.ask(HoldStatus(hold), chain)

    threads = [threading.Thread(target=ask, args=question) for question in (("first", first), ("second", second))]
    threads[0].start()
    assert chain.begun.wait(10)
    threads[1].start()
    for thread in threads:
        thread.join(10)
    return answers["first"], answers["second"]


def said(number, hold):
    """The chain's answer by its number, as one about this hold."""
    return proven(hold.payment(), Unused(number))


@pytest.mark.parametrize("hold", [ONE, claiming(ONE)], ids=["in doubt", "claimed"])
def test_who_asks_the_same_meanwhile_shares_the_answer(hold):
    assert ask_at_once(hold, hold) == (said(1, hold), said(1, hold))


@pytest.mark.parametrize(
    ("first", "second"),
    [(ONE, OTHER), (claiming(ONE), claiming(OTHER)), (ONE, claiming(ONE)), (claiming(ONE), claiming(ONE, "0x" + "cd" * 32))],
    ids=["two in doubt", "two of one transaction", "claimed since", "another transaction named"],
)  # fmt: skip
def test_another_question_has_an_answer_of_its_own(first, second):
    assert ask_at_once(first, second) == (said(1, first), said(2, second))


class Interrupting(list):
    """The queues of those who wait. Ctrl-C comes as the first one is looked at."""

    def __init__(self):
        super().__init__()
        self.looks = 0

    def __iter__(self):
        self.looks += 1
        if self.looks == 1:
            raise KeyboardInterrupt
        return super().__iter__()


def test_who_waits_is_woken_although_ctrl_c_comes_as_the_read_ends():
    flight = singleflight._Flight()
    flight._waiting = Interrupting()
    answers = []
    waiting = threading.Thread(target=lambda: answers.append(flight.answer()), daemon=True)
    waiting.start()
    until_s = time.monotonic() + 10
    while not flight._waiting:
        assert time.monotonic() < until_s
    with pytest.raises(KeyboardInterrupt):
        flight.end(Unused(1))
    flight.end(Unused(2))
    waiting.join(10)
    assert answers == [Unused(1)]
