"""What a session or a scope narrows the owner's policy to: hosts, payees and tools."""

from __future__ import annotations

from collections.abc import Collection

from msgspec import Struct

from x402guard.errors import ConfigError
from x402guard.evm import parse_address
from x402guard.ledger.authorize import Refusal
from x402guard.policy.patterns import allows_name, host_listed
from x402guard.policy.settings import Policy, as_host, each_of
from x402guard.policy.steps import shown_host


class Reach(Struct, frozen=True):
    """The hosts and payees that a block may pay, and the tools that it may use; None where it narrows nothing."""

    hosts: frozenset[str] | None = None
    payees: frozenset[str] | None = None
    tools: frozenset[str] | None = None


def reach_of(
    policy: Policy, hosts: Collection[str] | None, payees: Collection[str] | None, tools: Collection[str] | None
) -> tuple[Reach, ...]:
    """Return the narrowing by the arguments of a session; none without one.

    *hosts* and *payees* are written as in the policy, *tools* as names, or patterns such as ``search_*``. Raises
    ``ConfigError`` naming the argument, also for a host or payee that the policy does not allow.
    """
    if hosts is None and payees is None and tools is None:
        return ()
    reach = Reach(
        each_of("hosts", hosts, as_host), each_of("payees", payees, parse_address), each_of("tools", tools, as_tool)
    )
    for host in sorted(reach.hosts or ()):
        if policy.hosts is not None and host not in policy.hosts and not host_listed(host, policy.hosts):
            raise ConfigError(f"hosts: {host!r} is not in policy.hosts; a session can only narrow the policy")
    for payee in sorted(reach.payees or ()):
        if policy.payees is not None and payee not in policy.payees:
            raise ConfigError(f"payees: {payee!r} is not in policy.payees; a session can only narrow the policy")
    return (reach,)


def as_tool(name: str) -> str:
    """Return the name of a tool, or a pattern of names. Raises ``ValueError`` for anything else."""
    if not isinstance(name, str) or not name.strip() or " " in name.strip():
        raise ValueError(f"{name!r} is not the name of a tool; write 'search', or a pattern such as 'search_*'")
    return name.strip()


def judge_reach(
    reach: tuple[Reach, ...], *, host: str = "", payee: str = "", tool: str = "", begun: str = ""
) -> Refusal | None:
    """Return the refusal of a payment or a tool that one of the narrowings on the path excludes, or None.

    *begun*: the name of the first hop, if a redirect has named the host.
    """
    for part in reach:
        if host and part.hosts is not None and not host_listed(host, part.hosts):
            reason = f"{shown_host(host, begun)} is not among this session's hosts="
            return Refusal("hosts", reason, advice=_ADVICE, words=host if begun else "")
        if payee and part.payees is not None and payee not in part.payees:
            return Refusal("payees", f"payee {payee} is not among this session's payees=", advice=_ADVICE)
        if tool and part.tools is not None and not any(allows_name(one, tool) for one in part.tools):
            return Refusal("tools", f"tool {tool!r} is not among this session's tools=", advice=_ADVICE)
    return None


_ADVICE = "Finish the task with what the session may use, or open another session for this."
