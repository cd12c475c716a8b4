"""How dangerous a tool is taken to be, by its name in any spelling; what comes of it; and what a hook may say of it."""

import pytest

from x402guard import Policy, Risk
from x402guard.kernel.rows import HoldKind, Nanos
from x402guard.policy import risk as risk_module
from x402guard.policy.judge import judge
from x402guard.policy.risk import DEFAULT_LEVELS, judge_risk
from x402guard.policy.verdicts import Subject
from x402guard.tools.arguments import readable

PLACE = "GET courts.example/opinion/42"


def tool(name, arguments=None):
    return Subject(HoldKind.TOOL, (name,), Nanos(0), arguments=readable(arguments))


def level(name, **risk):
    return Risk(**risk).level_of(tool(name))


def test_the_default_table_is_the_one_that_was_promised():
    sent = {pattern for pattern in DEFAULT_LEVELS if pattern.startswith("send_")}
    assert {"send_email_*", "send_sms_*", "send_usdc_*", "send_eth_*", "send_money_*", "send_tokens_*"} <= sent
    assert {DEFAULT_LEVELS[pattern] for pattern in sent} == {"HIGH"}
    assert {pattern: level for pattern, level in DEFAULT_LEVELS.items() if pattern not in sent} == {
        "search_*": "LOW",
        "get_*": "LOW",
        "list_*": "LOW",
        "post_webhook": "MEDIUM",
        "delete_*": "HIGH",
        "purge_*": "HIGH",
        "rm_*": "HIGH",
        "exec_*": "HIGH",
        "run_sql_*": "HIGH",
        "wire_*": "HIGH",
        "approve_*": "HIGH",
        "pay_*": "HIGH",
        "sign_*": "HIGH",
        "swap_*": "HIGH",
        "transfer_*": "HIGH",
        "withdraw_*": "HIGH",
        "drop_*": "CRITICAL",
        "truncate_*": "CRITICAL",
    }
    with pytest.raises(TypeError):
        DEFAULT_LEVELS["delete_*"] = "LOW"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("search_web", "LOW"),
        ("search", "LOW"),
        ("get_page", "LOW"),
        ("list_files", "LOW"),
        ("post_webhook", "MEDIUM"),
        ("serp", "MEDIUM"),
        ("forget_me", "MEDIUM"),
        ("research_web", "MEDIUM"),
        ("send_email_now", "HIGH"),
        ("crm.sendEmail", "HIGH"),
        ("crm.send_email.v2", "HIGH"),
        ("payInvoice", "HIGH"),
        ("payload_parse", "MEDIUM"),
        ("paypal_list", "MEDIUM"),
        ("send_usdc", "HIGH"),
        ("sendBTC", "HIGH"),
        ("send_solution", "MEDIUM"),
        ("send_message", "MEDIUM"),
        ("swapExactTokens", "HIGH"),
        ("approve_spender", "HIGH"),
        ("signTx", "HIGH"),
        ("sign_in", "MEDIUM"),
        ("sign_in/drop_table", "CRITICAL"),
        ("sign_up.delete_user", "HIGH"),
        ("sign_in_and_transfer_usdc", "HIGH"),
        ("signUpUser", "MEDIUM"),
        ("sign_in/sign_transaction", "HIGH"),
        ("sign_up_and_sign_payload", "HIGH"),
        ("signInAndSignTx", "HIGH"),
        ("sign_in_get_user", "MEDIUM"),
        ("sign_in_sign_up", "MEDIUM"),
        ("sign_into_wallet", "HIGH"),
        ("sign_up/users.delete", "HIGH"),
        ("signIn/admin/transfer", "HIGH"),
        ("sign_in__wallet__pay", "HIGH"),
        ("SignUp.accounts.delete", "HIGH"),
        ("design_page", "MEDIUM"),
        ("get_payments", "LOW"),
        ("list_transfers", "LOW"),
        ("dropbox", "MEDIUM"),
        ("deleted", "MEDIUM"),
        ("delete_user", "HIGH"),
        ("delete", "HIGH"),
        ("send_email", "HIGH"),
        ("send_sms", "HIGH"),
        ("drop_table", "CRITICAL"),
        ("drop", "CRITICAL"),
        ("truncate_table", "CRITICAL"),
    ],
)
def test_by_name(name, expected):
    assert level(name) == expected


@pytest.mark.parametrize(
    "name",
    [
        "deleteUser",
        "DeleteUser",
        "DELETE_USER",
        "delete-user",
        "delete user",
        "crm.delete_user",
        "crm.delete-user",
        "crm.deleteUser",
        "crm/delete_user",
        "crm:delete_user",
        "mcp__crm__delete_user",
        "gmail__send_email",
        "gmail.sendEmail",
        "sendEmail",
        "Send-SMS",
        " delete_user ",
        "get_tools__delete_all",
        "delete_files.get_info",
    ],
)
def test_in_any_spelling_and_whoever_serves_it(name):
    assert level(name) == "HIGH"


@pytest.mark.parametrize("name", ["dropTable", "DROP TABLE", "db__drop-table", "sql.truncateTable", "get.drop_all"])
def test_in_any_spelling_what_never_runs(name):
    assert level(name) == "CRITICAL"


@pytest.mark.parametrize(
    ("pattern", "name"),
    [
        ("wipe_*", "wipe_disk"),
        ("wipe_*", "wipeDisk"),
        ("wipe_*", "os.wipe-disk"),
        ("wipeDisk", "wipe_disk"),
        ("os.wipe_disk", "os.wipe_disk"),
        ("WIPE_*", "wipe_disk"),
        ("*_disk", "wipeDisk"),
        ("*", "anything"),
        ("wipeDisk*", "wipeDiskNow"),
        ("wipeDisk*", "wipe_disk_now"),
        ("wipe-*", "wipe-disk"),
        ("wipe-*", "wipe_disk"),
        ("gmail__*", "gmail__post"),
        ("crm.*", "crm.post"),
        ("crm.wipe-*", "crm.wipe-all"),
        ("crm/*", "crm/post"),
        ("gmail__*", "gmail.post"),
    ],
)
def test_a_pattern_of_the_owners_in_any_spelling_too(pattern, name):
    assert level(name, levels={pattern: "CRITICAL"}) == "CRITICAL"


def test_the_owners_patterns_go_before_the_table_and_the_strictest_of_them_holds():
    assert level("delete_draft", levels={"delete_draft": "LOW"}) == "LOW"
    assert level("delete_user", levels={"delete_draft": "LOW"}) == "HIGH"
    assert level("get_key", levels={"get_*": "MEDIUM", "get_key": "CRITICAL", "*_key": "HIGH"}) == "CRITICAL"


def test_payments_and_llm_calls_are_low_unless_a_pattern_names_them():
    payment = Subject(HoldKind.PAYMENT, (PLACE,), Nanos(1))
    call = Subject(HoldKind.LLM, ("POST api.example/v1/chat/completions", "drop_gpt"), Nanos(1))
    for subject in (payment, call):
        assert Risk().level_of(subject) == "LOW"
    assert Risk(levels={"get Courts.example/*": "HIGH"}).level_of(payment) == "HIGH"
    assert Risk(levels={"GET courts.example/*": "HIGH"}).level_of(call) == "LOW"
    assert Risk(levels={"drop_*": "HIGH"}).level_of(call) == "HIGH"


@pytest.mark.parametrize(
    ("name", "approvers", "action", "people"),
    [
        ("get_page", 1, "allow", 0),
        ("serp", 1, "allow", 0),
        ("delete_user", 1, "ask", 1),
        ("delete_user", 3, "ask", 1),
        ("drop_table", 1, "deny", 0),
        ("drop_table", 2, "ask", 2),
        ("drop_table", 3, "ask", 3),
    ],
)
def test_what_comes_of_a_level(name, approvers, action, people):
    verdict = judge_risk(Risk(approvers=approvers), tool(name))
    assert (verdict.action, verdict.approvers) == (action, people)
    assert verdict.rule == ("" if action == "allow" else "risk")
    assert verdict.level == level(name)


@pytest.mark.parametrize("said", ["LOW", "MEDIUM", "HIGH", "CRITICAL", None])
@pytest.mark.parametrize(("name", "own"), [("get_page", 0), ("serp", 1), ("delete_user", 2), ("drop_table", 3)])
def test_a_hook_raises_and_never_lowers(name, own, said):
    levels = ["LOW", "MEDIUM", "HIGH", "CRITICAL"]
    higher = max(own, -1 if said is None else levels.index(said))
    assert judge_risk(Risk(classify=lambda _tool, _arguments: said), tool(name)).level == levels[higher]


def test_a_hook_is_shown_the_tool_and_its_arguments():
    shown = []
    risk = Risk(classify=lambda *given: shown.append(given))
    judge_risk(risk, tool("crm.Post", {"to": "all"}))
    judge_risk(risk, tool("post"))
    judge_risk(risk, Subject(HoldKind.PAYMENT, (PLACE,), Nanos(1)))
    assert shown == [("crm.Post", {"to": "all"}), ("post", None)]


@pytest.mark.parametrize("said", ["high", "", 3, 0, False, True, ["HIGH"], {"level": "HIGH"}], ids=repr)
def test_a_hook_that_says_no_level_stops_the_tool(said):
    verdict = judge_risk(Risk(classify=lambda _tool, _arguments: said, approvers=2), tool("get_page"))
    assert (verdict.action, verdict.rule) == ("deny", "risk")


def test_a_hook_that_fails_stops_the_tool_and_tells_nothing_of_its_error():
    def classify(_tool, arguments):
        raise KeyError(arguments["secret"])

    verdict = judge_risk(Risk(classify=classify), tool("get_page", {"secret": "hunter2"}))
    assert (verdict.action, verdict.rule) == ("deny", "risk")
    assert "KeyError" in verdict.reason
    assert "hunter2" not in verdict.reason


def test_no_risk_is_no_question():
    assert judge_risk(None, tool("drop_table")).action == "allow"
    assert judge(Policy(risk=None), tool("drop_table")).action == "allow"
    assert judge(Policy(), tool("drop_table")).action == "deny"


@pytest.mark.parametrize("tool", ["ｄｒｏｐ_table", "ＤＲＯＰ＿ＴＡＢＬＥ", "dröp_table"])
def test_letters_in_another_width_or_with_marks_are_the_letters_that_they_are(tool):
    assert Risk().level_of(Subject(HoldKind.TOOL, (tool,), Nanos(0))) == "CRITICAL"


@pytest.mark.parametrize("tool", ["dеlete_user", "drоp_table", "sеarch_web"])  # each has one letter of another alphabet
def test_a_name_that_mixes_alphabets_needs_a_person(tool):
    assert Risk().level_of(Subject(HoldKind.TOOL, (tool,), Nanos(0))) == "HIGH"


@pytest.mark.parametrize("tool", ["検索", "поиск", "suche_gerät"])
def test_a_name_of_one_alphabet_is_what_it_is(tool):
    assert Risk().level_of(Subject(HoldKind.TOOL, (tool,), Nanos(0))) == "MEDIUM"


def test_a_level_is_worked_out_once_for_a_name(monkeypatch):
    asked = []
    monkeypatch.setattr(risk_module, "matches_name", lambda pattern, name, within: asked.append(name) or False)
    risk = Risk(levels={"wipe_*": "CRITICAL"})
    subject = Subject(HoldKind.TOOL, ("erase",), Nanos(1))
    assert {risk.level_of(subject) for _ in range(50)} == {"MEDIUM"}
    first = len(asked)
    assert risk.level_of(Subject(HoldKind.TOOL, ("other",), Nanos(1))) == "MEDIUM"
    assert len(asked) == 2 * first  # each name once
    for number in range(3_000):
        risk.level_of(Subject(HoldKind.TOOL, (f"tool-{number}",), Nanos(1)))
    assert len(risk._known) <= 1_024
