"""How many examples hypothesis tries: a sixth in ``make test``, all in ``make test-long``, thousands with ``explore``."""

import os

from hypothesis import settings

PROFILE = os.environ.get("HYPOTHESIS_PROFILE", "repeatable")
_MOST = 2_000

# Repeatable by default: a failure that nobody can repeat is no failure report. HYPOTHESIS_PROFILE=explore looks further.
settings.register_profile("repeatable", deadline=None, derandomize=True, max_examples=20)
settings.register_profile("full", deadline=None, derandomize=True)
settings.register_profile("explore", deadline=None, max_examples=_MOST)


def examples(full: int) -> int:
    """So many as *full* says, by the profile."""
    return {"repeatable": -(-full // 6), "full": full}.get(PROFILE, _MOST)
