"""Offers that no transport of ours sees."""
