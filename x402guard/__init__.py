"""Budgets that hold: one ledger between an AI agent and its wallet, written before anything is signed.

::

    guard = Guard.from_env()
    with guard.session("court-research", budget="$5.00") as session:
        with httpx.Client(transport=GuardedTransport(session)) as http:
            opinion = http.get("https://courts.example/opinion/42")
        print(session.report().to_text())
"""

from x402guard.accounts import Outstanding
from x402guard.agent import CharsPerToken, TokenBudget
from x402guard.assets import Asset
from x402guard.cancelling import Cancellation
from x402guard.chain import Chain
from x402guard.errors import (
    ApprovalDenied,
    BudgetExhausted,
    CallTimeout,
    CircuitOpen,
    ConfigError,
    IllegalTransition,
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
    Unpriced,
    VelocityExceeded,
    X402GuardError,
)
from x402guard.guard import Guard
from x402guard.install import install, uninstall
from x402guard.ledger.prediction import Prediction
from x402guard.ledger.report import Report
from x402guard.ledger.view import Notice
from x402guard.metering import Metering, ModelPrice
from x402guard.named_budgets import NamedBudget
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
    Spike,
    Timeouts,
    Velocity,
)
from x402guard.reconciliation import Reconciliation
from x402guard.refusal_from import refusal_from
from x402guard.session import Session
from x402guard.settlement import Receipt
from x402guard.signers import LocalSigner
from x402guard.telling import Webhook
from x402guard.tokens import TiktokenCounter
from x402guard.transport import AsyncGuardedTransport, GuardedTransport

__version__ = "0.1.0"

__all__ = [
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
    "Guard",
    "GuardedTransport",
    "IllegalTransition",
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
    "PaidNotDelivered",
    "PaymentRefused",
    "Policy",
    "PolicyDenied",
    "Prediction",
    "ProtocolError",
    "Receipt",
    "Reconciliation",
    "Report",
    "Risk",
    "Rule",
    "Session",
    "SessionClosed",
    "SessionTripped",
    "SettlementUncertain",
    "SignerError",
    "SpendSpike",
    "Spike",
    "TiktokenCounter",
    "Timeouts",
    "TokenBudget",
    "Unpriced",
    "Velocity",
    "VelocityExceeded",
    "Webhook",
    "X402GuardError",
    "__version__",
    "install",
    "refusal_from",
    "uninstall",
]
