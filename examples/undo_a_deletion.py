"""An agent deletes customers softly, and the rows it should not have touched are restored when its session fails.

Run it with ``python examples/undo_a_deletion.py`` after ``pip install x402guard``.
"""

import sqlite3

import x402guard
from x402guard import Action, Guard

crm = sqlite3.connect("crm.db")


def restore(action: Action) -> None:
    """Undo ``delete``: show the customer again. It may run twice, and in another process after a crash."""
    with crm:
        crm.execute("UPDATE customers SET deleted = 0 WHERE name = ?", (action.arguments["name"],))


@x402guard.reversible(undo="__main__:restore")  # in a program of several files, its module's own name
def delete(name: str) -> None:
    """Hide a customer."""
    with crm:
        crm.execute("UPDATE customers SET deleted = 1 WHERE name = ?", (name,))


def check(name: str) -> None:
    """Find out what a deletion was worth, too late."""
    raise ValueError(f"{name} is a customer of ours")


def shown() -> list[str]:
    """Return the customers that are not deleted."""
    return [name for (name,) in crm.execute("SELECT name FROM customers WHERE NOT deleted ORDER BY name")]


def main() -> None:
    """Delete two customers for good; then delete a third in a run that fails."""
    with crm:
        crm.execute("CREATE TABLE customers (name TEXT, deleted INTEGER DEFAULT 0)")
        crm.executemany("INSERT INTO customers (name) VALUES (?)", [("Ada",), ("Bob",), ("Eve",), ("Mallory",)])
    with Guard(ledger="sqlite:///spend.db") as guard:
        with guard.session("clean-up", budget="$1.00", id="clean-up-1") as session:
            delete("Eve")
            session.commit()  # from here on it is final, whatever happens later
            delete("Mallory")
        print("after a run that went well:", ", ".join(shown()))
        try:
            with guard.session("clean-up", budget="$1.00", id="clean-up-2"):
                delete("Ada")
                check("Ada")
        except ValueError as error:
            print("the next run failed:", error)
        print("and left behind:", ", ".join(shown()))


if __name__ == "__main__":
    main()
