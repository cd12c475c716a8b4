"""An agent with five actions on a database and a mailbox, which kills itself at a named moment of one of them.

``python -m tests.support.undoing_agent LEDGER NUMBER MOMENT``; the database and the mail server stand in the environment.
"""

import os
import signal
import smtplib
import sqlite3
import sys
from email.message import EmailMessage

import x402guard

HOME = "tests.support.undoing_agent"
MOMENTS = ("before", "begun", "acted", "after")
STEPS = 5
_DIES_AT: tuple[str, str] = ("", "")


def moment(number, name):
    """Die here, if this is where this process is to die."""
    if (str(number), name) == _DIES_AT:
        os.kill(os.getpid(), signal.SIGKILL)


def change(sql, *values):
    file = sqlite3.connect(os.environ["APP_DB"])
    with file:
        file.execute(sql, values)
    file.close()


@x402guard.reversible(undo=f"{HOME}:remove")
def insert(number, name):
    moment(number, "begun")
    change("INSERT INTO rows VALUES (?, 0)", name)
    moment(number, "acted")


def remove(action):
    change("DELETE FROM rows WHERE name = ?", action.arguments["name"])


@x402guard.reversible(undo=f"{HOME}:restore")
def delete_softly(number, name):
    moment(number, "begun")
    change("UPDATE rows SET deleted = 1 WHERE name = ?", name)
    moment(number, "acted")
    return {"was": 0}


def restore(action):
    change("UPDATE rows SET deleted = 0 WHERE name = ?", action.arguments["name"])


def mail(subject):
    message = EmailMessage()
    message["From"], message["To"], message["Subject"] = "agent@research.example", "ada@research.example", subject
    with smtplib.SMTP("127.0.0.1", int(os.environ["MAIL_PORT"]), timeout=20) as server:
        server.send_message(message)


@x402guard.reversible(undo=f"{HOME}:cannot_unsend")
def send(number, subject):
    moment(number, "begun")
    mail(subject)
    moment(number, "acted")


class SentAlreadyError(Exception):
    pass


def cannot_unsend(action):
    raise SentAlreadyError(action.arguments["subject"])


@x402guard.reversible(undo=f"{HOME}:cannot_unsend", delay_s=60)
def send_later(number, subject):
    mail(subject)


def main(url):
    with x402guard.Guard(ledger=url) as guard, guard.session("agent", budget="$1.00", id="run-1"):
        steps = (
            lambda: insert(1, "new"),
            lambda: delete_softly(2, "old"),
            lambda: send_later(3, "staged"),
            lambda: insert(4, "newer"),
            lambda: send(5, "sent"),
        )
        for number, step in enumerate(steps, 1):
            moment(number, "before")
            step()
            moment(number, "after")


if __name__ == "__main__":
    _DIES_AT = (sys.argv[2], sys.argv[3])
    sys.modules[HOME] = sys.modules["__main__"]
    main(sys.argv[1])
