"""What a call really costs: the truth that metering is tested against, one row per trap, worked out by hand.

Prices are those of genai-prices 0.2.3 at ``AT``. One dollar a million tokens is 1,000 nano-dollars a token.
"""

from tests.data.bills_anthropic import ANTHROPIC
from tests.data.bills_anthropic_streams import ANTHROPIC_STREAMS
from tests.data.bills_cohere import COHERE
from tests.data.bills_compatible import COMPATIBLE
from tests.data.bills_google import GOOGLE
from tests.data.bills_hidden import HIDDEN
from tests.data.bills_openai import OPENAI
from tests.data.bills_openai_streams import OPENAI_STREAMS
from tests.data.bills_openrouter import OPENROUTER
from tests.data.bills_responses import RESPONSES
from tests.data.bills_shape import AT, CEILING, Bill, text

__all__ = ["AT", "BILLS", "CEILING", "Bill", "text"]

BILLS: list[Bill] = [
    *OPENAI,
    *OPENAI_STREAMS,
    *RESPONSES,
    *ANTHROPIC,
    *ANTHROPIC_STREAMS,
    *GOOGLE,
    *COMPATIBLE,
    *COHERE,
    *OPENROUTER,
    *HIDDEN,
]
