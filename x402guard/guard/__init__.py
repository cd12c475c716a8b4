"""The user's interface: Guard, Session, settings, approvers, notices, install."""

__all__: list[str] = []
