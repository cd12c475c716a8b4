"""Signers that do something around a signature: they watch, or let others act first."""

from tests.support.merchant import KEY
from x402guard import LocalSigner


class SpySigner:
    """A signer that does something around every signature of the real one, and counts them."""

    inline = False

    def __init__(self, *, before=None, after=None) -> None:
        self.inner = LocalSigner.from_key(KEY)
        self.before = before
        self.after = after
        self.signed = []

    @property
    def address(self):
        return self.inner.address

    def bind(self, lookup) -> None:
        self.inner.bind(lookup)

    def sign(self, hold) -> bytes:
        if self.before is not None:
            self.before(hold)
        signature = self.inner.sign(hold)
        self.signed.append(hold)
        return signature if self.after is None else self.after(signature)


class Stalling:
    """A signer that lets somebody else act between the commit and the signature."""

    inline = True

    def __init__(self, meanwhile):
        self._signer = LocalSigner.from_key(KEY)
        self.address = self._signer.address
        self._meanwhile = [meanwhile]

    def bind(self, lookup):
        self._signer.bind(lookup)

    def sign(self, hold):
        while self._meanwhile:
            self._meanwhile.pop()()
        return self._signer.sign(hold)
