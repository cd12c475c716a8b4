"""The messages of a delegation: what they take, what they refuse by its field, and the schemas that the docs export."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from x402guard import ConfigError, TaskRequest, TaskResult
from x402guard.money import nanos_to_decimal

DOCS = Path(__file__).parents[3] / "docs" / "reference"
REQUEST = {"task_type": "research", "payload": {"topic": "tides"}, "budget": "$0.40", "deadline": 1_800_000_000}
RESULT = {
    "request_id": "t_1", "responder_id": "worker", "status": "completed", "output": {}, "cost": "$0.1", "tokens": 1,
}  # fmt: skip
PAYEE = "0x209693Bc6afc0C5328bA36FaF03C514EF312287C"


def schema_of(model):
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **model.model_json_schema(mode="serialization"),
    }


@pytest.mark.parametrize(("name", "model"), [("task-request", TaskRequest), ("task-result", TaskResult)])
def test_the_docs_have_the_schema(name, model):
    written = json.loads((DOCS / f"{name}.schema.json").read_text())
    assert written == schema_of(model)
    assert set(written["required"]) == set(model.model_fields)


plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**9), 10**9)
    | st.text(alphabet=st.characters(exclude_categories=["Cs"])),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("abc"), inner, max_size=3),
    max_leaves=8,
)


REQUESTS, RESULTS = (Draft202012Validator(schema_of(kind)) for kind in (TaskRequest, TaskResult))


@pytest.mark.long
@given(
    plain,
    st.integers(0, 10**18),
    st.none() | st.lists(st.sampled_from(["search", "search_*", "sum"]), max_size=3),
    st.booleans(),
)
def test_a_request_goes_through_json_and_fits_its_schema(payload, nanos, tools, structured):
    request = TaskRequest(
        **{**REQUEST, "payload": payload, "budget": nanos_to_decimal(nanos)},
        allowed_tools=tools,
        allowed_payees=[PAYEE],
        structured_output=structured,
    )
    assert TaskRequest.read(request.to_json()) == request
    REQUESTS.validate(request.to_dict())


@given(
    st.sampled_from(["completed", "partial"]), plain.filter(lambda each: each is not None), st.none() | st.floats(0, 1)
)
def test_a_result_goes_through_json_and_fits_its_schema(status, output, confidence):
    result = TaskResult(**{**RESULT, "status": status, "output": output, "confidence": confidence})
    assert TaskResult.read(result.to_json()) == result
    RESULTS.validate(result.to_dict())


HUGE = 10**5000

WRONG_REQUESTS = [
    ("budget", 0.4), ("budget", "much"), ("budget", "-1"), ("budget", None), ("budget", True), ("budget", "$1e-12"),
    ("deadline", "soon"), ("deadline", None), ("deadline", -1), ("deadline", 10**15), ("deadline", 1.5),
    ("payload", object()), ("payload", {"a": float("nan")}), ("payload", {1: 2}), ("payload", "\ud800"),
    ("payload", ("a",)), ("payload", "x" * 70_000), ("payload", b"x"),
    ("allowed_tools", "search"), ("allowed_tools", [1]), ("allowed_tools", ["two words"]), ("allowed_tools", {"a": 1}),
    ("allowed_tools", ["a"] * 201), ("allowed_hosts", ["https://x.example/y"]), ("allowed_hosts", [""]),
    ("allowed_payees", ["0x1"]), ("allowed_payees", [None]),
    ("token_budget", 0), ("token_budget", True), ("token_budget", "5"), ("token_budget", 10**16),
    ("task_type", ""), ("task_type", " "), ("task_type", "a\nb"), ("task_type", "x" * 201), ("task_type", None),
    ("request_id", ""), ("request_id", 3), ("issuer_id", None), ("structured_output", "yes"), ("withheld", "x"),
    ("withheld", ["topic"]), ("withheld", [""]), ("task_type", "wallet"), ("issuer_id", "a\nb"),
    ("allowed_tools", ["\ud800"]), ("allowed_tools", ["x" * 201]), ("allowed_tools", ["a\x1b"]), ("token_budget", HUGE),
    ("deadline", HUGE), ("deadline", True),
]  # fmt: skip


@pytest.mark.parametrize(
    ("field", "value"), WRONG_REQUESTS, ids=lambda each: str(each)[:20] if each != HUGE else "huge"
)
def test_a_wrong_field_of_a_request_is_named(field, value):
    with pytest.raises(ConfigError, match=f"^{field}: ") as error:
        TaskRequest(**{**REQUEST, field: value})
    assert "tides" not in str(error.value)
    assert len(str(error.value)) < 300


WRONG_RESULTS = [
    ("status", "done"), ("status", None), ("output", None), ("output", {1: 2}), ("error", "why"), ("error", 5),
    ("cost", 0.1), ("cost", None), ("tokens", -1), ("tokens", 1.0), ("tokens", "1"), ("request_id", None),
    ("confidence", 2), ("confidence", -0.1), ("confidence", True), ("confidence", "0.9"), ("confidence", float("nan")),
    ("responder_id", ""),
]  # fmt: skip


@pytest.mark.parametrize(("field", "value"), WRONG_RESULTS, ids=lambda each: str(each)[:20])
def test_a_wrong_field_of_a_result_is_named(field, value):
    with pytest.raises(ConfigError, match=f"^{field}: "):
        TaskResult(**{**RESULT, field: value})


def test_what_failed_says_why():
    with pytest.raises(ConfigError, match=r"^error: it is missing"):
        TaskResult(**{**RESULT, "status": "failed"})
    failed = {**RESULT, "status": "failed", "error": "no source"}
    assert TaskResult(**{**failed, "output": None}).error == "no source"
    with pytest.raises(ConfigError, match=r"^output: a task that has failed has none"):
        TaskResult(**failed)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("{", "TaskResult: it cannot be read"),
        ("[]", "TaskResult: it is a list"),
        (7, "TaskResult: it is a int"),
        ('{"request_id": "a", "request_id": "b"}', "TaskResult: it cannot be read: a key appears twice"),
        ("{}", "request_id: it is missing in the TaskResult"),
        ("[" * 100_000, "TaskResult: it cannot be read: nested too deeply"),
    ],
)
def test_what_is_no_message_is_refused(text, why):
    with pytest.raises(ConfigError, match=f"^{why}"):
        TaskResult.read(text)


def test_another_field_is_refused():
    with pytest.raises(ConfigError, match=r"^scope: TaskRequest has no such field"):
        TaskRequest(**REQUEST, scope="all")
    with pytest.raises(ConfigError, match=r"^budget: it is missing in the TaskRequest"):
        TaskRequest(task_type="a", payload=1, deadline=1)


def test_what_a_log_shows_has_no_payload_and_no_output():
    assert "tides" not in f"{TaskRequest(**REQUEST)!r} {TaskRequest(**REQUEST)}"
    assert "secret" not in f"{TaskResult(**{**RESULT, 'output': 'secret'})!r}"
