"""The owner's ``classify`` judges all that the tool gets, and a change of what an approver is not shown is seen as well."""

import dataclasses
import threading
import time
import uuid
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from decimal import Decimal
from pathlib import PurePosixPath

import pytest

from tests.support.merchant import make_guard
from x402guard import ApprovalDenied, Bulkhead, Policy, PolicyDenied, Risk, Rule

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


class Odd(int):
    """Each look at it says something else."""

    looks = 0

    def __repr__(self):
        Odd.looks += 1
        return f"odd {Odd.looks}"


class Unwilling:
    def __repr__(self):
        raise RuntimeError


def released():
    view = memoryview(b"abc")
    view.release()
    return view


SAME = {
    "another order": (OrderedDict(a=1, b=2), lambda value: value.move_to_end("a")),
    "an int of its own": (Odd(7), lambda _: None),
    "a repr that raises": (Unwilling(), lambda _: None),
    "a view that is released": (released(), lambda _: None),
    "nan": ([float("nan")], lambda _: None),
}


@pytest.mark.parametrize("beside", [None, object()], ids=["readable", "with an object"])
@pytest.mark.parametrize("value", SAME)
def test_what_says_the_same_is_not_changed(value, beside):
    ran, (given, looks) = [], SAME[value]
    with make_guard(approver=lambda _: looks(given) or True) as guard, guard.session("s", budget="$1") as session:

        @session.tool(cost="$0.01")
        def delete_user(ids, context=None):
            ran.append(ids)

        delete_user(given, beside)
    assert len(ran) == 1


def test_what_classify_judges_is_what_an_approver_is_shown_and_what_runs():
    """The arguments change while ``classify`` looks at them: it has judged what they were."""
    ran, shown, ids = [], [], ["7"]

    def judges(_tool, arguments):
        level = "CRITICAL" if len(arguments["ids"]) > 1 else "HIGH"
        ids[:] = ["1", "2", "3"]
        return level

    def approver(request):
        shown.append(request.arguments["ids"])
        return True

    with make_guard(policy=Policy(risk=Risk(classify=judges)), approver=approver) as guard:
        with guard.session("s", budget="$1") as session:

            @session.tool(name="look_up", cost="$0.01")
            def look_up(ids):
                ran.append(list(ids))

            with pytest.raises(ApprovalDenied, match="its arguments were changed"):
                look_up(ids)
    assert (ran, shown) == ([], [["7"]])


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

        for value in (deep("x", 65), [0] * 2_000_001):
            with pytest.raises(PolicyDenied, match=r"look_up: policy\.risk\.classify failed: ConfigError"):
                look_up(value)
        look_up(endless)  # it is told once, and nothing of it is hidden
        look_up([[0.5] * 1_536] * 1_000)
    assert len(ran) == 2


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


UNREADABLE = {
    "nested deeper": lambda kept: kept.__setitem__(0, deep("x", 70)),
    "a number of thousands of digits": lambda kept: kept.__setitem__(0, 10**5_000),
    "itself": lambda kept: kept.__setitem__(0, kept),
}


@pytest.mark.parametrize("beside", [None, object()], ids=["readable", "with an object"])
@pytest.mark.parametrize("cost", ["$0", "$0.90"])
@pytest.mark.parametrize("into", UNREADABLE)
def test_arguments_that_become_unreadable_do_not_run_and_cost_nothing(into, cost, beside):
    ran, kept = [], ["a"]

    def approver(_request):
        UNREADABLE[into](kept)
        return True

    with make_guard(approver=approver) as guard, guard.session("s", budget="$1") as session:

        @session.tool(cost=cost)
        def delete_user(ids, context=None):
            ran.append(ids)

        with pytest.raises(ApprovalDenied, match="its arguments were changed while an approver was asked"):
            delete_user(kept, beside)
        assert (ran, session.spent, session.held) == ([], 0, 0)
        session.charge("serp", "$0.50")


@pytest.mark.parametrize("value", [deep("x", 70), 10**5_000, [0] * 2_000_001], ids=["deep", "large", "many"])
def test_what_an_approver_allows_runs_also_where_it_cannot_be_read_whole(value):
    ran = []
    with make_guard(approver=lambda _: True) as guard, guard.session("s", budget="$1") as session:

        @session.tool(cost="$0.01")
        def delete_user(ids, context=None):
            ran.append(ids)

        delete_user(value, object())
    assert len(ran) == 1


def test_what_an_approver_is_shown_is_what_runs_although_it_is_changed_before_and_put_back():
    """The call waits for its place; its arguments are changed meanwhile, and put back while the approver is asked."""
    ran, seen, kept = [], [], {"to": ["bob", "eve"]}
    busy, goes = threading.Event(), threading.Event()

    def approver(request):
        if request.arguments["kept"]["to"] != ["first"]:
            seen.append(list(request.arguments["kept"]["to"]))
            kept["to"][1] = "eve"
        return True

    policy = Policy(breaker=None, loop=None, bulkhead=Bulkhead(per_tool=1))
    with make_guard(approver=approver, policy=policy) as guard, guard.session("s", budget="$1") as session:

        @session.tool(cost="$0.01")
        def delete_user(kept):
            ran.append(list(kept["to"]))
            if kept["to"] == ["first"]:
                busy.set()
                goes.wait(20)

        with ThreadPoolExecutor(2) as pool:
            first = pool.submit(session.bind(delete_user), {"to": ["first"]})
            assert busy.wait(20)
            second = pool.submit(session.bind(delete_user), kept)
            ends_s = time.monotonic() + 20
            while not session.shell.slots._lines and time.monotonic() < ends_s:
                time.sleep(0.001)
            kept["to"][1] = "alice"
            goes.set()
            first.result(20)
            with suppress(ApprovalDenied):
                second.result(20)
    assert ran[1:] in ([], seen)


@dataclasses.dataclass
class Read:
    path: str


@dataclasses.dataclass
class Delete:
    path: str


SWAPS = {
    "another class": (Read("/data"), Delete("/data")),
    "a path": ("a", PurePosixPath("a")),
    "a decimal": ("1", Decimal(1)),
    "a set": (["a"], {"a"}),
    "a tuple": (["a"], ("a",)),
    "bytes": (b"a", bytearray(b"a")),
    "a number in hex": (hex(10**40), 10**40),
    "itself": (["…"], None),
}


@pytest.mark.parametrize("swap", SWAPS)
@pytest.mark.parametrize("beside", [None, object()], ids=["readable", "with an object"])
def test_another_value_that_reads_the_same_is_a_change(swap, beside):
    (given, other), ran, kept = SWAPS[swap], [], []
    kept.append(given)

    def approver(_request):
        kept[0] = kept if swap == "itself" else other
        return True

    with make_guard(approver=approver) as guard, guard.session("s", budget="$1") as session:

        @session.tool(cost="$0.01")
        def delete_user(ids, context=None):
            ran.append(ids)

        with pytest.raises(ApprovalDenied, match="its arguments were changed"):
            delete_user(kept, beside)
    assert ran == []


def test_questions_about_values_that_read_the_same_are_two(tmp_path):
    asked = []
    with make_guard(approver=lambda request: asked.append(request.id) or True) as guard:
        with guard.session("s", budget="$1") as session:

            @session.tool(cost="$0.01")
            def delete_user(what):
                return what

            for what in (Read("/data"), Delete("/data"), "a", PurePosixPath("a")):
                delete_user(what)
    assert len(set(asked)) == 4


@pytest.mark.parametrize("pops", [False, True])
def test_what_classify_has_judged_is_what_runs(pops):
    """It takes what it has looked at out of its own copy; and the arguments change after it, without an approver."""
    ran, kept = [], ["ls"]

    def judges(_tool, arguments):
        said = str(arguments)
        if pops:
            arguments.clear()
        else:
            kept[0] = BAD
        return "CRITICAL" if BAD in said else "LOW"

    rules = [Rule(name="less", action="narrow", match="look_up", ceiling="$0.01")]
    with make_guard(policy=Policy(risk=Risk(classify=judges), rules=rules)) as guard:
        with guard.session("s", budget="$1") as session:

            @session.tool(name="look_up", cost=lambda _: "$0.01", up_to="$0.05")
            def look_up(query):
                ran.append(list(query))

            with pytest.raises(PolicyDenied, match="CRITICAL" if pops else "after policy.risk.classify had judged"):
                look_up([BAD] if pops else kept)
            assert (ran, session.spent, session.held) == ([], 0, 0)


def test_a_parameter_named_cls_is_shown_and_judged():
    with make_guard(policy=Policy(risk=Risk(classify=spots))) as guard, guard.session("s", budget="$1") as session:

        @session.tool(name="look_up", cost="$0.01")
        def look_up(query, cls="", /, **more):
            return query

        for call in (lambda: look_up("a", BAD), lambda: look_up(BAD, "", query="a"), lambda: look_up("a", query=BAD)):
            with pytest.raises(PolicyDenied, match="CRITICAL"):
                call()


def test_two_keys_that_read_the_same_hide_nothing():
    with make_guard(policy=Policy(risk=Risk(classify=spots))) as guard, guard.session("s", budget="$1") as session:

        @session.tool(name="look_up", cost="$0.01")
        def look_up(query):
            return query

        with pytest.raises(PolicyDenied, match="classify failed: ConfigError"):
            look_up({1: BAD, "int:1": "ls"})
