"""The maximum output tokens of each model, for calls that set no output limit.

Such a call is held at its worst case before it is sent. The figures are ceilings, so if sources disagree, the larger
one counts. A model that is missing here is bounded by its context window.

Each row names the provider's page, read as a stored copy of 2025 or 2026, not live. For a row marked ``2nd`` the page
was not available: its figure is from another list (LiteLLM 1.109.1, models.dev of 2026-07-02) or from a quotation of
the page. Retired models keep the last figure of their page.
"""

from __future__ import annotations

import re
from datetime import date
from typing import Final

from msgspec import Struct

READ_ON: Final = date(2026, 11, 22)
"""The date of this table."""

_OPENAI: Final = "https://developers.openai.com/api/docs/models"
_CLAUDE: Final = "https://platform.claude.com/docs/en/about-claude/models/overview"
_GEMINI: Final = "https://ai.google.dev/gemini-api/docs/models"
_CLOUD: Final = "https://docs.cloud.google.com/gemini-enterprise-agent-platform/models/gemini"
_GEMINI_4: Final = (
    "https://docs.cloud.google.com/gemini-enterprise-agent-platform/models/start/get-started-with-gemini-4"
)
_MISTRAL: Final = "https://docs.mistral.ai/models"
_DEEPSEEK: Final = "https://api-docs.deepseek.com/quick_start/pricing"


class Maximum(Struct, frozen=True):
    """The most output tokens (reasoning included) in one answer of a model, by its base name without a date.

    ``provider`` is ``openai``, ``anthropic``, ``google``, ``mistral`` or ``deepseek``; ``page`` is the provider's page.
    """

    provider: str
    model: str
    output_tokens: int
    page: str


MAXIMA: Final[tuple[Maximum, ...]] = (
    # OpenAI, without the models of the Realtime and Live endpoints.
    Maximum("openai", "gpt-3.5-turbo", 4_096, f"{_OPENAI}/gpt-3.5-turbo"),  # 2nd
    Maximum("openai", "gpt-3.5-turbo-16k", 4_096, f"{_OPENAI}/gpt-3.5-turbo-16k-0613"),
    # The next row: the page says 4,096, LiteLLM 4,097 for -0914.
    Maximum("openai", "gpt-3.5-turbo-instruct", 4_097, f"{_OPENAI}/gpt-3.5-turbo-instruct"),
    Maximum("openai", "gpt-4", 8_192, f"{_OPENAI}/gpt-4"),  # LiteLLM says 4,096
    Maximum("openai", "gpt-4-0125-preview", 4_096, f"{_OPENAI}/gpt-4-turbo-preview"),
    Maximum("openai", "gpt-4-1106-preview", 4_096, f"{_OPENAI}/gpt-4-turbo-preview"),  # 2nd
    Maximum("openai", "gpt-4-turbo", 4_096, f"{_OPENAI}/gpt-4-turbo"),
    Maximum("openai", "gpt-4.1", 32_768, f"{_OPENAI}/gpt-4.1"),
    Maximum("openai", "gpt-4.1-mini", 32_768, f"{_OPENAI}/gpt-4.1-mini"),
    Maximum("openai", "gpt-4.1-nano", 32_768, f"{_OPENAI}/gpt-4.1-nano"),  # 2nd
    Maximum("openai", "gpt-4.5", 16_384, f"{_OPENAI}/gpt-4.5-preview"),
    Maximum("openai", "gpt-4o", 16_384, f"{_OPENAI}/gpt-4o"),  # its first snapshot, 2024-05-13, stops at 4,096
    Maximum("openai", "gpt-4o-mini", 16_384, f"{_OPENAI}/gpt-4o-mini"),
    Maximum("openai", "chatgpt-4o", 16_384, f"{_OPENAI}/chatgpt-4o-latest"),
    Maximum("openai", "gpt-4o-audio", 16_384, f"{_OPENAI}/gpt-4o-audio-preview"),
    Maximum("openai", "gpt-4o-mini-audio", 16_384, f"{_OPENAI}/gpt-4o-mini-audio-preview"),  # 2nd
    Maximum("openai", "gpt-4o-search", 16_384, f"{_OPENAI}/gpt-4o-search-preview"),
    Maximum("openai", "gpt-4o-mini-search", 16_384, f"{_OPENAI}/gpt-4o-mini-search-preview"),  # 2nd
    Maximum("openai", "gpt-audio", 16_384, f"{_OPENAI}/gpt-audio"),  # 2nd
    Maximum("openai", "gpt-audio-1.5", 16_384, f"{_OPENAI}/gpt-audio-1.5"),  # 2nd
    Maximum("openai", "gpt-audio-mini", 16_384, f"{_OPENAI}/gpt-audio-mini"),  # 2nd
    Maximum("openai", "o1", 100_000, f"{_OPENAI}/o1"),  # 2nd
    Maximum("openai", "o1-mini", 65_536, f"{_OPENAI}/o1-mini"),  # 2nd: a copy of the 2024 page
    Maximum("openai", "o1-preview", 32_768, f"{_OPENAI}/o1-preview"),
    Maximum("openai", "o1-pro", 100_000, f"{_OPENAI}/o1-pro"),  # 2nd
    Maximum("openai", "o3", 100_000, f"{_OPENAI}/o3"),  # 2nd
    Maximum("openai", "o3-mini", 100_000, f"{_OPENAI}/o3-mini"),
    Maximum("openai", "o3-pro", 100_000, f"{_OPENAI}/o3-pro"),
    Maximum("openai", "o3-deep-research", 100_000, f"{_OPENAI}/o3-deep-research"),
    Maximum("openai", "o4-mini", 100_000, f"{_OPENAI}/o4-mini"),
    Maximum("openai", "o4-mini-deep-research", 100_000, f"{_OPENAI}/o4-mini-deep-research"),
    Maximum("openai", "codex-mini", 100_000, f"{_OPENAI}/codex-mini-latest"),  # 2nd: a quotation of the page
    Maximum("openai", "gpt-5", 128_000, f"{_OPENAI}/gpt-5"),  # 2nd
    Maximum("openai", "gpt-5-mini", 128_000, f"{_OPENAI}/gpt-5-mini"),
    Maximum("openai", "gpt-5-nano", 128_000, f"{_OPENAI}/gpt-5-nano"),
    Maximum("openai", "gpt-5-pro", 272_000, f"{_OPENAI}/gpt-5-pro"),  # larger than the rest of the family
    # The next row: 2nd: models.dev; LiteLLM and a quotation of the page say 16,384.
    Maximum("openai", "gpt-5-chat", 128_000, f"{_OPENAI}/gpt-5-chat-latest"),
    Maximum("openai", "gpt-5-codex", 128_000, f"{_OPENAI}/gpt-5-codex"),  # 2nd
    Maximum("openai", "gpt-5-search-api", 128_000, f"{_OPENAI}/gpt-5-search-api"),  # 2nd
    Maximum("openai", "gpt-5.1", 128_000, f"{_OPENAI}/gpt-5.1"),  # 2nd
    Maximum("openai", "gpt-5.1-chat", 16_384, f"{_OPENAI}/gpt-5.1-chat-latest"),
    Maximum("openai", "gpt-5.1-codex", 128_000, f"{_OPENAI}/gpt-5.1-codex"),  # 2nd
    Maximum("openai", "gpt-5.1-codex-max", 128_000, f"{_OPENAI}/gpt-5.1-codex-max"),  # 2nd
    Maximum("openai", "gpt-5.1-codex-mini", 128_000, f"{_OPENAI}/gpt-5.1-codex-mini"),
    Maximum("openai", "gpt-5.2", 128_000, f"{_OPENAI}/gpt-5.2"),  # 2nd
    Maximum("openai", "gpt-5.2-pro", 128_000, f"{_OPENAI}/gpt-5.2-pro"),
    Maximum("openai", "gpt-5.2-chat", 16_384, f"{_OPENAI}/gpt-5.2-chat-latest"),
    Maximum("openai", "gpt-5.2-codex", 128_000, f"{_OPENAI}/gpt-5.2-codex"),
    Maximum("openai", "gpt-5.3-chat", 16_384, f"{_OPENAI}/gpt-5.3-chat-latest"),  # 2nd
    Maximum("openai", "gpt-5.3-codex", 128_000, f"{_OPENAI}/gpt-5.3-codex"),  # 2nd
    Maximum("openai", "gpt-5.3-codex-spark", 32_000, f"{_OPENAI}/gpt-5.3-codex-spark"),  # 2nd: models.dev alone
    Maximum("openai", "gpt-5.4", 128_000, f"{_OPENAI}/gpt-5.4"),
    Maximum("openai", "gpt-5.4-mini", 128_000, f"{_OPENAI}/gpt-5.4-mini"),
    Maximum("openai", "gpt-5.4-nano", 128_000, f"{_OPENAI}/gpt-5.4-nano"),
    Maximum("openai", "gpt-5.4-pro", 128_000, f"{_OPENAI}/gpt-5.4-pro"),
    Maximum("openai", "gpt-5.5", 128_000, f"{_OPENAI}/gpt-5.5"),
    Maximum("openai", "gpt-5.5-pro", 128_000, f"{_OPENAI}/gpt-5.5-pro"),
    Maximum("openai", "gpt-5.6", 128_000, f"{_OPENAI}/gpt-5.6-sol"),  # 2nd: an alias of gpt-5.6-sol
    Maximum("openai", "gpt-5.6-sol", 128_000, f"{_OPENAI}/gpt-5.6-sol"),  # 2nd: read on the page of an alias of it
    Maximum("openai", "gpt-5.6-terra", 128_000, f"{_OPENAI}/gpt-5.6-terra"),
    Maximum("openai", "gpt-5.6-luna", 128_000, f"{_OPENAI}/gpt-5.6-luna"),  # 2nd
    Maximum("openai", "gpt-5.6-cyber", 128_000, f"{_OPENAI}/gpt-5.6-cyber"),  # 2nd: LiteLLM alone
    Maximum("openai", "gpt-6-astra", 128_000, f"{_OPENAI}/gpt-6-astra"),
    Maximum("openai", "gpt-6-sol", 128_000, f"{_OPENAI}/gpt-6-sol"),
    Maximum("openai", "gpt-6-luna", 128_000, f"{_OPENAI}/gpt-6-luna"),  # 2nd
    Maximum("openai", "gpt-6-rosalind", 128_000, f"{_OPENAI}/gpt-6-rosalind"),  # 2nd: LiteLLM alone
    Maximum("openai", "gpt-6.1-sol", 128_000, f"{_OPENAI}/gpt-6.1-sol"),
    Maximum("openai", "gpt-6.1-terra", 128_000, f"{_OPENAI}/gpt-6.1-terra"),  # 2nd: LiteLLM alone
    Maximum("openai", "gpt-6.2-sol", 128_000, f"{_OPENAI}/gpt-6.2-sol"),  # 2nd: resellers alone
    # Anthropic: 128k is written 128,000 as the page once wrote 64000 and 32000. The Messages API requires max_tokens;
    # the 300k of the Message Batches beta (output-300k-2026-03-24) is not meant here.
    Maximum("anthropic", "claude-3-haiku", 4_096, _CLAUDE),
    Maximum("anthropic", "claude-3-sonnet", 4_096, _CLAUDE),  # 2nd
    Maximum("anthropic", "claude-3-opus", 4_096, _CLAUDE),
    Maximum("anthropic", "claude-3-5-haiku", 8_192, _CLAUDE),
    Maximum("anthropic", "claude-3-5-sonnet", 8_192, _CLAUDE),
    # The next row: 64,000 without the beta header output-128k-2025-02-19.
    Maximum("anthropic", "claude-3-7-sonnet", 128_000, _CLAUDE),
    Maximum("anthropic", "claude-sonnet-4", 64_000, _CLAUDE),
    Maximum("anthropic", "claude-sonnet-4-0", 64_000, _CLAUDE),
    Maximum("anthropic", "claude-opus-4", 32_000, _CLAUDE),
    Maximum("anthropic", "claude-opus-4-0", 32_000, _CLAUDE),
    Maximum("anthropic", "claude-opus-4-1", 32_000, _CLAUDE),
    Maximum("anthropic", "claude-haiku-4-5", 64_000, _CLAUDE),
    Maximum("anthropic", "claude-sonnet-4-5", 64_000, _CLAUDE),
    Maximum("anthropic", "claude-opus-4-5", 64_000, _CLAUDE),
    Maximum("anthropic", "claude-sonnet-4-6", 128_000, _CLAUDE),  # models.dev says 64,000
    Maximum("anthropic", "claude-opus-4-6", 128_000, _CLAUDE),
    Maximum("anthropic", "claude-opus-4-7", 128_000, _CLAUDE),
    Maximum("anthropic", "claude-opus-4-8", 128_000, _CLAUDE),
    Maximum("anthropic", "claude-sonnet-5", 128_000, _CLAUDE),
    Maximum("anthropic", "claude-opus-5", 128_000, _CLAUDE),
    Maximum("anthropic", "claude-fable-5", 128_000, _CLAUDE),
    Maximum("anthropic", "claude-mythos-5", 128_000, _CLAUDE),  # the page of Fable 5: it shares Fable's specifications
    Maximum("anthropic", "claude-fable-5-1", 128_000, _CLAUDE),
    Maximum("anthropic", "claude-mythos-5-1", 128_000, _CLAUDE),  # 2nd
    Maximum("anthropic", "claude-fable-5-2", 128_000, _CLAUDE),
    Maximum("anthropic", "claude-haiku-5-5", 128_000, _CLAUDE),
    Maximum("anthropic", "claude-sonnet-5-5", 128_000, _CLAUDE),
    Maximum("anthropic", "claude-opus-5-5", 128_000, _CLAUDE),
    Maximum("anthropic", "claude-mythos", 128_000, _CLAUDE),  # 2nd: LiteLLM alone, as claude-mythos-preview
    # Google. LiteLLM gives 65,535 for some of the rows of 65,536.
    Maximum("google", "gemini-1.5-flash", 8_192, f"{_GEMINI}/gemini"),
    Maximum("google", "gemini-1.5-flash-8b", 8_192, f"{_GEMINI}/gemini"),  # 2nd
    Maximum("google", "gemini-1.5-pro", 8_192, f"{_GEMINI}/gemini"),  # 2nd
    Maximum("google", "gemini-2.0-flash", 8_192, f"{_GEMINI}/gemini-2.0-flash"),
    Maximum("google", "gemini-2.0-flash-lite", 8_192, f"{_GEMINI}/gemini-2.0-flash-lite"),  # 2nd
    Maximum("google", "gemini-2.5-flash", 65_536, f"{_CLOUD}/2-5-flash"),
    Maximum("google", "gemini-2.5-flash-image", 32_768, f"{_CLOUD}/2-5-flash-image"),
    Maximum("google", "gemini-2.5-flash-lite", 65_536, f"{_CLOUD}/2-5-flash-lite"),
    Maximum("google", "gemini-2.5-pro", 65_536, f"{_CLOUD}/2-5-pro"),
    Maximum("google", "gemini-2.5-flash-preview-tts", 16_384, f"{_GEMINI}/gemini-2.5-flash-preview-tts"),  # 2nd
    # The next row: 2nd: LiteLLM, which also gives 16,384, as does models.dev.
    Maximum("google", "gemini-2.5-pro-preview-tts", 65_535, f"{_GEMINI}/gemini-2.5-pro-preview-tts"),
    Maximum("google", "gemini-3-flash", 65_536, f"{_CLOUD}/3-flash"),
    Maximum("google", "gemini-3-pro", 65_536, f"{_GEMINI}/gemini-3-pro-preview"),  # 2nd
    Maximum("google", "gemini-3-pro-image", 32_768, f"{_CLOUD}/3-pro-image"),
    # The next row: models.dev; the page says 32,768.
    Maximum("google", "gemini-3.1-flash-image", 65_536, f"{_CLOUD}/3-1-flash-image"),
    Maximum("google", "gemini-3.1-flash-lite", 65_536, f"{_CLOUD}/3-1-flash-lite"),
    Maximum("google", "gemini-3.1-flash-lite-image", 4_096, f"{_CLOUD}/3-1-flash-lite-image"),
    Maximum("google", "gemini-3.1-pro", 65_536, f"{_CLOUD}/3-1-pro"),
    Maximum("google", "gemini-3.1-pro-preview-customtools", 65_536, f"{_CLOUD}/3-1-pro"),  # 2nd
    Maximum("google", "gemini-3.5-flash", 65_536, f"{_CLOUD}/3-5-flash"),
    Maximum("google", "gemini-3.5-flash-lite", 65_536, f"{_CLOUD}/3-5-flash-lite"),
    Maximum("google", "gemini-3.6-flash", 65_536, f"{_CLOUD}/3-6-flash"),
    Maximum("google", "gemini-3.7-flash", 65_536, f"{_CLOUD}/3-7-flash"),
    # The next row: 2nd: a quotation of the page, and LiteLLM.
    Maximum("google", "gemini-3.8-flash", 65_536, f"{_GEMINI}/gemini-3.8-flash"),
    # Gemini 4 shares 1,048,576 between question and answer; a call without a limit stops at 65,536, says the page.
    Maximum("google", "gemini-4-argon", 1_048_576, _GEMINI_4),
    Maximum("google", "gemini-flash-latest", 65_536, _GEMINI),  # 2nd: an alias that moves
    Maximum("google", "gemini-flash-lite-latest", 65_536, _GEMINI),  # 2nd: an alias that moves
    # The next row: 2nd: LiteLLM says 65,536, but the alias can move to Gemini 4.
    Maximum("google", "gemini-pro-latest", 1_048_576, _GEMINI),
    Maximum("google", "gemini-omni-flash", 65_536, f"{_CLOUD}/omni-flash-preview"),  # LiteLLM; the page says 57,920
    Maximum("google", "gemini-omni-1.1-flash", 65_536, _GEMINI),  # 2nd: LiteLLM alone
    Maximum("google", "gemini-robotics-er-2", 65_536, _GEMINI),  # 2nd: LiteLLM alone
    # Mistral states a maximum for few models (128k, read as the larger 131,072); the window bounds the others.
    Maximum("mistral", "labs-leanstral-1-5", 131_072, f"{_MISTRAL}/leanstral-1-5"),
    Maximum("mistral", "labs-leanstral-1-5-1", 131_072, f"{_MISTRAL}/overview"),  # 2nd: LiteLLM alone
    Maximum("mistral", "zai-glm-5-2", 131_072, f"{_MISTRAL}/zai-glm-5-2"),
    Maximum("mistral", "zai-glm-5", 131_072, f"{_MISTRAL}/overview"),  # 2nd: LiteLLM alone
    Maximum("mistral", "zai-glm-5-3", 131_072, f"{_MISTRAL}/overview"),  # 2nd: LiteLLM alone
    Maximum("mistral", "zai-glm-5-3-flash", 131_072, f"{_MISTRAL}/overview"),  # 2nd: LiteLLM alone
    Maximum("mistral", "zai-glm", 131_072, f"{_MISTRAL}/overview"),  # 2nd: LiteLLM alone, as zai-glm-latest
    Maximum("mistral", "deepseek-v4-1-flash", 131_072, f"{_MISTRAL}/overview"),  # 2nd: LiteLLM alone
    # DeepSeek writes 384K, read as the larger 393,216. The two old names came to mean deepseek-v4-flash.
    # The next row: 2nd: models.dev; before V4 it was 8K, as LiteLLM still says.
    Maximum("deepseek", "deepseek-chat", 393_216, _DEEPSEEK),
    # The next row: 2nd: models.dev; before V4 it was 64K, as LiteLLM still says.
    Maximum("deepseek", "deepseek-reasoner", 393_216, _DEEPSEEK),
    Maximum("deepseek", "deepseek-flash", 393_216, _DEEPSEEK),  # 2nd: LiteLLM
    Maximum("deepseek", "deepseek-v4-flash", 393_216, _DEEPSEEK),
    Maximum("deepseek", "deepseek-v4-flash-vision-exp", 393_216, _DEEPSEEK),  # 2nd: LiteLLM alone
    Maximum("deepseek", "deepseek-v4-pro", 393_216, _DEEPSEEK),
)
"""The known maxima."""

_BY_NAME: Final = {(row.provider, row.model): row for row in MAXIMA}
_DATE: Final = r"(?:\d{4}-\d{2}-\d{2}|\d{8}|\d{2}-\d{4}|\d{2}-\d{2}|\d{3,4})"
"""2024-08-06, 20250929, 09-2025, 05-06, 0613 or 2411, and Google's numbered snapshots (001)."""

_SUFFIX: Final = re.compile(rf"-(?:latest|preview(?:-{_DATE})?|{_DATE}(?:-preview)?)", re.ASCII)
"""The suffixes of a base name: a date, ``latest``, or ``preview`` with or without a date."""


def model_maximum(provider: str, model: str) -> Maximum | None:
    """Return the row of a model by its exact name, or by its base name followed by a date, ``latest`` or ``preview``.

    Any other longer name is another model: ``gpt-4o-mini`` is not ``gpt-4o``, and ``gpt-4.1`` is not ``gpt-4``. If two
    base names fit (``o1`` and ``o1-preview`` for ``o1-preview-2024-09-12``), the longer one counts.
    """
    exact = _BY_NAME.get((provider, model))
    if exact is not None:
        return exact
    for end in range(len(model) - 1, 0, -1):
        if model[end] == "-" and _SUFFIX.fullmatch(model, end):
            row = _BY_NAME.get((provider, model[:end]))
            if row is not None:
                return row
    return None


_DATED: Final = re.compile(r"(?P<base>.+)[-@](?P<year>20[0-9]{2})-?(?P<month>[0-9]{2})-?(?P<day>[0-9]{2})", re.ASCII)
_NEVER_REASONS: Final = re.compile(
    r"(openai/)?(gpt-3\.5|gpt-4(?!\.5\d)|gpt-5[.\d]*-chat|chatgpt-4o|davinci|babbage)", re.ASCII
)


def base_name(model: str) -> str | None:
    """Return the base name of a dated name (``gpt-4o-2025-06-15``, ``claude-x-20250929``), or None for other names."""
    match = _DATED.fullmatch(model)
    if match is None:
        return None
    try:
        date(int(match["year"]), int(match["month"]), int(match["day"]))
    except ValueError:
        return None
    return match["base"]


def served_as(provider: str, model: str) -> str:
    """Return the model that a provider answers with: DeepSeek takes Claude's names (its guide to Anthropic's API)."""
    if provider == "deepseek" and model.startswith("claude"):
        return "deepseek-v4-pro" if model.startswith("claude-opus") else "deepseek-flash"
    return model


def reasons(model: str) -> bool:
    """False only for a model known to bill no hidden output, because hidden output cannot be counted locally."""
    return _NEVER_REASONS.match(model) is None
