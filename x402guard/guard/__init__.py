"""What users hold in their hands: Guard, Session, settings, approvers, notices, install."""

__all__: list[str] = []
