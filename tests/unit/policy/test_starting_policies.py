"""The three policies to start from: each is complete, takes changes, and is as strict as its name."""

import pytest

from tests.support.merchant import URL, Shop, accept, client, make_guard, required
from x402guard import ConfigError, LoopDetected, NeedsReview, Policy, PolicyDenied
from x402guard.frozen import replace

KINDS = {"careful": Policy.careful, "balanced": Policy.balanced, "permissive": Policy.permissive}


@pytest.mark.parametrize("kind", KINDS)
def test_each_takes_what_is_changed(kind):
    changed = KINDS[kind](max_steps=7, hosts={"seller.example"})
    assert (changed.max_steps, changed.hosts) == (7, frozenset({"seller.example"}))
    assert replace(changed, max_steps=KINDS[kind]().max_steps, hosts=None) == KINDS[kind]()
    with pytest.raises(TypeError, match="max_stepz"):
        KINDS[kind](max_stepz=7)
    with pytest.raises(ConfigError, match="max_steps"):
        KINDS[kind](max_steps=0)


def test_the_balanced_one_is_the_default():
    assert Policy.balanced() == Policy()


@pytest.mark.parametrize(
    ("kind", "cents", "refused"),
    [
        ("careful", 5, None), ("careful", 6, NeedsReview), ("careful", 11, PolicyDenied),
        ("balanced", 100, None), ("balanced", 101, PolicyDenied),
        ("permissive", 1000, None), ("permissive", 1001, PolicyDenied),
    ],
)  # fmt: skip
def test_a_payment_is_allowed_asked_about_or_refused(kind, cents, refused):
    shop = Shop(required(accept(cents * 10_000)))
    with make_guard(policy=KINDS[kind]()) as guard, guard.session("s", budget="$50.00") as session:
        if refused is None:
            assert client(session, shop).get(URL).status_code == 200
        else:
            with pytest.raises(refused):
                client(session, shop).get(URL)


@pytest.mark.parametrize(("kind", "most"), [("careful", 3), ("balanced", 10), ("permissive", 30)])
def test_an_equal_call_is_repeated_so_often(kind, most):
    with make_guard(policy=KINDS[kind]()) as guard, guard.session("s", budget="$50.00") as session:
        passed = 0
        for _ in range(30):
            try:
                session.charge("serp", "$0.001", arguments={"q": "Roe"})
            except LoopDetected:
                break
            passed += 1
        assert passed == most
