"""Metering: which request is an LLM call, what it costs at most before, and what it did cost after. Pure."""

from x402guard.metering.registered import ModelPrice
from x402guard.metering.settings import Metering

__all__ = ["Metering", "ModelPrice"]
