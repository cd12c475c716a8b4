"""Names of models: what a dated name is based on, and whether a model thinks before it answers."""

from __future__ import annotations

import re
from datetime import date
from typing import Final

_DATED: Final = re.compile(r"(?P<base>.+)[-@](?P<year>20[0-9]{2})-?(?P<month>[0-9]{2})-?(?P<day>[0-9]{2})", re.ASCII)
_NEVER_REASONS: Final = re.compile(
    r"(openai/)?(gpt-3\.5|gpt-4(?!\.5\d)|gpt-5[.\d]*-chat|chatgpt-4o|davinci|babbage)", re.ASCII
)


def base_name(model: str) -> str | None:
    """Return what a dated name (``gpt-4o-2025-06-15``, ``claude-x-20250929``) is based on, or None for any other name."""
    match = _DATED.fullmatch(model)
    if match is None:
        return None
    try:
        date(int(match["year"]), int(match["month"]), int(match["day"]))
    except ValueError:
        return None
    return match["base"]


def reasons(model: str) -> bool:
    """True unless a model is known to bill no hidden output: what cannot be seen cannot be counted."""
    return _NEVER_REASONS.match(model) is None
