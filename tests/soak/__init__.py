"""Agents, sellers that lie and a hand on the power switch, on a local chain: what leaves the wallet stays in the books."""
