"""Budgets that hold: one ledger between an AI agent and its wallet, written before anything is signed.

::

    guard = Guard.from_env()
    with guard.session("court-research", budget="$5.00") as session:
        with httpx.Client(transport=GuardedTransport(session)) as http:
            opinion = http.get("https://courts.example/opinion/42")
        print(session.report().to_text())
"""

from x402guard.agent import CharsPerToken, TokenBudget
from x402guard.assets import Asset
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
from x402guard.metering import Metering, ModelPrice
from x402guard.policy import Loop, Policy, Spike, Velocity
from x402guard.refusal_from import refusal_from
from x402guard.session import Session
from x402guard.settlement import Receipt
from x402guard.signers import LocalSigner
from x402guard.tokens import TiktokenCounter
from x402guard.transport import AsyncGuardedTransport, GuardedTransport

__version__ = "0.1.0"

__all__ = [
    "ApprovalDenied",
    "Asset",
    "AsyncGuardedTransport",
    "BudgetExhausted",
    "CallTimeout",
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
    "NeedsReview",
    "NoAcceptableOffer",
    "PaidNotDelivered",
    "PaymentRefused",
    "Policy",
    "PolicyDenied",
    "Prediction",
    "ProtocolError",
    "Receipt",
    "Report",
    "Session",
    "SessionClosed",
    "SessionTripped",
    "SettlementUncertain",
    "SignerError",
    "SpendSpike",
    "Spike",
    "TiktokenCounter",
    "TokenBudget",
    "Unpriced",
    "Velocity",
    "VelocityExceeded",
    "X402GuardError",
    "__version__",
    "install",
    "refusal_from",
    "uninstall",
]
