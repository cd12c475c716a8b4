"""The anthropic SDK under a budget, streaming. It takes a client of httpx2 alone: one of httpx is a TypeError.

Run it with ``python examples/anthropic_sdk.py`` after ``pip install "x402guard[testnet]" anthropic``.
"""

import anthropic
import httpx2
from anthropic.types import MessageParam

from x402guard import Guard, Metering, refusal_from
from x402guard.httpx2 import GuardedTransport
from x402guard.testing import Completion, LlmServer

QUESTION: MessageParam = {"role": "user", "content": "Which opinion founded judicial review?"}


def main() -> None:
    """Stream two answers. A refusal reaches the SDK as an answer of status 402, and is a typed error again here."""
    with LlmServer(Completion("Marbury v. Madison, in 1803.", input_tokens=20, output_tokens=12)) as model:
        guard = Guard(ledger="memory://", metering=Metering(endpoints={model.base("anthropic"): "anthropic"}))
        with guard, guard.session("research", budget="$0.01") as session:
            http = httpx2.Client(transport=GuardedTransport(session))
            llm = anthropic.Anthropic(api_key="none", base_url=model.base("anthropic"), http_client=http)
            for most in (200, 20_000):  # the second may cost more than the budget has left
                try:
                    with llm.messages.stream(model="claude-haiku-4-5", max_tokens=most, messages=[QUESTION]) as stream:
                        print("".join(stream.text_stream))
                except anthropic.APIStatusError as no:
                    print("refused:", refusal_from(no))
            http.close()
            print(session.report())


if __name__ == "__main__":
    main()
