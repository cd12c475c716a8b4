"""The live page of a ledger, served to a browser."""
