"""Metering core: recognises LLM calls, computes their ceilings before and their costs after. Pure."""

from x402guard.llm.settings import Endpoint, Metering
from x402guard.vendors.model_price import ModelPrice

__all__ = ["Endpoint", "Metering", "ModelPrice"]
