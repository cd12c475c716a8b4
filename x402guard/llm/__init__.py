"""Metering core: recognises LLM calls, computes their ceilings before and their costs after. Pure."""

from x402guard.llm.prices import ModelPrice
from x402guard.llm.settings import Metering

__all__ = ["Metering", "ModelPrice"]
