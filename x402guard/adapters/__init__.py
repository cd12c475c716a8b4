"""Payments for offers that no transport of ours sees: by hand, over MCP, by the official SDK."""
