"""What people and other systems are shown of a ledger: pure functions of its rows."""
