"""A process that pays as somebody who may not write, or on a disk that is full; tells what became of it as one line of JSON.

Started as root it becomes nobody first, having paid once elsewhere to load everything: root may write everywhere.
"""

import json
import os
import resource
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

from tests.support.merchant import URL, Shop, client, make_guard
from tests.support.signers import SpySigner
from x402guard import X402GuardError

NOBODY = 65_534


def told(error) -> dict:
    """What a program can read of an error, and what a person is told."""
    return {
        "kind": type(error).__name__,
        "code": error.code,
        "phase": error.phase,
        "money_may_have_moved": error.money_may_have_moved,
        "retry": error.retry,
        "message": str(error),
        "advice": error.advice,
    }


def _cents(session) -> dict:
    return {"spent": int(session.spent * 100), "held": int(session.held * 100)}


def pay(ledger, *, shop=None, url=URL) -> dict:
    """Open the ledger, pay $0.01 in session ``s``, and say how it went."""
    signer, shop = SpySigner(), shop or Shop()
    try:
        with make_guard(ledger, signer=signer) as guard, guard.session("s", budget="$1.00", id="s_1") as session:
            client(session, shop).get(url)
            return {**_cents(session), "signed": len(signer.signed)}
    except X402GuardError as error:
        return {**told(error), "signed": len(signer.signed), "payments": len(shop.payments)}


@contextmanager
def full_disk():
    """No file may grow past where the largest stands: what a disk without room says to a writer."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def as_nobody(ledger) -> list:
    return [pay(ledger)]


def full(ledger) -> list:
    """Pay; fail to on a full disk; pay again with room. One guard all along."""
    signer, shop, seen = SpySigner(), Shop(), []
    with make_guard(ledger, signer=signer) as guard, guard.session("s", budget="$1.00") as session:
        http = client(session, shop)

        def note(**more):
            more |= {"signed": len(signer.signed), "payments": len(shop.payments)}
            seen.append({**more, **_cents(session)})

        http.get(URL)
        note()
        with full_disk():
            try:
                http.get(f"{URL}/2")
            except X402GuardError as error:
                note(**told(error))
        note()
        http.get(f"{URL}/2")
        note()
    return seen


def full_after(ledger) -> list:
    """The disk fills up between the signature and the receipt; the answer is handed over, and the books hold the money."""
    signer, seen = SpySigner(), []
    limit = full_disk()

    def paid(request, shop):
        limit.__enter__()
        shop.paid = None
        return shop(request)

    shop = Shop(paid=paid)
    with make_guard(ledger, signer=signer) as guard, guard.session("s", budget="$1.00") as session:
        http = client(session, shop)
        answer = http.get(URL)
        receipt = answer.extensions["x402guard"]
        seen.append({"status": answer.status_code, "in_doubt": receipt.in_doubt, "signed": len(signer.signed)})
        limit.__exit__(None, None, None)
        seen.append({**_cents(session), "nonces": len(shop.nonces)})
    return seen


def full_crowd(ledger) -> list:
    """Many threads pay at once: on a full disk, where they share commits that fail, and again with room."""
    signer, shop, seen = SpySigner(), Shop(), []
    with make_guard(ledger, signer=signer) as guard, guard.session("s", budget="$1.00") as session:
        http = client(session, shop)
        http.get(URL)

        def buy(number) -> str:
            try:
                return str(http.get(f"{URL}/{number}").status_code)
            except X402GuardError as error:
                return type(error).__name__

        def crowd() -> None:
            with ThreadPoolExecutor(12) as pool:
                outcomes = sorted(set(pool.map(buy, range(24))))
            seen.append({"outcomes": outcomes, "signed": len(signer.signed), **_cents(session)})

        with full_disk():
            crowd()
        crowd()
    return seen


def main() -> None:
    way, ledger = sys.argv[1:]
    if way == "as_nobody" and os.getuid() == 0:
        "".encode("ascii")
        with tempfile.TemporaryDirectory() as folder:
            pay(f"sqlite:///{folder}/warm.db")
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)
    ways = {"as_nobody": as_nobody, "full": full, "full_after": full_after, "full_crowd": full_crowd}
    print(json.dumps(ways[way](ledger)))


if __name__ == "__main__":
    main()
