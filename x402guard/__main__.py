"""``python -m x402guard``: the command line. Python puts the working directory first on the path; nothing is imported from it.

The package itself is found before this file runs: ``python -P -m x402guard``, or the command ``x402guard``, look for nothing
there at all.
"""

import sys
from contextlib import suppress
from pathlib import Path

with suppress(OSError):  # the folder may be gone
    if sys.path[:1] in ([""], [str(Path.cwd())]):
        del sys.path[0]

from x402guard.cli import main

main()
