"""Delegation: a task for another agent, its token, what it may do, and its result."""
