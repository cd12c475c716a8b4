"""Finds the session in context, for what is declared once for all sessions: tools, and the clients of ``install``."""

from __future__ import annotations

from typing import Final

from x402guard.errors import ConfigError
from x402guard.guard.charges import DeclaresTools
from x402guard.guard.session import Session, current_session


class InContext(DeclaresTools):
    """Pays from the innermost session in context, or else from the installed one.

    ``x402guard.tool`` is its ``tool``: a decorator for functions that are declared before there is a session.
    """

    def __init__(self) -> None:
        self.installed: Session | None = None

    def innermost(self) -> Session:
        """Return the innermost budget in context. Raises ``ConfigError`` if there is none."""
        session = current_session() or self.installed
        if session is None:
            raise ConfigError(
                "session: none is in context; enter `with guard.session(…)` around this call, and in a plain thread wrap "
                "the function with session.bind(…)"
            )
        return session.innermost()


IN_CONTEXT: Final = InContext()

tool: Final = IN_CONTEXT.tool
