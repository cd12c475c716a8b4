"""The books: holds, budgets and their journal. Pure: no clock, no storage, no network."""
