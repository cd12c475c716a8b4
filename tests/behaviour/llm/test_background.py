"""A response in the background costs what its poll shows, in any process; until then its ceiling is held."""

import httpx
import pytest

from tests.support.ledger import Clock
from tests.support.merchant import client, make_guard
from x402guard import Metering
from x402guard.stores import open_store

URL = "https://api.openai.com/v1/responses"
ASKED = {"model": "gpt-5.5", "input": "hi", "max_output_tokens": 2_000, "background": True, "store": True}
QUEUED = {
    "id": "resp_1",
    "object": "response",
    "status": "queued",
    "background": True,
    "output": [],
    "usage": None,
    "model": "gpt-5.5",
}
USED = {"input_tokens": 100, "output_tokens": 200, "total_tokens": 300}  # 100 x 5,000 + 200 x 30,000
DONE = {**QUEUED, "status": "completed", "usage": USED}
BILL = 6_500_000


def shows(*answers):
    left = list(answers)

    def server(request):
        if request.method == "POST":
            return httpx.Response(200, json=QUEUED)
        return httpx.Response(200, json=left.pop(0) if len(left) > 1 else left[0])

    return server


def spent(session):
    return int(session.spent * 10**9), int(session.held * 10**9)


def test_the_poll_captures_what_was_used_once_and_gives_the_rest_back(ledger_url):
    with make_guard(ledger_url) as guard, guard.session("s", budget="$5.00") as session:
        http = client(session, shows({**QUEUED, "status": "in_progress"}, DONE))
        receipt = http.post(URL, json=ASKED).extensions["x402guard"]
        assert (receipt.state, receipt.note.partition(";")[0]) == ("held", "it runs in the background")
        booked, held = spent(session)
        assert (booked, held > BILL) == (0, True)
        http.get(f"{URL}/resp_1")
        assert spent(session) == (0, held)
        for _ in range(3):
            assert http.get(f"{URL}/resp_1").json()["usage"] == USED
        assert spent(session) == (BILL, 0)
        assert http.get(f"{URL}/resp_2").status_code == 200  # of another client: nothing to capture


def test_another_process_and_session_may_poll(tmp_path):
    url = f"sqlite:///{tmp_path / 'ledger.db'}"
    with make_guard(url) as first, make_guard(url) as second:
        creates, polls = first.session("creates", budget="$5.00"), second.session("polls", budget="$5.00")
        client(creates, shows(DONE)).post(URL, json=ASKED)
        receipt = client(polls, shows(DONE)).get(f"{URL}/resp_1").extensions["x402guard"]
        assert (receipt.state, receipt.usage) == ("captured", {"input_tokens": 100, "output_tokens": 200})
        assert (spent(creates), spent(polls)) == ((BILL, 0), (0, 0))


def test_one_that_is_never_polled_costs_its_ceiling_in_the_end():
    clock = Clock()
    with make_guard(open_store("memory://", clock_ms=clock)) as guard, guard.session("s", budget="$5.00") as session:
        http = client(session, shows(DONE))
        http.post(URL, json=ASKED)
        _, held = spent(session)
        clock.tick(7 * 3_600)
        session.charge("other", "$0.01")
        http.get(f"{URL}/resp_1")
        assert spent(session)[0] >= held


@pytest.mark.parametrize("status", ["failed", "incomplete", "cancelled"])
def test_what_one_that_ended_early_has_used_is_captured(status):
    with make_guard() as guard, guard.session("s", budget="$5.00") as session:
        http = client(session, shows({**DONE, "status": status}))
        http.post(URL, json=ASKED)
        http.get(f"{URL}/resp_1")
        assert spent(session) == (BILL, 0)


def test_a_tool_that_ran_in_the_background_has_its_allowance():
    ran = {**DONE, "output": [{"type": "code_interpreter_call", "id": "c", "status": "completed"}]}
    asked = {**ASKED, "tools": [{"type": "code_interpreter", "container": {"type": "auto"}}]}
    with (
        make_guard(metering=Metering(allowances={"code_execution": "$0.03"})) as guard,
        guard.session("s", budget="$5.00") as session,
    ):
        http = client(session, shows(ran))
        http.post(URL, json=asked)
        http.get(f"{URL}/resp_1")
        assert spent(session) == (BILL + 30_000_000, 0)


def test_a_response_that_is_whole_at_once_is_billed_at_once():
    with make_guard() as guard, guard.session("s", budget="$5.00") as session:
        client(session, lambda _: httpx.Response(200, json=DONE)).post(URL, json=ASKED)
        assert spent(session) == (BILL, 0)


def test_a_gateway_of_the_owner_with_a_path_is_polled_at_its_own_address():
    base = "https://gateway.example/openai/v1"
    metering = Metering(endpoints={base: "openai"})
    with make_guard(metering=metering) as guard, guard.session("s", budget="$5.00") as session:
        http = client(session, shows(DONE))
        http.post(f"{base}/responses", json=ASKED)
        http.get(f"{base}/responses/resp_1")
        assert spent(session) == (BILL, 0)


def test_a_poll_that_streams_is_not_held_back():
    taken = []

    def events():
        for event in (b"data: {}\n\n", b"data: [DONE]\n\n"):
            taken.append(event)
            yield event

    def server(request):
        if request.method == "POST":
            return httpx.Response(200, json=QUEUED)
        return httpx.Response(200, headers={"content-type": "text/event-stream"}, content=events())

    with make_guard() as guard, guard.session("s", budget="$5.00") as session:
        http = client(session, server)
        http.post(URL, json=ASKED)
        held = spent(session)
        with http.stream("GET", f"{URL}/resp_1?stream=true") as response:
            assert next(response.iter_raw()) == b"data: {}\n\n"
            assert len(taken) == 1
        assert spent(session) == held
