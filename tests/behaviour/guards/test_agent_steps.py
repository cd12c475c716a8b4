"""An agent's own steps: counted, refused when its state comes back, verified before the end, asked about when unsure."""

import anyio
import pytest

from tests.support.merchant import make_guard
from x402guard import (
    Answer,
    ApprovalDenied,
    ConfigError,
    Loop,
    LoopDetected,
    NeedsReview,
    Policy,
    SessionClosed,
    SessionTripped,
)


def end_of(session):
    report = session.report().to_dict()
    return report["state"], report["terminated_by"]


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_steps_are_counted_over_the_run_its_children_and_a_restart(ledger_url, mode):
    def step(session, **more):
        return session.step(**more) if mode == "sync" else anyio.run(lambda: session.astep(**more))

    with make_guard(ledger_url) as guard:
        session = guard.session("s", budget="$1", id="run")
        assert [step(session), step(session, state={"n": 1}), step(session.child("c", budget="$0.10"))] == [1, 2, 3]
        if not ledger_url.startswith("memory"):
            with make_guard(ledger_url) as other:
                assert step(other.session("s", id="run")) == 4


def test_a_state_that_comes_back_is_refused_however_slowly_and_the_third_refusal_latches(ledger_url):
    with make_guard(ledger_url) as guard, guard.session("s", budget="$1") as session:
        stuck = {"todo": ["find the opinion"], "found": []}
        for number in range(1, 4):
            assert session.step(state=dict(reversed(stuck.items()))) == 2 * number - 1, (
                "the order of keys does not matter"
            )
            assert session.step(state={"number": number}) == 2 * number
        for _ in range(3):
            with pytest.raises(LoopDetected, match=r"the same state 3 times before \(policy.loop.states\)"):
                session.step(state=stuck)
        with pytest.raises(SessionTripped):
            session.step(state={"new": True})
        assert end_of(session) == ("tripped", "loop_detected")


def test_without_a_loop_detector_or_a_state_nothing_is_refused():
    with make_guard(policy=Policy(loop=None)) as guard, guard.session("s", budget="$1") as session:
        assert [session.step(state="same") for _ in range(20)] == list(range(1, 21))
    with make_guard() as guard, guard.session("s", budget="$1") as session:
        assert [session.step() for _ in range(20)] == list(range(1, 21))
    with make_guard(policy=Policy(loop=Loop(states=1))) as guard, guard.session("s", budget="$1") as session:
        session.step(state="same")
        with pytest.raises(LoopDetected, match="the same state once before"):
            session.step(state="same")


def test_what_the_state_holds_stands_nowhere(tmp_path):
    path = tmp_path / "l.db"
    with make_guard(f"sqlite:///{path}") as guard, guard.session("s", budget="$1") as session:
        session.step(state={"password": "hunter2-hunter2"})
    assert b"hunter2" not in b"".join(file.read_bytes() for file in tmp_path.iterdir())


async def later(answer):
    await anyio.sleep(0)
    return answer


@pytest.mark.parametrize("mode", ["sync", "async", "awaited"])
def test_a_session_is_completed_only_if_its_verification_says_yes(mode):
    told = []
    with make_guard(on_notice=told.append) as guard, guard.session("s", budget="$1") as session:

        def finish(result):
            if mode == "sync":
                return session.finish(result, verify=lambda value: value == "42")
            check = (lambda value: later(value == "42")) if mode == "awaited" else (lambda value: value == "42")
            return anyio.run(lambda: session.afinish(result, verify=check))

        assert finish("41") is False
        assert end_of(session) == ("open", None)
        session.charge("serp", "$0.01")  # it goes on
        assert finish("42") is True
        assert end_of(session) == ("closed", "completed")
        with pytest.raises(SessionClosed):
            session.charge("serp", "$0.01")
    assert [notice.kind for notice in told] == ["not_verified", "session_ended"]
    assert told[1].rule == "completed"


def test_a_session_whose_last_verification_said_no_ends_as_not_verified():
    with make_guard() as guard:
        with guard.session("s", budget="$1") as session:
            assert session.finish("41", verify=lambda value: value == "42") is False
        assert end_of(session) == ("closed", "not_verified")
        with guard.session("t", budget="$1") as other:
            other.finish()
        assert end_of(other) == ("closed", "completed")
        with guard.session("u", budget="$1") as plain:
            pass
        assert end_of(plain) == ("closed", None)


@pytest.mark.parametrize("said", [None, 1, "yes", object()])
def test_only_true_is_a_yes(said):
    with make_guard() as guard, guard.session("s", budget="$1") as session:
        assert session.finish("42", verify=lambda _value: said) is False


def test_a_verification_that_fails_leaves_the_session_open():
    def breaks(_value):
        raise RuntimeError("no model")

    with make_guard() as guard, guard.session("s", budget="$1") as session:
        with pytest.raises(RuntimeError, match="no model"):
            session.finish("42", verify=breaks)
        assert end_of(session) == ("open", None)
        with pytest.raises(ConfigError, match="afinish"):
            session.finish("42", verify=lambda _value: later(True))


UNSURE = Policy(min_confidence=0.8)


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("confidence", [0.6, None, 0])
def test_an_unsure_end_asks_the_approver(mode, confidence):
    asked, answers = (
        [],
        iter([Answer(allowed=False, by=("Ann",), reason="look again"), Answer(allowed=True, by=("Ann",))]),
    )

    def approver(request):
        asked.append(request)
        return next(answers)

    with make_guard(policy=UNSURE, approver=approver) as guard, guard.session("s", budget="$1") as session:

        def finish():
            if mode == "sync":
                return session.finish("42", confidence=confidence)
            return anyio.run(lambda: session.afinish("42", confidence=confidence))

        with pytest.raises(ApprovalDenied, match="look again"):
            finish()
        assert end_of(session) == ("open", None)
        assert finish() is True
        assert end_of(session) == ("closed", "completed")
    assert (asked[0].what, asked[0].rule) == ("finish", "min_confidence")


def test_a_sure_end_asks_nobody_and_an_unsure_one_without_an_approver_is_refused():
    with make_guard(policy=UNSURE) as guard, guard.session("s", budget="$1") as session:
        with pytest.raises(NeedsReview, match="has no approver"):
            session.finish("42", confidence=0.79)
        assert session.finish("42", confidence=0.8) is True


@pytest.mark.parametrize("confidence", [-0.1, 1.1, "0.5", True, float("nan")])
def test_a_confidence_that_is_none_is_named(confidence):
    with make_guard() as guard, guard.session("s", budget="$1") as session:
        with pytest.raises(ConfigError, match="confidence: "):
            session.finish("42", confidence=confidence)
        with pytest.raises(ConfigError, match=r"policy\.min_confidence: "):
            Policy(min_confidence=confidence)


def test_a_session_that_is_tripped_or_over_does_not_finish():
    told = []
    with make_guard(on_notice=told.append) as guard:
        session = guard.session("s", budget="$1")
        session.trip("enough")
        with pytest.raises(SessionTripped):
            session.finish("42")
        other = guard.session("t", budget="$1")
        assert other.finish("42") is True
        with pytest.raises(SessionClosed):
            other.finish("42", verify=lambda _value: False)
    assert "not_verified" not in [notice.kind for notice in told]


@pytest.mark.parametrize("state", [{1: 2, "a": 3}, {b"x": 1}])
def test_a_state_that_is_no_json_is_named(state):
    with make_guard() as guard, guard.session("s", budget="$1") as session, pytest.raises(ConfigError, match="state: "):
        session.step(state=state)
