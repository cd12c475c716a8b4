"""What a person has allowed is what runs, once for each call; and an object that cannot be read crashes no call."""

import dataclasses

import anyio
import pytest
from pydantic import BaseModel, Field, field_serializer

from tests.support.merchant import make_guard
from x402guard import ApprovalDenied
from x402guard.adapters.mcp_client import GuardedMCPSession


class Changing:
    """An approver who says yes, while the caller changes what the person has read."""

    def __init__(self, ids):
        self.ids, self.seen = ids, []

    def __call__(self, request):
        self.seen.append({name: list(value) for name, value in request.arguments.items() if isinstance(value, list)})
        self.ids[:] = ["1", "2", "3"]
        return True


OPTIONS = {
    "free": {"cost": "$0"},
    "with a cost": {"cost": "$0.01"},
    "tokens alone": {"mode": "raw", "render": lambda result, _mode: str(result)},
}


@pytest.mark.parametrize("readable", [True, False], ids=["readable", "with an object"])
@pytest.mark.parametrize("options", OPTIONS)
def test_arguments_that_change_while_a_person_thinks_do_not_run(options, readable):
    ids, ran = ["7"], []
    approver = Changing(ids)
    with make_guard(approver=approver) as guard, guard.session("s", budget="$1.00", tokens=5_000) as session:

        @session.tool(**OPTIONS[options])
        def delete_user(ids, context=None):
            ran.append(list(ids))

        with pytest.raises(ApprovalDenied, match="its arguments were changed while an approver was asked"):
            delete_user(ids, None if readable else object())
        assert (ran, session.spent, session.held) == ([], 0, 0)
    assert approver.seen == [{"ids": ["7"]}]


def test_a_tool_of_a_server_gets_what_the_person_has_seen():
    ids, ran = ["7"], []

    class Server:
        server_info = None

        async def call_tool(self, _name, arguments, **_options):
            ran.append(arguments)
            return type("Result", (), {"is_error": False, "content": [], "meta": None, "structured_content": None})()

    async def go():
        with make_guard(approver=Changing(ids)) as guard, guard.session("s", budget="$1.00") as session:
            await GuardedMCPSession(Server(), session, server="crm").call_tool("delete_user", {"ids": ids})

    anyio.run(go)
    assert ran == [{"ids": ["7"]}]


class Delete:
    def __init__(self, ran):
        self.ran = ran

    def delete_row(self, row):
        self.ran.append(row)


class Failing(BaseModel):
    name: str = "x"

    @field_serializer("name")
    def _fails(self, _value):
        raise RuntimeError


@dataclasses.dataclass
class Unset:
    name: str = dataclasses.field(init=False)


class Odd:
    def __getattr__(self, name):
        raise RuntimeError(name)


@pytest.mark.parametrize("value", [Failing(), Unset(), Odd()], ids=["model", "dataclass", "object"])
def test_an_object_that_cannot_be_read_makes_a_call_not_comparable(value):
    ran, seen = [], []
    approver = lambda request: seen.append(request.arguments) or True
    with make_guard(approver=approver) as guard, guard.session("s", budget="$1.00") as session:

        @session.tool(cost="$0.01")
        def delete_row(row):
            ran.append(row)

        delete_row(value)
    assert len(ran) == 1
    assert seen == [{"row": f"<{type(value).__qualname__}>"}]


@dataclasses.dataclass
class Login:
    user: str
    password: str = dataclasses.field(repr=False)


class Token(BaseModel):
    user: str
    token: str = Field(repr=False)


@pytest.mark.parametrize(
    "value", [Login("ada", "s3cret"), Token(user="ada", token="s3cret")], ids=["dataclass", "model"]
)
def test_what_a_class_does_not_show_is_shown_to_no_approver(value):
    seen = []
    approver = lambda request: seen.append(request.arguments) or True
    with make_guard(approver=approver) as guard, guard.session("s", budget="$1.00") as session:
        session.tool(cost="$0.01")(Delete([]).delete_row)(value)
    assert seen == [{"row": {"user": "ada"}}]


def test_a_reason_is_one_line_of_the_log(caplog):
    with make_guard() as guard, guard.session("s", budget="$1.00") as session:
        session.trip("odd\nCRITICAL root: all is well\x1b[2J")
    assert all("\n" not in record.getMessage() and "\x1b" not in record.getMessage() for record in caplog.records)
    assert "odd" in caplog.text
