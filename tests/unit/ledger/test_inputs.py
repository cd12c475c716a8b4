"""Cycles of agents that wait for each other: found where none can go on, and only there."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from x402guard.ledger.inputs import Input, Wait, find_cycles, waits_of


def result(waiter, target, since_ms=10):
    return Wait(waiter, target, "result", since_ms)


def reply(waiter, target, since_ms=10):
    return Wait(waiter, target, "reply", since_ms)


def asked(*waits, read_ms=0):
    return {(each.target, each.waiter): Input(each.waiter, each.target, 1, "?", 5, read_ms) for each in waits}


def found(*waits, read_ms=0):
    inputs = asked(*(each for each in waits if each.awaits == "reply"), read_ms=read_ms)
    return [{each.waiter for each in cycle} for cycle in find_cycles(waits, inputs)]


def test_a_chain_is_no_cycle():
    assert found(result("a", "b"), result("b", "c"), reply("c", "d")) == []


def test_two_that_ask_each_other():
    assert found(reply("a", "b"), reply("b", "a")) == [{"a", "b"}]


def test_a_planner_whose_workers_ask_each_other_and_it():
    assert found(result("plan", "a"), reply("a", "b"), reply("b", "plan")) == [{"plan", "a", "b"}]


def test_a_question_to_who_waits_for_the_result_ends_that_wait():
    assert found(result("plan", "a"), reply("a", "plan")) == []


def test_who_read_the_question_after_it_began_to_wait_answers_in_another_task():
    one, other = reply("a", "b", 10), reply("b", "a", 10)
    assert found(one, other, read_ms=20) == []
    assert found(one, other, read_ms=10) == [{"a", "b"}]  # it read, and then it waited


def test_who_waits_for_several_goes_on_with_the_first_of_them():
    assert found(reply("a", "b"), reply("b", "a"), result("b", "free")) == []
    assert found(reply("a", "b"), reply("b", "a"), reply("b", "c"), reply("c", "b")) in ([{"a", "b"}], [{"b", "c"}])


def test_a_question_with_its_reply_holds_up_no_one():
    one, other = reply("a", "b"), reply("b", "a")
    inputs = asked(one, other)
    inputs["a", "b"] = Input("b", "a", 1, "?", 5, 6, replied_ms=7, reply="yes")
    assert find_cycles([one, other], inputs) == []


def test_a_call_of_a_process_that_has_ended_waits_no_more():
    row = {
        "waiter": "a",
        "target": "b",
        "calls": {"dead#1": ["result", 5], "here#2": ["reply", 9], "here#3": ["reply", 7]},
    }
    assert waits_of(row, "dead".__eq__) == [Wait("a", "b", "reply", 7)]
    assert waits_of(row, lambda _: True) == []


@given(st.sets(st.sampled_from(list(itertools.permutations("abcdef", 2))), max_size=10))
def test_it_agrees_with_a_search_by_hand(edges):
    """With unread questions alone, those are stuck who reach only others that wait."""
    waits = [reply(*edge) for edge in sorted(edges)]
    out = {name: {target for waiter, target in edges if waiter == name} for name in "abcdef"}
    stuck = {name for name in out if out[name]}
    while free := {name for name in stuck if out[name] - stuck}:
        stuck -= free
    cycles = find_cycles(waits, asked(*waits))
    assert bool(cycles) == bool(stuck)
    for cycle in cycles:
        assert {each.waiter for each in cycle} <= stuck
        assert [each.target for each in cycle] == [each.waiter for each in (*cycle[1:], cycle[0])]
    members = [each.waiter for cycle in cycles for each in cycle]
    assert len(members) == len(set(members))
