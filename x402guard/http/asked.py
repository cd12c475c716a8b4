"""How a request asks, and whether an answer has less than that."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from msgspec import Struct

from x402guard.x402.settlement import ACCEPTED_STATUS
from x402guard.x402.wire import has_receipt

if TYPE_CHECKING:
    import httpx


MAY_BE_LESS: Final = frozenset({ACCEPTED_STATUS, 206, 304})
"""The statuses of an answer that may have less than what was asked for."""


class Asked(Struct, frozen=True):
    """How the paid request has asked: its method, and whether for a part, or only for what has changed."""

    method: str = "GET"
    part: bool = False
    changed: bool = False

    @classmethod
    def by(cls, request: httpx.Request | None) -> Asked:
        """Return how *request* asks."""
        if request is None:
            return cls()
        lines = request.headers
        return cls(request.method.upper(), "range" in lines, "if-none-match" in lines or "if-modified-since" in lines)

    def gets_less(self, response: httpx.Response) -> bool:
        """True for a part that was not asked for, unless it is the whole, and for the word that nothing has changed.

        And for a job that has only begun: ``202 Accepted`` (RFC 9110, 15.3.3) without a receipt.
        """
        if response.status_code == ACCEPTED_STATUS:
            return not has_receipt(response.headers.multi_items())
        if response.status_code == 304:
            return not self.changed
        if response.status_code != 206 or self.part:
            return False
        says = response.headers.get("content-range", "").strip()
        if not says and "byteranges" not in response.headers.get("content-type", "").lower():
            return False  # it names no part: some servers answer with this status for a page of a list
        whole = _WHOLE.fullmatch(says)
        return whole is None or int(whole[1]) + 1 != int(whole[2])


_WHOLE: Final = re.compile(r"bytes 0-([0-9]{1,18})/([0-9]{1,18})", re.ASCII)
"""The Content-Range of a part; it is the whole if its last byte is the last of all."""
