"""The official SDK from the 402 to the payment's header, exact by EIP-3009. Reads how many to time from each line."""

import asyncio
import base64
import json
import sys
import time

import httpx
from eth_account import Account
from x402 import x402Client
from x402.http.clients.httpx import x402AsyncTransport
from x402.mechanisms.evm import EthAccountSigner
from x402.mechanisms.evm.exact.register import register_exact_evm_client

OFFER = {
    "x402Version": 2,
    "error": "payment required",
    "resource": {"url": "https://seller.example/item", "description": "", "mimeType": "application/json"},
    "accepts": [
        {
            "scheme": "exact",
            "network": "eip155:84532",
            "asset": "0x036CbD53842c5426634e7929541eC2318f3dCF7e",
            "amount": "10",
            "payTo": "0x209693Bc6afc0C5328bA36FaF03C514EF312287C",
            "maxTimeoutSeconds": 60,
            "extra": {"name": "USDC", "version": "2"},
        }
    ],
}
HEADERS = {"PAYMENT-REQUIRED": base64.b64encode(json.dumps(OFFER).encode()).decode()}
STAMPS = [0, 0]


def seller(request: httpx.Request) -> httpx.Response:
    if "payment-signature" in request.headers:
        STAMPS[1] = time.perf_counter_ns()
        return httpx.Response(200, json={"ok": 1})
    answer = httpx.Response(402, headers=HEADERS, json={})
    STAMPS[0] = time.perf_counter_ns()
    return answer


async def main() -> None:
    client = x402Client()
    register_exact_evm_client(client, EthAccountSigner(Account.from_key("0x" + "11" * 32)))
    transport = x402AsyncTransport(client, httpx.MockTransport(seller))
    async with httpx.AsyncClient(transport=transport) as http:
        for line in sys.stdin:
            times = []
            for _ in range(int(line)):
                await http.get("https://seller.example/item")
                times.append((STAMPS[1] - STAMPS[0]) / 1000)
            print(*times, flush=True)


asyncio.run(main())
