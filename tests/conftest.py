"""What every test stands on: the same examples each time, and no limit on a slow machine's patience."""

import os

from hypothesis import settings

# Repeatable by default: a failure that nobody can repeat is no failure report. HYPOTHESIS_PROFILE=explore looks further.
settings.register_profile("repeatable", deadline=None, derandomize=True)
settings.register_profile("explore", deadline=None, max_examples=2_000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))
