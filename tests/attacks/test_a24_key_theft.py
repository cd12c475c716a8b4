"""Row 24: the key leaves the environment and shows up nowhere else: no child, no pickle, no repr, no traceback."""

import base64
import copy
import json
import os
import pickle
import subprocess
import sys
import traceback

import httpx
import pytest

from tests.support.merchant import Shop, client
from tests.support.refusals import fetch
from tests.support.structure import is_ours
from x402guard import ConfigError, Guard, GuardedTransport, LocalSigner, SettlementUncertain, SignerError
from x402guard.guard.settings import PRIVATE_KEY, load_settings

SECRET = "0x" + "c0ffee15" * 8
RAW = bytes.fromhex(SECRET[2:])
TRACES = (SECRET[2:], SECRET[2:].upper(), str(int(SECRET, 16)), repr(RAW)[2:-1], str(list(RAW))[1:-1])


def shows_key(text) -> list:
    text = text if isinstance(text, str) else text.decode("latin-1")
    return [trace for trace in (*TRACES, RAW.decode("latin-1")) if trace in text]


@pytest.fixture(autouse=True)
def place(monkeypatch, tmp_path):
    """An empty working directory, an environment with the key, and no other setting."""
    monkeypatch.chdir(tmp_path)
    for name in list(os.environ):
        if name.upper().startswith("X402GUARD_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("X402GUARD_LEDGER", "memory://")
    monkeypatch.setenv(PRIVATE_KEY, SECRET)
    return tmp_path


@pytest.fixture
def made():
    with Guard.from_env() as guard:
        yield guard


def test_a24_key_leaves_the_environment(made):
    assert made.context.payer == LocalSigner.from_key(SECRET).address
    assert not shows_key(json.dumps(dict(os.environ)))


def test_a24_child_process_env_lacks_the_key(made):
    script = "import json, os; print(json.dumps(dict(os.environ)))"
    seen = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert "X402GUARD_LEDGER" in seen
    assert PRIVATE_KEY not in seen
    assert not shows_key(seen)


@pytest.mark.parametrize("name", ["x402guard_private_key", "X402Guard_Private_Key"])
def test_a24_key_under_a_name_in_other_letters_is_not_read_and_left_behind(monkeypatch, name):
    monkeypatch.delenv(PRIVATE_KEY)
    monkeypatch.setenv(name, SECRET)
    try:
        with Guard.from_env() as guard:
            read = guard.context.payer is not None
    except ConfigError:
        return  # a name we do not take is said so
    assert not read or name not in os.environ


BROKEN = {
    "policy": {"X402GUARD_POLICY__PER_PAYMENT_CAP": "abc"},
    "unknown name": {"X402GUARD_POLIZY": "1"},
    "ledger": {"X402GUARD_LEDGER": "nonsense://"},
    "asset": {"X402GUARD_ASSETS": '[{"network":"x","address":"y","symbol":"z","decimals":6,"name":"n","version":"1"}]'},
    "not JSON": {"X402GUARD_ASSETS": "{"},
    "budget": {"X402GUARD_BUDGET": "-1"},
    "chains": {"X402GUARD_CHAINS": '{"nowhere": "http://127.0.0.1:1"}'},
    "key with a digit too many": {PRIVATE_KEY: SECRET + "7"},
    "key with a letter that is none": {PRIVATE_KEY: SECRET + "zz"},
}


def _library_locals(error) -> str:
    """What a crash reporter would send of the library's own frames, the whole chain of causes along."""
    told, seen = [str(error), repr(error)], set()
    stack = [traceback.TracebackException.from_exception(error, capture_locals=True)]
    while stack:
        part = stack.pop()
        if part is None or id(part) in seen:
            continue
        seen.add(id(part))
        stack += [part.__cause__, part.__context__]
        told.extend(part.format_exception_only())
        for frame in part.stack:
            if is_ours(frame.filename):
                told.extend((frame.locals or {}).values())
    assert len(told) > 3, "no frame of the library was looked at"
    return "\n".join(told)


def _config_error() -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        Guard.from_env().close()
    return caught.value


@pytest.mark.parametrize("name", BROKEN)
def test_a24_traceback_of_a_wrong_setting_never_shows_the_key(monkeypatch, name):
    for setting, value in BROKEN[name].items():
        monkeypatch.setenv(setting, value)
    assert not shows_key(_library_locals(_config_error()))


@pytest.mark.parametrize("name", BROKEN)
def test_a24_key_leaves_the_environment_also_where_a_setting_is_wrong(monkeypatch, name):
    for setting, value in BROKEN[name].items():
        monkeypatch.setenv(setting, value)
    _config_error()
    assert PRIVATE_KEY not in os.environ


@pytest.mark.parametrize("key", [SECRET + "7", SECRET + "zz", SECRET[:-1], RAW + b"\1", " " + SECRET + " 1"])
def test_a24_traceback_of_a_malformed_key_never_shows_it(key):
    with pytest.raises(ConfigError) as caught:
        LocalSigner.from_key(key)
    told = _library_locals(caught.value)
    assert SECRET[2:60] not in told
    assert not shows_key(told)


def test_a24_traceback_of_a_refused_signature_never_shows_the_key(made):
    with pytest.raises(SignerError) as caught:
        made.shell.signer.sign(None)
    assert not shows_key(_library_locals(caught.value))


def test_a24_traceback_of_a_failed_payment_never_shows_the_key(mode, made):
    def shop(request):
        if "payment-signature" in request.headers:
            raise httpx.ReadError("lost")
        return Shop()(request)

    async def answer(request):
        return shop(request)

    with made.session("s", budget="$1.00") as session, pytest.raises(SettlementUncertain) as caught:
        fetch(mode, session, shop if mode == "sync" else answer)
    assert not shows_key(_library_locals(caught.value))
    assert not shows_key(pickle.dumps(caught.value))


def test_a24_traceback_from_inside_the_signer_never_shows_the_key(made, monkeypatch):
    def broken(*_):
        raise RuntimeError("out of memory")

    monkeypatch.setattr("x402guard.kernel.evm.normalise_signature", broken)
    with made.session("s", budget="$1.00") as session, pytest.raises(SettlementUncertain) as caught:
        fetch("sync", session, Shop())
    assert not shows_key(_library_locals(caught.value))


def _things(guard):
    session = guard.session("s", budget="$1.00")
    http = client(session, Shop())
    return [guard, guard.shell, guard.shell.signer, guard.context, session, http, GuardedTransport(session)]


@pytest.mark.parametrize("act", [pickle.dumps, copy.copy, copy.deepcopy], ids=["pickle", "copy", "deepcopy"])
def test_a24_a_signer_is_never_pickled_or_copied(made, act):
    signer = made.shell.signer
    with pytest.raises(TypeError, match="cannot be pickled or copied"):
        act(signer)
    for holder in ([signer], {"signer": signer}, made.shell):
        if act is not copy.copy:
            with pytest.raises(TypeError):
                act(holder)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_a24_no_pickle_protocol_carries_the_key(made, protocol):
    for thing in _things(made):
        try:
            assert not shows_key(pickle.dumps(thing, protocol))
        except (TypeError, AttributeError, pickle.PicklingError) as refused:
            assert not shows_key(str(refused))


def test_a24_repr_and_vars_never_show_the_key(made):
    for thing in _things(made):
        assert not shows_key(repr(thing) + str(thing) + f"{thing!a}")
        assert not shows_key("".join(_inside(thing, depth=3)))


def _inside(thing, depth):
    """What a debugger prints of an object of ours or httpx's and of what it holds, some levels down."""
    if not type(thing).__module__.startswith(("x402guard", "httpx")):
        return
    values = dict(vars(thing)) if hasattr(thing, "__dict__") else {}
    for name in getattr(type(thing), "__slots__", ()):
        values[name] = getattr(thing, name, None)
    yield f"{values!r}"
    if depth:
        for value in values.values():
            yield from _inside(value, depth - 1)


def test_a24_the_settings_show_no_key_either():
    settings = load_settings()
    assert not shows_key(repr(settings) + str(settings) + str(vars(settings)) + settings.model_dump_json())
    assert not shows_key(json.dumps(settings.model_dump(), default=str))


def test_a24_the_report_and_the_ledger_file_hold_neither_key_nor_signature(place, monkeypatch):
    monkeypatch.setenv("X402GUARD_LEDGER", f"sqlite:///{place / 'spend.db'}")
    sent = []

    def shop(request):
        sent.extend(request.headers.get_list("payment-signature"))
        return httpx.Response(500) if sent else Shop()(request)

    with Guard.from_env() as guard, guard.session("s", budget="$1.00") as session:
        fetch("sync", session, shop)
        report = session.report()
        told = report.to_json() + report.to_text()
    stored = b"".join(path.read_bytes() for path in place.iterdir())
    signature = json.loads(base64.b64decode(sent[0]))["payload"]["signature"]
    for text in (told, stored.decode("latin-1")):
        assert not shows_key(text)
        assert signature[2:] not in text
        assert bytes.fromhex(signature[2:]).decode("latin-1") not in text
        assert sent[0] not in text
    assert (place / "spend.db").stat().st_mode & 0o077 == 0
