"""Budgets that hold: one ledger between an AI agent and its wallet, written before anything is signed.

::

    guard = Guard.from_env()
    with guard.session("court-research", budget="$5.00") as session:
        with httpx.Client(transport=GuardedTransport(session)) as http:
            opinion = http.get("https://courts.example/opinion/42")
        print(session.report().to_text())
"""

from typing import TYPE_CHECKING, Any

from x402guard.assets import Asset
from x402guard.chain.settings import Chain
from x402guard.errors import (
    AlreadyPaid,
    ApprovalDenied,
    BudgetExhausted,
    CallTimeout,
    CircuitOpen,
    ConfigError,
    IllegalTransition,
    InconsistentLedger,
    LedgerUnavailable,
    LoopDetected,
    NeedsReview,
    NoAcceptableOffer,
    PaidNotDelivered,
    PaymentRefused,
    PolicyDenied,
    ProtocolError,
    SessionClosed,
    SessionTripped,
    SettlementUncertain,
    SignerError,
    SpendSpike,
    TokensExhausted,
    Unpriced,
    VelocityExceeded,
    X402GuardError,
)
from x402guard.flow.receipt import Receipt
from x402guard.flow.surroundings import VERSION
from x402guard.guard.account import Outstanding
from x402guard.guard.guard import Guard
from x402guard.guard.in_context import reversible, tool
from x402guard.guard.install import install, uninstall
from x402guard.guard.named_budget import NamedBudget
from x402guard.guard.notices import Webhook
from x402guard.guard.session import Session, current_session
from x402guard.http.refusal_from import refusal_from
from x402guard.http.transport import AsyncGuardedTransport, GuardedTransport
from x402guard.ledger.actions import Action
from x402guard.ledger.inputs import Input
from x402guard.ledger.queries import Prediction
from x402guard.ledger.view import Notice
from x402guard.llm import Endpoint, Metering, ModelPrice
from x402guard.policy import (
    Answer,
    ApprovalRequest,
    Approvals,
    Breaker,
    Bulkhead,
    Loop,
    Narrow,
    Policy,
    Risk,
    Rule,
    Seller,
    Spike,
    Timeouts,
    Velocity,
)
from x402guard.tools import CharsPerToken, TokenBudget
from x402guard.vendors.tiktoken_counter import TiktokenCounter
from x402guard.views.report import Report
from x402guard.x402.cancel import Cancellation
from x402guard.x402.reconciled import Reconciliation
from x402guard.x402.signer import LocalSigner

if TYPE_CHECKING:
    from x402guard.adapters.a2a_client import GuardedA2AClient
    from x402guard.adapters.mcp_client import GuardedMCPSession
    from x402guard.adapters.official_sdk import GuardedSigner
    from x402guard.delegation.handles import Delegated, Task
    from x402guard.delegation.messages import TaskRequest, TaskResult
    from x402guard.guard.owner import Owner
    from x402guard.guard.signed_report import Anchor, ReportKey, SignedReport, verify_anchor, verify_report

__version__ = VERSION

__all__ = [
    "Action",
    "AlreadyPaid",
    "Anchor",
    "Answer",
    "ApprovalDenied",
    "ApprovalRequest",
    "Approvals",
    "Asset",
    "AsyncGuardedTransport",
    "Breaker",
    "BudgetExhausted",
    "Bulkhead",
    "CallTimeout",
    "Cancellation",
    "Chain",
    "CharsPerToken",
    "CircuitOpen",
    "ConfigError",
    "Delegated",
    "Endpoint",
    "Guard",
    "GuardedA2AClient",
    "GuardedMCPSession",
    "GuardedSigner",
    "GuardedTransport",
    "IllegalTransition",
    "InconsistentLedger",
    "Input",
    "LedgerUnavailable",
    "LocalSigner",
    "Loop",
    "LoopDetected",
    "Metering",
    "ModelPrice",
    "NamedBudget",
    "Narrow",
    "NeedsReview",
    "NoAcceptableOffer",
    "Notice",
    "Outstanding",
    "Owner",
    "PaidNotDelivered",
    "PaymentRefused",
    "Policy",
    "PolicyDenied",
    "Prediction",
    "ProtocolError",
    "Receipt",
    "Reconciliation",
    "Report",
    "ReportKey",
    "Risk",
    "Rule",
    "Seller",
    "Session",
    "SessionClosed",
    "SessionTripped",
    "SettlementUncertain",
    "SignedReport",
    "SignerError",
    "SpendSpike",
    "Spike",
    "Task",
    "TaskRequest",
    "TaskResult",
    "TiktokenCounter",
    "Timeouts",
    "TokenBudget",
    "TokensExhausted",
    "Unpriced",
    "Velocity",
    "VelocityExceeded",
    "Webhook",
    "X402GuardError",
    "__version__",
    "current_session",
    "install",
    "refusal_from",
    "reversible",
    "tool",
    "uninstall",
    "verify_anchor",
    "verify_report",
]


_LATER = {
    "adapters.a2a_client": {"GuardedA2AClient"},
    "adapters.mcp_client": {"GuardedMCPSession"},
    "adapters.official_sdk": {"GuardedSigner"},
    "delegation.handles": {"Delegated", "Task"},
    "delegation.messages": {"TaskRequest", "TaskResult"},
    "guard.owner": {"Owner"},
    "guard.signed_report": {"Anchor", "ReportKey", "SignedReport", "verify_anchor", "verify_report"},
}
"""What an agent that pays over httpx does not need loads at its first use: the module of each, and its names."""


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> Any:
    """Load what most programs do not need, or what needs pydantic or httpx2, at its first use."""
    from importlib import import_module

    if name == "httpx2":
        return import_module("x402guard.httpx2")
    for module, names in _LATER.items():
        if name in names:
            return getattr(import_module(f"x402guard.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
