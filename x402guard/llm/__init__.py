"""Metering: which request is an LLM call, what it costs at most before, and what it did cost after. Pure."""

from x402guard.llm.prices import ModelPrice
from x402guard.llm.settings import Metering

__all__ = ["Metering", "ModelPrice"]
