"""A seller on loopback with keep-alive, in a process of its own: ``/free`` is free, everything else is paid for."""

from __future__ import annotations

import asyncio
import json
import time

from tests.support.merchant import accept, b64, receipt, required


async def _serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while head := await _head(reader):
        path = head.split(b" ", 2)[1].decode()
        if path.startswith("/free"):
            writer.write(_answer("200 OK", {}))
        elif b"payment-signature:" in head.lower():
            settled = b64(receipt(transaction=f"0x{time.perf_counter_ns():064x}"))
            writer.write(_answer("200 OK", {"PAYMENT-RESPONSE": settled}))
        else:
            host = head.lower().split(b"host: ", 1)[1].split(b"\r", 1)[0].decode()
            terms = b64(required(accept(10), url=f"http://{host}{path}"))
            writer.write(_answer("402 Payment Required", {"PAYMENT-REQUIRED": terms}))
    writer.close()


async def _head(reader: asyncio.StreamReader) -> bytes:
    try:
        return await reader.readuntil(b"\r\n\r\n")
    except (asyncio.IncompleteReadError, ConnectionError):
        return b""


def _answer(status: str, more: dict[str, str]) -> bytes:
    body = json.dumps({"ok": 1}).encode()
    headers = {"content-type": "application/json", "content-length": str(len(body)), **more}
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    return f"HTTP/1.1 {status}\r\n{lines}\r\n".encode() + body


async def _main() -> None:
    server = await asyncio.start_server(_serve, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(_main())
