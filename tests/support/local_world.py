"""The world behind a page of the docs: its key, its ledger, and sellers at ``*.example``, for a block that runs as pasted.

Import it, call ``begin``, and run the block in the same process. Requests to other hosts than loopback never leave it.
"""

import os
import sys
import types
from pathlib import Path

import httpx
import httpx2

from tests.support.merchant import KEY, Shop, make_guard, required

PASSWORD = "of the test only"
_BEDROCK = {
    "output": {"message": {"role": "assistant", "content": [{"text": "Marbury v. Madison."}]}},
    "stopReason": "end_turn",
    "usage": {"inputTokens": 20, "outputTokens": 8, "totalTokens": 28},
}


def begin() -> None:
    """Put the world into the working folder, the environment, and the transports of httpx and httpx2."""
    from eth_account import Account

    environ = {"X402GUARD_PRIVATE_KEY": KEY, "OPENAI_API_KEY": "none", "KEY_PASSWORD": PASSWORD}
    os.environ.update(environ)
    keystore = Account.encrypt(KEY, PASSWORD, kdf="pbkdf2", iterations=1_000)
    Path("wallet.json").write_text(str(keystore).replace("'", '"'))
    Path("wallet.json").chmod(0o600)
    with (
        make_guard("sqlite:///spend.db") as guard,
        guard.session("court-research", budget="$5.00", id="court-research"),
    ):
        pass
    for library in (httpx, httpx2):
        _stand_in(library)
    sys.modules["boto3"] = types.ModuleType("boto3")
    bedrock = types.SimpleNamespace(converse=lambda **_: _BEDROCK)
    sys.modules["boto3"].client = lambda *_, **__: bedrock


def _stand_in(library) -> None:
    """Answer requests to ``*.example`` as a seller of one cent does, and refuse a connection to any other host."""
    shop = Shop(lambda request: required(url=str(request.url)))

    def sold(request):
        if not request.url.host.endswith(".example"):
            raise library.ConnectError(f"{request.url.host} is not in the local world")
        headers = {name: request.headers[name] for name in ("payment-signature",) if name in request.headers}
        answer = shop(httpx.Request(request.method, str(request.url), headers=headers))
        return library.Response(answer.status_code, headers=answer.headers, content=answer.content, request=request)

    async def asold(_self, request):
        await request.aread()
        return sold(request)

    library.HTTPTransport.handle_request = lambda _self, request: sold(request)
    library.AsyncHTTPTransport.handle_async_request = asold
