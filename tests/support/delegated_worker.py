"""A worker in a process of its own: redeems the token that it reads, and does what the task's payload says.

``python -m tests.support.delegated_worker LEDGER RPC KEY``: the token is a line on stdin. It prints what happened, as JSON.
"""

import json
import sys

import httpx

from x402guard import Guard, GuardedTransport, LocalSigner, Policy, X402GuardError


def told(function, *arguments, **more):
    """Return what a call returns, or the class and the words of its refusal."""
    try:
        found = function(*arguments, **more)
    except X402GuardError as error:
        return f"{type(error).__name__}: {error}"
    return found.status_code if isinstance(found, httpx.Response) else "done"


def main(ledger: str, rpc: str, key: str) -> None:
    settings = {"signer": LocalSigner.from_key(key), "chains": {"eip155:84532": rpc}}
    token, said = sys.stdin.readline().strip(), []
    with Guard(ledger=ledger, policy=Policy(loop=None, breaker=None), background_checks=False, **settings) as guard:
        try:
            session = guard.redeem(token)
        except X402GuardError as error:
            print(json.dumps([f"{type(error).__name__}: {error}"]))
            return
        with session, httpx.Client(transport=GuardedTransport(session), timeout=60) as http:
            print("ready", flush=True)
            sys.stdin.readline()
            for what, value in session.task.request.payload:
                if what == "get":
                    said.append(told(http.get, value))
                elif what == "use":
                    said.append(told(session.charge, value, "$0.01"))
                elif what == "submit":
                    said.append(told(session.task.submit, value))
                elif what == "answer":
                    said.append(told(session.task.answer, value, confidence=0.9))
        print(json.dumps(said))


if __name__ == "__main__":
    main(*sys.argv[1:])
