"""What is cut out of other libraries' log records, in every shape it comes in, and what is left of them."""

import importlib.util
import logging
import logging.config
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

import x402guard.http.redaction as module
from tests.support.merchant import make_guard
from tests.support.payment_secrets import everything_logged
from x402guard import ConfigError, GuardedTransport, Webhook
from x402guard.http.redaction import LOGGERS, REDACTED, RedactingFilter, bare_url, hide_url, redact_logs, redacted

HEADERS = [
    "PAYMENT-SIGNATURE",
    "X-PAYMENT",
    "PAYMENT-RESPONSE",
    "X-PAYMENT-RESPONSE",
    "Authorization",
    "Proxy-Authorization",
    "x-api-key",
    "api-key",
    "x-goog-api-key",
    "Cookie",
    "Set-Cookie",
    "x402guard-signature",
]
SECRET = "s3cret-Value/of=it+"
SHAPES = {
    "pairs": lambda name: f"headers=[('host', 'x'), ({name!r}, {SECRET!r}), ('accept', '*/*')] end",
    "byte pairs": lambda name: f"[(b'host', b'x'), ({name.encode()!r}, {SECRET.encode()!r}), (b'accept', b'*/*')] end",
    "lists": lambda name: f'[["host", "x"], ["{name}", "{SECRET}"], ["accept", "*/*"]] end',
    "dict": lambda name: f"{ {'host': 'x', name: SECRET, 'accept': '*/*'} } end",
    "JSON in a repr": lambda name: repr(f'"host": "x", "{name}": "{SECRET}", "accept": "*/*"') + " end",
    "hpack adding": lambda name: f"Adding {name.encode()!r}={SECRET.encode()!r} to the table, accept end",
    "hpack evicting": lambda name: f"Evicting {name.encode()!r}: {SECRET.encode()!r} from the accept header table end",
    "h2 objects": lambda name: f"Header(name={name!r}, value={SECRET!r}), Header('accept') end",
    "a quote in it": lambda name: f"[({name!r}, {SECRET + chr(39) + SECRET!r}), ('accept', '')] end",
    "both quotes in it": lambda name: f"[({name!r}, {SECRET + chr(39) + chr(34) + SECRET!r}), ('accept', '')] end",
}


@pytest.mark.one_in(5)
@pytest.mark.parametrize("case", [str.lower, str.upper, str], ids=["lower", "upper", "as written"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", HEADERS)
def test_a_header_is_cut_in_every_shape_and_what_stands_around_it_is_left(name, shape, case):
    text = SHAPES[shape](case(name))
    assert SECRET in text
    shown = redacted(text)
    assert SECRET not in shown
    assert REDACTED in shown
    assert case(name) in shown
    assert "accept" in shown
    assert shown.endswith("end")


LINES = {
    "lines": "GET / HTTP/1.1\r\n{}: {}\r\nAccept: all\r\n",
    "bytes on the wire": repr(b"GET / HTTP/1.1\r\n{}: {}\r\nAccept: all\r\n"),
    "websockets": "> {}: {}\n> Accept: all",
    "cut off": "headers: [('{}', '{}",
}


@pytest.mark.parametrize("shape", LINES)
@pytest.mark.parametrize("name", HEADERS)
def test_a_header_line_is_cut_to_its_end_and_the_next_is_left(name, shape):
    value = f'Digest user="{SECRET}", response="{SECRET}"'
    shown = redacted(LINES[shape].replace("{}", name, 1).replace("{}", value, 1))
    assert SECRET not in shown
    assert name in shown
    assert ("Accept: all" in shown) == (shape != "cut off")


PAYMENT = "eyJ4NDAyVmVyc2lvbiI6Mn0" + "Ab3" * 40
BARE = {"base64": PAYMENT, "hex": "ab" * 65, "0x": "0x" + "AB" * 65}


@pytest.mark.parametrize("kind", BARE)
def test_what_looks_like_a_payment_is_cut_wherever_it_stands(kind):
    assert redacted(f"retrying with {BARE[kind]} now") == f"retrying with {REDACTED} now"


@pytest.mark.parametrize(
    "text",
    [
        f"[(b'payment-required', b'{PAYMENT}')]",  # an offer is public
        f"payment-required: {PAYMENT}",
        "transaction 0x" + "ab" * 32 + " of hold " + "cd" * 32,
        "connect_tcp.started host='127.0.0.1' port=8402 timeout=5.0",
        "send_request_headers.started request=<Request [b'POST']>",
        "Encoding 33 with 7 bits",
        "which one? nobody knows / either way",
    ],
)
def test_what_is_no_secret_stays_as_it_is(text):
    assert redacted(text, "hpack.hpack") == text


@pytest.mark.parametrize(
    "text",
    [
        "Encoded header block to b'plain'",
        "Decoding b'AbC12'",
        "Encoded header block to bytearray(b'AbC12')",
        "Something new b'AbC12\\x9a\\x01' said",
    ],
)
def test_a_compressed_block_is_dropped_whole(text):
    shown = redacted(text, "hpack.hpack")
    assert "AbC12" not in shown
    assert "plain" not in shown
    assert REDACTED in shown
    assert redacted(text, "httpx") == text  # in the logs of others these are words


URLS = {
    "https://x.example/a/b?token=T0KEN": f"https://x.example/a/b?{REDACTED}",
    "https://x.example?token=T0KEN#T0KEN": f"https://x.example?{REDACTED}",
    "https://x.example/a#T0KEN": "https://x.example/a",
    "https://me:T0KEN@x.example:8443/a": "https://x.example:8443/a",
    "wss://x.example/a?T0KEN": f"wss://x.example/a?{REDACTED}",
    "HTTPS://x.example/a?q='T0KEN'&b=(T0KEN),T0KEN": f"https://x.example/a?{REDACTED}",
    "http://[::1]:80/a?T0KEN": f"http://[::1]:80/a?{REDACTED}",
    "http://[::1/a?T0KEN": REDACTED,
    "https://x.example/a/b": "https://x.example/a/b",
}


@pytest.mark.parametrize("url", URLS)
@pytest.mark.parametrize("around", ["GET {} now", "URL('{}')", 'for "{}", again'])
def test_a_urls_query_fragment_and_credentials_are_cut(url, around):
    assert redacted(around.format(url)) == around.format(URLS[url])


@pytest.mark.parametrize("text", ['"POST /a/b?token=T0KEN HTTP/1.1" 200', "Adding b':path'=b'/a/b?token=T0KEN' to"])
def test_a_request_targets_query_is_cut(text):
    assert redacted(text) == text.replace("token=T0KEN", REDACTED)


@pytest.fixture
def hidden(monkeypatch):
    """Nothing is hidden yet, and nothing stays so."""
    monkeypatch.setattr(module, "_HIDDEN", module._HiddenUrls())
    return hide_url


KEYED = [
    "https://node.example/v3/0123456789abcdef",
    "https://node.example/v3/0123456789abcdef/",
    "https://node.example/?key=0123456789abcdef",
    "https://user:0123456789abcdef@node.example/rpc",
    "https://node.example/short#0123456789abcdef",
    "https://NODE.example/v3/01234567%389abcdef",
]


@pytest.mark.parametrize("url", KEYED)
def test_a_hidden_url_is_shown_as_scheme_and_host(hidden, url):
    assert hidden(url) == "https://node.example"
    assert redacted(f"POST {url} HTTP/1.1") == "POST https://node.example HTTP/1.1"
    assert redacted(f"{url}/more") == "https://node.example"
    assert redacted("https://other.example/v3/x") == "https://other.example/v3/x"


def test_a_hidden_urls_parts_are_hidden_on_their_own(hidden):
    hidden("https://hooks.example/services/T012/B345/abcdefghijklmnop?sig=QRSTUVWXYZabcdef")
    for text in (
        'https://hooks.example:443 "POST /services/T012/B345/abcdefghijklmnop HTTP/1.1" 200',
        "Adding b':path'=b'/services/T012/B345/abcdefghijklmnop' to the table",
        "the token abcdefghijklmnop was refused",
        "bad signature QRSTUVWXYZabcdef",
    ):
        shown = redacted(text)
        assert not re.search("abcdefghijklmnop|T012|QRSTUVWXYZabcdef", shown), shown
        assert len(shown) > 20


def test_a_hidden_short_path_is_no_host(hidden):
    hidden("http://127.0.0.1:9/x")
    assert redacted("GET https://x.example/a now") == "GET https://x.example/a now"


def test_a_hidden_short_path_is_no_part_of_others(hidden):
    hidden("http://127.0.0.1:8545/v1")
    assert redacted("POST /v1 HTTP/1.1") == f"POST {REDACTED} HTTP/1.1"
    text = "https://api.example/v1/chat and https://api.example/v1 and /v1/models"
    assert redacted(text) == text


@pytest.mark.parametrize("url", ["", "nonsense", "http://[", "/path-only-that-is-long", "http://"])
def test_what_is_no_url_is_hidden_whole(hidden, url):
    assert hidden(url) == bare_url(url) == REDACTED
    assert redacted(f"it was {url}!" if url else "it was empty!").startswith("it was ")
    assert redacted("nothing of this is cut") == "nothing of this is cut"
    assert not url or url not in redacted(f"it was {url}!")


def test_a_nodes_url_is_never_shown_whole_by_web3(hidden):
    text = "Making request. URI: https://eth.example/v2/0123456789abcdef, Method: eth_call"
    assert redacted(text, "web3.providers.HTTPProvider") == "Making request. URI: https://eth.example Method: eth_call"


def _dirty(logger):
    with everything_logged() as log:
        logging.getLogger(logger).debug("headers %s at %s", [("PAYMENT-SIGNATURE", SECRET)], "https://x/?T0KEN")
    return log


@pytest.mark.parametrize("logger", LOGGERS)
def test_every_logger_that_we_know_is_clean(logger):
    redact_logs()
    log = _dirty(logger)
    assert log.names == {logger}
    assert SECRET not in log.text
    assert "T0KEN" not in log.text
    assert "headers [(" in log.text


LIBRARIES = ["httpx", "httpx2", "httpcore", "httpcore2", "hpack", "h2", "hyperframe", "urllib3", "web3", "websockets"]


@pytest.mark.parametrize("library", LIBRARIES)
def test_the_list_has_every_logger_that_the_installed_libraries_take(library):
    spec = importlib.util.find_spec(library)
    if spec is None:
        pytest.skip(f"{library} is not installed: nothing to look at")
    root = Path(spec.origin).parent
    taken = set()
    for path in root.rglob("*.py"):
        name = ".".join([library, *path.relative_to(root).with_suffix("").parts]).removesuffix(".__init__")
        for given in re.findall(r"^(?!\s*#)[^`\n]*\bgetLogger\(\s*([^)]*?),?\s*\)", path.read_text(), re.MULTILINE):
            taken.add(name if given == "__name__" else given.strip("\"'"))
    taken = {name for name in taken if name.startswith(library)}  # an f-string's are checked by hand: websockets.<side>
    assert taken <= set(LOGGERS)
    assert taken or library in ("h2", "hyperframe")


def test_importing_the_package_touches_no_logger():
    script = (
        "import logging, sys, x402guard, x402guard.httpx2\n"
        "loggers = [l for l in logging.root.manager.loggerDict.values() if isinstance(l, logging.Logger)]\n"
        "assert {'httpx', 'httpx2'} <= {l.name for l in loggers}\n"
        "assert not any(l.filters for l in loggers), [l.name for l in loggers if l.filters]\n"
        "from x402guard import Guard, GuardedTransport\n"
        "GuardedTransport(Guard(ledger='memory://'))\n"
        "late = logging.getLogger('hpack.hpack')\n"
        "print(len(late.filters), late.level, late.handlers, late.propagate, logging.root.handlers)\n"
    )
    done = subprocess.run([sys.executable, "-W", "error", "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "1 0 [] True []"


@pytest.fixture
def bare_loggers():
    """The loggers as they were before anything was installed."""
    loggers = {name: logging.getLogger(name) for name in LOGGERS}
    for logger in loggers.values():
        logger.filters[:] = []
    yield loggers
    redact_logs()


INSTALLS = {
    "transport": lambda guard: GuardedTransport(guard),
    "webhook": lambda guard: Webhook(url="https://hooks.example/abc", secret="0123456789abcdef"),
    "hidden URL": lambda guard: hide_url("https://node.example/abc"),
}


@pytest.mark.parametrize("by", INSTALLS)
def test_the_first_of_these_installs_it_and_the_next_add_nothing(bare_loggers, hidden, by):
    with make_guard() as guard:
        assert not any(logger.filters for logger in bare_loggers.values())
        for _ in range(3):
            INSTALLS[by](guard)
    for logger in bare_loggers.values():
        assert [type(each) for each in logger.filters] == [RedactingFilter], logger.name


def test_threads_that_install_it_at_once_add_one_filter(bare_loggers):
    gate = threading.Barrier(8)

    def install():
        gate.wait(10)
        redact_logs()

    threads = [threading.Thread(target=install) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {len(logger.filters) for logger in bare_loggers.values()} == {1}


def test_a_logger_of_a_library_that_we_do_not_list_is_clean_from_the_next_transport_on():
    logging.getLogger("httpcore.of.another.day")
    redact_logs()
    assert SECRET not in _dirty("httpcore.of.another.day").text


def test_configuring_logging_afterwards_leaves_it_in_place():
    redact_logs()
    logging.config.dictConfig(
        {"version": 1, "disable_existing_loggers": False, "loggers": {"httpcore.http11": {"level": "DEBUG"}}}
    )
    try:
        assert SECRET not in _dirty("httpcore.http11").text
    finally:
        logging.getLogger("httpcore.http11").setLevel(logging.NOTSET)


def test_other_loggers_are_left_alone():
    redact_logs()
    assert SECRET in _dirty("the.users.own").text


def test_a_record_without_secrets_keeps_its_template_and_arguments():
    redact_logs()
    with everything_logged() as log:
        logging.getLogger("httpx").info("HTTP Request: %s %s %d", "GET", "https://x.example/a", 200)
    assert "'msg': 'HTTP Request: %s %s %d', 'args': ('GET', 'https://x.example/a', 200)" in log.text


def test_a_record_that_cannot_be_formatted_shows_nothing_and_breaks_nothing(capsys):
    redact_logs()

    class Broken:
        def __str__(self):
            raise RuntimeError(SECRET)

    with everything_logged() as log:
        logging.getLogger("httpx").info("%s of %s", SECRET, Broken())
        logging.getLogger("httpx").info("%d of %d", SECRET, SECRET)
    assert len(log.lines) == 2
    assert SECRET not in log.text + capsys.readouterr().err
    assert "RuntimeError" in log.text
    assert "TypeError" in log.text


def test_a_traceback_in_a_record_is_clean_too():
    redact_logs()
    with everything_logged() as log:
        for message in (f"PAYMENT-SIGNATURE: {SECRET}", "refused by https://x.example/a?T0KEN"):
            try:
                raise ValueError(message)
            except ValueError:
                logging.getLogger("websockets.client").exception("it failed")
    assert SECRET not in log.text
    assert "T0KEN" not in log.text
    assert log.text.count("ValueError: ") >= 2
    assert "test_redaction.py" in log.text


def test_a_record_of_a_logger_that_is_off_is_not_looked_at(monkeypatch):
    redact_logs()
    looked = []
    monkeypatch.setattr(RedactingFilter, "filter", lambda self, record: looked.append(record.msg) or True)
    logger = logging.getLogger("hpack.hpack")
    monkeypatch.setattr(logger, "level", logging.INFO)
    logger.debug("costs nothing")
    logger.info("is looked at")
    assert looked == ["is looked at"]


def test_a_webhooks_repr_shows_scheme_and_host_alone(hidden):
    webhook = Webhook(url="https://hooks.example/services/T012?sig=QRST", secret="0123456789abcdef")
    assert repr(webhook) == "Webhook(url='https://hooks.example')"
    with pytest.raises(ConfigError) as caught:
        Webhook(url="http://hooks.example/services/T012", secret="0123456789abcdef")
    assert "T012" not in str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        "/",
        "a/",
        "\\",
        "cookie=\\",
        "cookie\\",
        'cookie="\\',
        "http://a",
        "eyJ",
        "payment-required",
        "'",
        "b'\\x",
        "ab" * 64 + " ",
    ],
)
@pytest.mark.parametrize("start", ["", "cookie=", 'cookie: "', "GET "])
def test_the_time_grows_with_the_text_alone(text, start):
    began = time.perf_counter()
    redacted(start + text * (200_000 // len(text)), "hpack")
    assert time.perf_counter() - began < 3  # the square of it would take minutes, and no thread runs meanwhile


@pytest.mark.parametrize("ending", ["'", '"', "", "\\", "\\\\", "\\'"], ids=repr)
@pytest.mark.parametrize("part", ["\\x80", "\\x80a", "\\'", "\\\\x80", "b'"], ids=repr)
def test_raw_bytes_of_any_shape_take_time_in_proportion(part, ending):
    """A record that is cut at its most characters loses its closing quote."""
    text = "Decoded b'" + part * 20_000 + ending
    began = time.monotonic()
    redacted(text, "hpack.hpack")
    assert time.monotonic() - began < 2


def test_raw_bytes_that_were_cut_are_hidden():
    assert redacted("Decoded 7, (b'PAYMENT" + "\\x80" * 30_000, "hpack.hpack") == f"Decoded 7, ({REDACTED}"
    assert redacted("Decoded 7, (b'a', b'c\\x80\\'d'), more", "hpack.hpack") == f"Decoded 7, (b'a', {REDACTED}), more"
