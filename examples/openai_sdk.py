"""The openai SDK under a budget: one argument, ``http_client``. No key and no network: a local server plays the model.

Run it with ``python examples/openai_sdk.py`` after ``pip install "x402guard[testnet]" openai``.
"""

import httpx2
import openai

from x402guard import BudgetExhausted, Guard, Metering, refusal_from
from x402guard.httpx2 import GuardedTransport
from x402guard.testing import Completion, LlmServer


def main() -> None:
    """Ask until a tenth of a cent is spent: each call is held at its worst case, and captured at what it used."""
    with LlmServer(Completion("Marbury v. Madison.", input_tokens=12, output_tokens=300)) as model:
        guard = Guard(ledger="memory://", metering=Metering(endpoints={model.base("openai"): "openai"}))
        with guard, guard.session("research", budget="$0.001") as session:
            http = httpx2.Client(transport=GuardedTransport(session))  # the newer SDKs are built on httpx2
            llm = openai.OpenAI(api_key="none", base_url=f"{model.base('openai')}/v1", http_client=http)
            for number in range(1, 100):
                try:
                    llm.chat.completions.create(
                        model="gpt-4o-mini",
                        messages=[{"role": "user", "content": f"The opinion of page {number}, please."}],
                        max_completion_tokens=300,
                    )
                except openai.APIStatusError as error:
                    no = refusal_from(error)  # the SDK reports a refusal as an answer of status 402
                    assert isinstance(no, BudgetExhausted)
                    print(f"call {number} is refused: {no}")
                    break
            http.close()
            print(session.report())


if __name__ == "__main__":
    main()
