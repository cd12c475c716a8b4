"""What all requests of a process share: the thread that cuts bodies off, and the payments that were made."""

import threading
import time

from x402guard.http import request
from x402guard.http.deadline import Watch, _Cutter


def test_a_deadline_in_thousands_of_years_stops_no_other():
    cutter, is_cut, far = _Cutter(), threading.Event(), Watch(10.0**12, None)
    cutter.look_after(far, lambda: None)
    time.sleep(0.2)  # until its thread waits for that one
    near = Watch(0.05, None)
    cutter.look_after(near, is_cut.set)
    assert is_cut.wait(10)
    far.end()


def test_payments_that_threads_make_at_once_are_all_remembered(monkeypatch):
    others = []

    class Interrupted(dict):
        """Between the first look at it and the next, another thread makes a payment."""

        def __iter__(self):
            found = super().__iter__()
            if not others:
                others.append(threading.Thread(target=request.note_made, args=([], {"n": "other"})))
                others[0].start()
                others[0].join(0.3)
            return found

    made = Interrupted({bytes([n]): None for n in range(3)})
    monkeypatch.setattr(request, "_MADE", made)
    monkeypatch.setattr(request, "_MOST_MADE", 3)
    request.note_made([], {"n": "this"})
    others[0].join()
    digests = {request.member_digest({"n": name}) for name in ("other", "this")}
    assert digests <= set(made)
    assert len(made) == 3
