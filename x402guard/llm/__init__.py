"""Metering core: recognises LLM calls, computes their ceilings before and their costs after. Pure."""

from x402guard.llm.prices import ModelPrice
from x402guard.llm.settings import Endpoint, Metering

__all__ = ["Endpoint", "Metering", "ModelPrice"]
