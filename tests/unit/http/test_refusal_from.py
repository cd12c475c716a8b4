"""Bodies that only look like refusals."""

import pytest

from x402guard import ConfigError, Metering
from x402guard.http.refusal_from import refusal_from


def test_bodies_that_only_look_like_refusals_are_none_to_fall_over():
    class StrangeError(Exception):
        body = {"type": "urn:x402guard:x", "requested": "abc", "available": "Infinity"}

    assert refusal_from(StrangeError()).requested is None
    with pytest.raises(ConfigError):
        Metering(price_context={"processing": "bath"})
