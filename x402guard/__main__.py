"""``python -m x402guard``: the command line."""

from x402guard.cli import main

main()
