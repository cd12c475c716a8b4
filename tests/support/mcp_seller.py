"""A server of the official ``mcp`` package that sells by the official x402 wrapper, over stdio or streamable HTTP.

``python -m tests.support.mcp_seller stdio|http FACILITATOR PAYEE TOKEN``; over HTTP it prints its URL. Tools: ``echo`` is
free; ``weather`` costs $0.10; ``coded`` too, and says so in a JSON-RPC error; ``dies`` ends the process once it was paid;
``closes`` is paid and answers with an error of its own; ``swapped`` asks for the price of another tool; ``placed`` names
a resource of its own; ``runs`` counts.
"""

import os
import sys
from typing import Any

import anyio
import mcp_types as types
import uvicorn
from mcp.server.lowlevel import Server
from mcp.server.stdio import stdio_server
from mcp.shared.exceptions import MCPError
from x402 import x402ResourceServer
from x402.http import FacilitatorConfig, HTTPFacilitatorClient
from x402.mcp.server_async import PaymentWrapperConfig, create_payment_wrapper
from x402.mcp.types import MCPToolResult
from x402.mechanisms.evm.exact import ExactEvmServerScheme
from x402.schemas import PaymentRequirements, ResourceInfo

NETWORK = "eip155:84532"
PRICE = 100_000
FREE, PAID = ("echo", "runs"), ("weather", "coded", "dies", "closes", "swapped", "placed")


class Seller:
    def __init__(self, facilitator, payee, token):
        self._server = x402ResourceServer(HTTPFacilitatorClient(FacilitatorConfig(url=facilitator)))
        self._server.register(NETWORK, ExactEvmServerScheme())
        self._is_ready = False
        accepts = PaymentRequirements(
            scheme="exact", network=NETWORK, asset=token, amount=str(PRICE), pay_to=payee, max_timeout_seconds=60,
            extra={"name": "USDC", "version": "2"},
        )  # fmt: skip
        self._wrap = create_payment_wrapper(self._server, PaymentWrapperConfig([accepts]))
        own = ResourceInfo(url="mcp://weather-server/v1")
        self._wrap_placed = create_payment_wrapper(self._server, PaymentWrapperConfig([accepts], resource=own))
        self.runs = 0

    async def sold(self, name, arguments, meta) -> MCPToolResult:
        async def handler(_arguments, _context):
            self.runs += 1
            if name == "closes":
                raise RuntimeError("the archive is closed")
            return MCPToolResult(content=[{"type": "text", "text": f"sunny in {arguments.get('city')}"}])

        if not self._is_ready:
            self._server.initialize()
            self._is_ready = True
        called = "another" if name == "swapped" else name
        wrap = self._wrap_placed if name == "placed" else self._wrap
        return await wrap(handler)(arguments, {"_meta": meta, "toolName": called})

    async def call(self, _context: Any, params: types.CallToolRequestParams) -> types.CallToolResult:
        meta = params.meta if isinstance(params.meta, dict) else {}
        if params.name in FREE:
            text = str(self.runs) if params.name == "runs" else str((params.arguments or {}).get("text"))
            return types.CallToolResult(content=[types.TextContent(type="text", text=text)])
        if params.name not in PAID:
            raise MCPError(types.INVALID_PARAMS, f"there is no tool {params.name}")
        try:
            done = await self.sold(params.name, params.arguments or {}, meta)
        except RuntimeError as error:
            done = MCPToolResult(content=[{"type": "text", "text": str(error)}], is_error=True)
        if params.name == "coded" and done.is_error:
            raise MCPError(402, "Payment required", done.structured_content)
        if params.name == "dies" and not done.is_error:
            os._exit(1)
        return types.CallToolResult(
            content=[types.TextContent(type="text", text=each["text"]) for each in done.content],
            structured_content=done.structured_content,
            is_error=done.is_error,
            _meta=done.meta or None,
        )

    async def tools(self, _context: Any, _params: Any) -> types.ListToolsResult:
        schema = {"type": "object"}
        return types.ListToolsResult(tools=[types.Tool(name=name, input_schema=schema) for name in FREE + PAID])


def main(transport, *where):
    seller = Seller(*where)
    server = Server("seller", version="1", on_call_tool=seller.call, on_list_tools=seller.tools)

    async def over_stdio():
        async with stdio_server() as (reading, writing):
            await server.run(reading, writing, server.create_initialization_options())

    if transport == "stdio":
        anyio.run(over_stdio)
        return
    config = uvicorn.Config(server.streamable_http_app(), port=0, log_level="error")
    running = uvicorn.Server(config)

    async def over_http():
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(running.serve)
            while not running.started:
                await anyio.sleep(0.02)
            print(f"http://127.0.0.1:{running.servers[0].sockets[0].getsockname()[1]}/mcp", flush=True)

    anyio.run(over_http)


if __name__ == "__main__":
    main(*sys.argv[1:])
