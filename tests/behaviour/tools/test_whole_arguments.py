"""The owner's ``classify`` judges all that the tool gets, and a change of what an approver is not shown is seen as well."""

import dataclasses
import uuid

import pytest

from tests.support.merchant import make_guard
from x402guard import ApprovalDenied, PolicyDenied
from x402guard.policy import Policy, Risk

BAD = "DROP TABLE users"


@dataclasses.dataclass
class Statement:
    text: str
    hidden: str = dataclasses.field(default="", repr=False)


def deep(value, levels):
    for _ in range(levels):
        value = [value]
    return value


PLACES = {
    "at the end of a long text": " " * 2_001 + BAD,
    "in bytes": BAD.encode(),
    "in a bytearray": bytearray(BAD, "ascii"),
    "behind a hundred others": ["SELECT 1"] * 100 + [BAD],
    "behind five hundred others": {str(number): "" for number in range(500)} | {"last": BAD},
    "deep": deep(BAD, 40),
    "after many values": [[0] * 90] * 9 + [BAD],
    "in a field that is not shown": Statement("SELECT 1", BAD),
    "in a set": {f"SELECT {number}" for number in range(200)} | {BAD},
    "beside an object": [object(), BAD],
}


def spots(_tool, arguments):
    return "CRITICAL" if BAD in str(arguments) else None


def held(session, value):
    with session.hold("look_up", up_to="$0.01", arguments={"query": value}) as hold:
        hold.capture("$0")


@pytest.mark.parametrize("way", ["tool", "hold", "charge"])
@pytest.mark.parametrize("place", PLACES)
def test_classify_judges_the_whole_arguments(place, way):
    ran, policy = [], Policy(risk=Risk(classify=spots))
    with make_guard(policy=policy) as guard, guard.session("s", budget="$1") as session:

        @session.tool(name="look_up", cost="$0.01")
        def look_up(query):
            ran.append(query)

        ways = {
            "tool": lambda value: look_up(value),
            "hold": lambda value: held(session, value),
            "charge": lambda value: session.charge("look_up", "$0.01", arguments={"query": value}),
        }
        ways[way]("SELECT 1")
        with pytest.raises(PolicyDenied, match="look_up is CRITICAL"):
            ways[way](PLACES[place])
        assert len(ran) == (way == "tool")


def test_arguments_that_cannot_be_read_whole_do_not_run():
    ran, endless = [], []
    endless.append(endless)
    with make_guard(policy=Policy(risk=Risk(classify=spots))) as guard, guard.session("s", budget="$1") as session:

        @session.tool(name="look_up", cost="$0")
        def look_up(query):
            ran.append(query)

        for value in (endless, deep("x", 65), [0] * 1_000_001):
            with pytest.raises(PolicyDenied, match=r"look_up: policy\.risk\.classify failed: ConfigError"):
                look_up(value)
        look_up([0] * 900_000)
    assert len(ran) == 1


def test_without_classify_nothing_is_read():
    """A tool takes a large table; only a name is judged, so nothing looks through it."""
    looks = []

    class Table(dict):
        def items(self):
            looks.append(1)
            return super().items()

    with make_guard(policy=Policy(risk=Risk())) as guard, guard.session("s", budget="$1") as session:

        @session.tool(name="look_up", cost="$0.01")
        def look_up(query):
            return len(query)

        assert look_up(Table(a=1)) == 1
    assert len(looks) == 1  # once, to compare calls


HIDDEN = {
    "the end of a long text": (["x" * 3_000], lambda kept: kept.__setitem__(0, "x" * 2_999 + "y")),
    "behind a hundred others": (list(range(200)), lambda kept: kept.__setitem__(150, -1)),
    "deep": (deep(["x"], 20), lambda kept: kept.__setitem__(0, deep(["y"], 19))),
    "bytes": ([b"x" * 9], lambda kept: kept.__setitem__(0, b"y" * 9)),
    "a name": ([uuid.UUID(int=1)], lambda kept: kept.__setitem__(0, uuid.UUID(int=2))),
    "a field that is not shown": ([Statement("a", "b")], lambda kept: setattr(kept[0], "hidden", "c")),
}


@pytest.mark.parametrize("beside", [None, object()], ids=["readable", "with an object"])
@pytest.mark.parametrize("place", HIDDEN)
def test_a_change_of_what_an_approver_is_not_shown_does_not_run(place, beside):
    ran, (kept, change) = [], HIDDEN[place]
    before = list(kept)

    def approver(_request):
        change(kept)
        return True

    with make_guard(approver=approver) as guard, guard.session("s", budget="$1") as session:

        @session.tool(cost="$0.01")
        def delete_user(ids, context=None):
            ran.append(ids)

        with pytest.raises(ApprovalDenied, match="its arguments were changed while an approver was asked"):
            delete_user(kept, beside)
        assert (ran, session.spent, session.held) == ([], 0, 0)
    kept[:] = before
    if isinstance(kept[0], Statement):
        kept[0].hidden = "b"


def test_what_stays_as_it_was_runs():
    ran = []
    with make_guard(approver=lambda _: True) as guard, guard.session("s", budget="$1") as session:

        @session.tool(cost="$0.01")
        def delete_user(ids, context=None):
            ran.append(ids)

        delete_user(["x" * 5_000, *range(300)], object())
        delete_user(deep("x", 30))
        assert len(ran) == 2
        assert session.spent > 0
