"""One call of the caller over all its redirect hops, and which of them pays."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from x402guard.flow.address import address
from x402guard.flow.receipt import Receipt
from x402guard.http.asked import Asked
from x402guard.x402.settlement import succeeded

if TYPE_CHECKING:
    import httpx

    from x402guard.http.answer_end import AnswerEnding

LOGICAL: Final = "x402guard.logical_request"


def _origin_of(request: httpx.Request) -> str:
    return address(request.url.scheme, request.url.raw_host, request.url.port).origin


class LogicalRequest:
    """One call of the caller over all its redirect hops.

    httpx copies ``extensions`` to each hop, so this shared object identifies the call. It ends with the final answer:
    sending the same request object again is a new purchase.

    Attributes:
        origin: the origin of the first hop.
        first: its method and URL, if they are known.
        paid_by: the hold whose signature was sent, or None.
        paid_at: the origin that has it, where it goes along with a redirect; else None.
        receipt: the receipt of a payment on an earlier hop, or None; the last answer carries it.
        follows: notes how what was paid for has come, if the answer to the payment redirects to it; else None.
        is_resent: its request object was sent before, with a payment: ``pay_again`` has had its effect.
        is_metered: it is a call that a provider may bill, and counts at its ceiling until the bill is known.
    """

    def __init__(self, origin: str, first: tuple[str, httpx.URL] | None = None) -> None:
        self.origin, self.first = origin, first
        self.paid_by: str | None = None
        self.paid_at: str | None = None
        self.receipt: Receipt | None = None
        self.follows: AnswerEnding | None = None
        self._arrives: AnswerEnding | None = None
        self.is_metered = False
        self.is_resent = False
        self._done = self._failed = False
        self._challenged = False
        self._hop: weakref.ref[httpx.Request] | None = None
        self._hops = self._paid_hops = 0
        self._paid_as, self._may_be_get = Asked(), False

    @classmethod
    def of(cls, request: httpx.Request) -> LogicalRequest:
        """Return the call of *request*, a new one for a first hop."""
        logical = request.extensions.get(LOGICAL)
        if not isinstance(logical, LogicalRequest) or logical.is_over(request):
            before, logical = logical, cls(_origin_of(request), (request.method, request.url))
            logical.is_resent = isinstance(before, LogicalRequest) and (before.is_resent or before.paid_by is not None)
            request.extensions = {**request.extensions, LOGICAL: logical}
        if logical._arrives is not None and logical._arrives.was_lost:
            logical.follows, logical._arrives = logical._arrives, None  # a transport sends that hop again
        logical._hops += logical._hop is None or logical._hop() is not request
        logical._hop = weakref.ref(request)
        return logical

    def is_over(self, request: httpx.Request) -> bool:
        """True if *request* begins a new call: the last call has its answer, or the same object is sent again.

        False after a 401 or 407 to a payment: then httpx's auth flow sends the same object again within the call. And
        for a hop after the payment that has brought nothing, and that a transport outside the guard sends again.
        """
        is_again = self._hop is not None and self._hop() is request
        has_come = self.follows is None and (self._arrives is None or not self._arrives.was_lost) and not self._failed
        if is_again and self.paid_by is not None and self._hops > self._paid_hops and not has_come:
            return False
        return self._done or (not self._challenged and is_again)

    def pays(self, hold_id: str) -> None:
        """Note that the payment *hold_id* goes with this hop. One that goes along was made at an earlier hop, and stays there."""
        if hold_id == self.paid_by:
            return
        request = None if self._hop is None else self._hop()
        self.paid_by, self._paid_hops, self._paid_as = hold_id, self._hops, Asked.by(request)
        self.paid_at = None if request is None else _origin_of(request)
        self._may_be_get = False

    def answered(self, response: httpx.Response) -> None:
        """Note whether *response* ends the call or another hop follows."""
        self._challenged = self.paid_by is not None and response.status_code in (401, 407)
        self._failed = response.status_code >= 400
        self._done = not response.has_redirect_location and not self._challenged
        self._may_be_get |= response.has_redirect_location and response.status_code not in _KEEPS_METHOD

    def arrived(self, request: httpx.Request, response: httpx.Response) -> AnswerEnding | None:
        """Return what notes the end of the answer that an earlier hop has paid for, or None if this one is not it.

        Then it is lost, unless a next hop follows, or this one has brought a part of it.
        """
        follows, delivers = self.follows, succeeded(response.status_code)
        if follows is None or (delivers and not response.has_redirect_location and self._is_all(request, response)):
            self.follows, self._arrives = None, follows
            return follows
        (follows.waits if delivers else follows.lost)()
        return None

    def _is_all(self, request: httpx.Request, response: httpx.Response) -> bool:
        """True unless *request*, a hop behind the payment, gets less than what was paid for.

        That is what another method gets (some redirects make a GET of any), a part that was not asked for with the
        payment, and the word that nothing has changed.
        """
        method, paid_as = request.method.upper(), self._paid_as
        asks_so = method == paid_as.method or (method == "GET" and self._may_be_get)
        return asks_so and not paid_as.gets_less(response)

    def beside(self) -> LogicalRequest:
        """Return the call of a request that is none of its hops: it pays nothing once this one has, and delivers nothing."""
        other = LogicalRequest(self.origin, self.first)
        other.paid_by, other.is_resent = self.paid_by, True
        return other

    def resumed(self) -> LogicalRequest:
        """Return the call for a hop that is asked for, maybe again: it pays at one hop, and what it has paid for may come."""
        if not self._done:
            return self
        again = LogicalRequest(self.origin, self.first)
        again.paid_by, again.receipt, again.is_resent = self.paid_by, self.receipt, True
        again.paid_at = self.paid_at
        again._paid_as, again._may_be_get = self._paid_as, self._may_be_get
        was_lost = self._arrives is not None and self._arrives.was_lost
        follows = self._arrives if was_lost else self.follows
        again.follows = None if follows is None or follows.has_come else follows
        return again

    def waits(self, is_over: Callable[[], bool]) -> None:
        """Note what says that no next hop comes any more, where another task than this one sends it."""
        for each in filter(None, (self.follows, self.follows and self.follows.redirect)):
            each.waits_for(is_over)

    def end(self) -> None:
        """End the call after a failure. What was paid for on an earlier hop has not come."""
        self._done = True
        if self.follows is not None:
            self.follows.lost()

    def break_off(self) -> None:
        """Note that an error comes between an answer and its caller. What was paid for has not come with it."""
        for each in (self.follows, self._arrives):
            if each is not None:
                each.dropped()


_KEEPS_METHOD: Final = frozenset({307, 308})
"""The redirects that are followed with the method of the request (RFC 9110, 15.4.8 and 15.4.9)."""


def break_off(request: httpx.Request) -> None:
    """Note that an error comes between an answer to *request* and its caller (``LogicalRequest.break_off``)."""
    logical = request.extensions.get(LOGICAL)
    if isinstance(logical, LogicalRequest):
        logical.break_off()


def may_be_billed(request: httpx.Request) -> bool:
    """True if *request* was sent as a metered call: without an answer, nothing says that it costs nothing."""
    logical = request.extensions.get(LOGICAL)
    return isinstance(logical, LogicalRequest) and logical.is_metered
