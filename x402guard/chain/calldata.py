"""Decodes the calldata of settling transactions: which authorization, which payer and payee, and which amount.

Sources: EIP-3009 (transferWithAuthorization), Permit2's SignatureTransfer, the x402 proxies of ``exact`` and ``upto``.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, Final

from x402guard.chain.rpc import selector
from x402guard.kernel.evm import Address
from x402guard.kernel.intent import Intent
from x402guard.kernel.typed_data import EXACT_PROXY, UPTO_PROXY

_PERMIT: Final = "((address,uint256),uint256,uint256)"
_PERMIT_2612: Final = "(uint256,uint256,bytes32,bytes32,uint8)"
_EXACT_WITNESS: Final = "(address,uint256)"
_UPTO_WITNESS: Final = "(address,address,uint256)"
_AUTHORIZATION: Final = ("address", "address", "uint256", "uint256", "uint256", "bytes32")
_TRANSFERS: Final = tuple((*_AUTHORIZATION, *signature) for signature in (("uint8", "bytes32", "bytes32"), ("bytes",)))
_EXACT: Final = (_PERMIT, "address", _EXACT_WITNESS, "bytes")
_UPTO: Final = (_PERMIT, "uint256", "address", _UPTO_WITNESS, "bytes")

Arguments = tuple[Any, ...]


def amount_settled(intent: Intent, to: str, data: bytes) -> int | None:
    """Return the amount of *intent* that a call to *to* settles, in atomic units; None for another call or payment."""
    # Each such call has the nonce as one word. To decode the others takes far longer.
    if intent.nonce.to_bytes(32, "big") not in data:
        return None
    for contract, name, types, amount_of in _settling_calls(intent):
        if to.lower() == contract.lower():
            arguments = _decoded(name, types, data)
            if arguments is not None:
                return amount_of(arguments)
    return None


def nonce_settled(token: Address, to: str, data: bytes) -> int | None:
    """Return the nonce that a call to *to* uses if it is a known settlement in *token*, by any payer; else None."""
    if to.lower() == token.lower():
        for types in _TRANSFERS:
            arguments = _decoded("transferWithAuthorization", types, data)
            if arguments is not None:
                return int.from_bytes(arguments[5], "big")
    for proxy, plain in ((EXACT_PROXY, _EXACT), (UPTO_PROXY, _UPTO)):
        if to.lower() == proxy.lower():
            for name, types, at in (("settle", plain, 0), ("settleWithPermit", (_PERMIT_2612, *plain), 1)):
                arguments = _decoded(name, types, data)
                if arguments is not None:
                    return int(arguments[at][1])
    return None


def _decoded(name: str, types: tuple[str, ...], data: bytes) -> Arguments | None:
    """Return a call's arguments, or None for another call. Ignores trailing bytes: facilitators append a suffix."""
    if data[:4] != _selector(name, types):
        return None
    return (_decode_again if len(data) <= _SMALL_CALL else _decode)(types, data[4:])


_selector: Final = lru_cache(maxsize=64)(selector)


def _decode(types: tuple[str, ...], data: bytes) -> Arguments | None:
    from eth_abi.abi import decode
    from eth_abi.exceptions import DecodingError

    try:
        return decode(types, data, strict=False)
    except (DecodingError, OverflowError):
        return None


# One transaction is looked at for each payment that it may settle, and again by each check.
_decode_again: Final = lru_cache(maxsize=256)(_decode)
_SMALL_CALL: Final = 2_048


Call = tuple[Address, str, tuple[str, ...], Callable[[Arguments], int | None]]


def _settling_calls(intent: Intent) -> list[Call]:
    if intent.method == "eip3009":
        return [(intent.token, "transferWithAuthorization", types, _by_authorization(intent)) for types in _TRANSFERS]
    proxy, plain = (EXACT_PROXY, _EXACT) if intent.scheme == "exact" else (UPTO_PROXY, _UPTO)
    return [
        (proxy, "settle", plain, _by_permit(intent)),
        (proxy, "settleWithPermit", (_PERMIT_2612, *plain), lambda args: _by_permit(intent)(args[1:])),
    ]


def _by_authorization(intent: Intent) -> Callable[[Arguments], int | None]:
    def amount(args: Arguments) -> int | None:
        payer, payee, value, _, _, nonce = args[:6]
        ours = (intent.payer.lower(), intent.payee.lower(), intent.amount_atomic, intent.nonce)
        return value if (payer, payee, value, int.from_bytes(nonce, "big")) == ours else None

    return amount


def _by_permit(intent: Intent) -> Callable[[Arguments], int | None]:
    def amount(args: Arguments) -> int | None:
        ((token, ceiling), nonce, _), *rest = args
        settled = rest.pop(0) if intent.scheme == "upto" else ceiling
        payer, witness = rest[0], rest[1]
        ours = (intent.token.lower(), intent.amount_atomic, intent.nonce, intent.payer.lower(), intent.payee.lower())
        right = (token, ceiling, nonce, payer, witness[0]) == ours and settled <= ceiling
        return settled if right else None

    return amount
