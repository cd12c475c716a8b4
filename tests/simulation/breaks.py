"""Deliberate breaks of the library, each of which the simulator has to find within 200,000 steps.

S1 to S9 are the faults that its prototype found, with their mends taken out. ``python -m tests.simulation.breaks`` runs
them all in copies of the package, and prints the table of ``docs/explanation/simulation.md``.
"""

import json
import secrets
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "x402guard"
MOST_STEPS = 200_000

_PLAYER = """
import json, sys
from x402guard.testing.simulator import as_test, minimise, simulate
steps, first, runs = 0, int(sys.argv[1]), 0
while steps < int(sys.argv[2]):
    result = simulate([first + runs], stop_at=1, store=sys.argv[4])
    steps, runs = steps + result.counts.steps, runs + 1
    if result.violations:
        found = result.violations[0]
        told = {"steps": steps - result.counts.steps + found.step, "kind": found.kind, "seed": found.case.seed}
        if sys.argv[3] == "keep":
            told["test"] = as_test(minimise(found))
        print(json.dumps(told))
        break
else:
    print(json.dumps({"steps": steps, "kind": ""}))
"""

BREAKS = (
    ("S1: only holds on the path of a booking lapse", "stores/transacts.py",
     "due = list(rows.due(now_ms // 1000, DUE_AT_ONCE)) if found else []",
     "due = [hold for hold in rows.due(now_ms // 1000, DUE_AT_ONCE) if hold.node_id in nodes]"),
    ("S2: the goods of a payment that was presented again are withheld", "x402/flow.py",
     "if authorized.represented and not authorized.polls and not succeeded(reply.status) and was_taken(hold):",
     "if authorized.represented and was_taken(hold):"),
    ("S3a: a purchase stays remembered only while its hold is live", "ledger/purchases.py",
     "if hold.delivery in _OPEN and (hold.state is HoldState.HELD or _is_remembered(view, hold, memory_ms))",
     "if hold.delivery in _OPEN and hold.state is HoldState.HELD"),
    ("S3b: a body that breaks counts as handed over", "x402/delivery.py",
     '    if end == "cut":\n        yield from note_cut(context, presentation)',
     '    if end == "cut":\n        yield Transact(scope, lambda view: hand_over(view, presentation))'),
    ("a short answer that breaks counts as handed over", "x402/flow.py", 'return "late"', 'return "whole"'),
    ("a short answer that is cut off counts as handed over", "x402/delivery.py",
     "lose(view, presentation).delivery is Delivery.LOST:", "view.known_hold(presentation[0]).delivery is Delivery.LOST:"),
    ("S3c: a doubt on a captured payment is not noted", "x402/settlement.py",
     """            view.put_mark(place, {"hold": hold.id, "until": hold.deadline_unix})
        return ending.change(view) if answered else lose(view, presentation_of(hold))""",
     """            view.put_mark(place, {"hold": hold.id, "until": hold.deadline_unix})
            return ending.change(view) if answered else lose(view, presentation_of(hold))
        return hand_over(view, presentation_of(hold))"""),
    ("S4: a block that is undone after midnight trips nothing", "ledger/evidence.py",
     "    trip_exceeded(view, after.node_id)  # what was freed may be used again, and what was reopened counts in this window",
     ""),
    ("S5: a sweep asks about the same live holds again and again", "stores/transacts.py",
     "(found if scope.live_first else sorted(found, key=least_checked))[: scope.sweep]",
     "sorted(found, key=lambda hold: hold.created_ms)[: scope.sweep]"),
    ("S6: an error of a limited node passes for its answer, and is never asked about again", "ledger/evidence.py",
     "unshown = hold.captured > 0 and hold.proof is None and hold.deadline_unix >= now_unix - UNSHOWN_S", "unshown = False",
     ("chain/rpc.py", "    return code in _RATE_CODES or _RATE_WORDS.search(str(problem)[:1_000]) is not None", "    return False")),
    ("S7a: any fitting payment explains a Transfer", "ledger/evidence.py",
     "for _, _, key, hold_id in sorted(found)]", "for _, _, key, hold_id in found]"),
    ("S7b: an undecided payment's Transfer is told as a theft", "x402/reconciliation.py",
     "elif known is None or not (known or waits):", "elif not known:"),
    ("the undecided payments are read before the chain", "x402/reconciliation.py",
     "undecided, unshown = partial(_undecided, store),", "undecided, unshown = partial(list, _undecided(store)),"),
    ("S8: a guard does not know that its owner has changed the wallet's limit", "ledger/sessions.py",
     " or is_owners_limit(set_by_owner, limit, wallet.limit):", ":"),
    ("S9: any payment in the block of a cancellation hides it", "chain/logs.py",
     "in (None, intent.nonce):", "is not Ellipsis:"),
    ("a new reconciliation takes what another has explained for a theft", "ledger/evidence.py",
     "    if proven_by(view.mark(proof)) is not None:\n        return True\n    waiting = dict", "    waiting = dict",
     ("x402/reconciliation.py",
      "    return proven_by((yield from _read_mark(proof))) is not None  # another reconciliation may have explained it", "    return False")),
    ("a Transfer is explained by an upto, although an exact payment has just its amount", "ledger/evidence.py",
     "found.append((ceiling, not exactly, key, hold_id))", "found.append((ceiling, False, key, hold_id))"),
    ("a clock that was set right stays behind", "stores/transacts.py", "    if ahead_ms:\n", "    if False:\n"),
    ("a capture closes at the ledger's last time, not at the clock's", "kernel/windows.py",
     "    now_ms = max(clock_ms, begun_ms)\n", "    now_ms = clock_ms + 86_400_000\n"),
    ("no budget is ever short", "ledger/budgets.py", "if room is not None and amount > room:", "if False:"),
    ("only the innermost budget is asked", "ledger/budgets.py",
     "amount = max(0, node.used + amount - node.granted_in)", "break"),
    ("budgets refuse what fits exactly", "ledger/budgets.py", "and amount > room:", "and amount >= room:"),
    ("grants are never returned", "ledger/budgets.py", "        if delta == 0:\n", "        if delta <= 0:\n"),
    ("payments use the reserve", "ledger/budgets.py",
     "return node.room if node.id in finalizing else plain_room(node)", "return node.room"),
    ("a tripped budget authorizes", "ledger/authorize.py", "if node.state is NodeState.TRIPPED:", "if False:"),
    ("a closed session authorizes", "ledger/authorize.py", "if node.state is NodeState.CLOSED and not ended", "if False and not ended"),
    ("an overshoot trips nothing", "ledger/budgets.py",
     "if node.kind is not NodeKind.TOKENS and is_past_limit(view, node.id):", "if False:"),
    ("a window starts without what is held", "kernel/windows.py",
     "past=node.used - node.live", "past=node.used"),
    ("a window forgets nothing", "kernel/windows.py", "past=node.used - node.live", "past=node.past"),
    ("a correction counts in the wrong window", "kernel/windows.py",
     "return max(0, node.past - less)", "return node.past + less"),
    ("a payment without an answer is given back", "x402/flow.py",
     "unsent = None if authorized.represented else failure.unsent(hold.id)", "unsent = Unsent(hold.id)"),
    ("a payment that was presented before is given back", "x402/flow.py",
     "unsent = None if authorized.represented else failure.unsent(hold.id)", "unsent = failure.unsent(hold.id)"),
    ("a void does not ask who presents the payment now", "x402/settlement.py",
     "if proof is not None and hold.state is HoldState.HELD and hold.presented == presented:", "if proof is not None and hold.state is HoldState.HELD:"),
    ("a remote signer that times out has signed nothing", "x402/flow.py",
     """        # A remote signer may have signed before it timed out.
        raise (
            yield from _uncertain(context, hold, f"signing failed: {type(error).__name__}", error, sent=False)
        ) from error""",
     """        yield from _give_back(context, hold, "signing failed", error, hold.presented)
        raise"""),
    ("a cancelled payment in flight is given back", "x402/flow.py",
     """        yield from _uncertain(context, hold, "cancelled while the payment was in flight", error, sent=False)
        raise""",
     """        yield from _give_back(context, hold, "cancelled", error, hold.presented)
        raise"""),
    ("an unused nonce frees a payment that is still valid", "ledger/evidence.py",
     "    dead = hold.payment().dead_at(block_time)\n", "    dead = True\n"),
    ("the latest block counts as final", "chain/reader.py",
     '        return Block.of(rpc.call("eth_getBlockByNumber", finality, False))', '        return Block.of(rpc.call("eth_getBlockByNumber", "latest", False))'),
    ("a remainder comes back before its block is final", "ledger/evidence.py",
     "    row = view.mark(EXPOSED) if most else None\n", "    return True\n    row = None\n"),
    ("an upto is believed", "x402/settlement.py", 'believe = intent.scheme == "exact" or', "believe = True or"),
    ("a cancellation passes for a payment", "chain/logs.py",
     "if log.topics == (CANCELED, padded(intent.payer), nonce):", "if False:"),
    ("an exact payment is captured without its last unit", "x402/settlement.py",
     "return Claim(hold.amount, receipt.transaction)  # exact", "return Claim(Nanos(hold.amount - 1), receipt.transaction)  # exact"),
    ("a lapse captures nothing", "ledger/transitions.py",
     "hold, state=target, captured=hold.amount, evidence=Evidence.ASSUMED", "hold, state=target, captured=NOTHING, evidence=Evidence.ASSUMED"),
    ("no purchase is known to be open", "ledger/purchases.py", "        if hold.delivery in _OPEN and (", "        if False and ("),
    ("no purchase is ever lost", "ledger/purchases.py",
     "if hold.delivery is Delivery.LOST or (own and presentation_of(hold) not in in_flight):", "if False:"),
    ("a named purchase is bought again", "ledger/purchases.py",
     "    known = hold is not None and (hold.state is HoldState.HELD or _is_remembered(view, hold, memory_ms))\n", "    known = False\n"),
    ("the index of open purchases forgets lost ones", "stores/memory_rows.py",
     "hold.delivery in (Delivery.OPEN, Delivery.LOST)", "hold.delivery is Delivery.OPEN"),
    ("an LLM call without an answer costs nothing", "llm/flow.py",
     'yield from _capture_anyway(context, granted, f"no answer: {error_name(failure)}", failure, outcome="failed")',
     'yield from give_back(context, hold, "no answer", failure, granted.marks)'),
    ("a bill above the ceiling is cut", "flow/capture.py",
     "apply(view, now.id, _capture(bill), bill.proof(now))", "apply(view, now.id, Capture(min(bill.amount, now.amount), bill.evidence), bill.proof(now))"),
    ("the usage of an answer is not read to its end", "llm/flow.py",
     "flight.reader.answer(ended=ended)", "flight.reader.answer(ended=ended) and AnswerReader('chat', '', '', hides_usage=False, keeps_text=False).answer(ended=True)"),
    ("the journal's chain is not linked", "ledger/view.py", "granted_out, data, node.head)\n", 'granted_out, data, "")\n'),
    ("the amounts held below a budget are not added up", "ledger/view.py",
     "replace(each, live=each.live + held)", "replace(each, live=each.live)"),
    ("one payment may cost more than its cap", "x402/offer_rules.py",
     "    if limit is None or amount <= limit:\n", "    if limit is None or amount:\n"),
    ("several nodes may answer one read of the chain", "chain/reader.py",
     "    for node in rpc.each_node():\n", "    for node in (rpc,):\n"),
    ("every Transfer is explained", "x402/reconciliation.py",
     "    return proven_by((yield from _read_mark(proof))) is not None  # another reconciliation may have explained it", "    return True"),
    ("no other endpoint is asked before budget comes back", "chain/reader.py",
     "            for other in node.others():\n                seen", "            for other in ():\n                seen"),
    ("an endpoint that is led to another chain is believed", "chain/reader.py",
     "        node.check_chain()  # an endpoint may have been led to another chain, on which every nonce is unused\n", ""),
    ("one endpoint says alone what has left the wallet", "chain/reader.py",
     "            for other in rpc.others():\n", "            for other in ():\n"),
    ("a redirect that is followed counts as handed over", "http/answer_end.py",
     'if end != "whole" or self._broke', "if True or self._broke"),
    ("what was handed over stays open", "ledger/purchases.py",
     "return _put(view, hold, Delivery.DONE) if concerned else hold", "return hold"),
    ("a presentation that brought nothing loses what another one brought", "ledger/purchases.py",
     "    if presentation_of(hold) != presentation or hold.delivery in (", "    if hold.delivery in ("),
    ("one payment that cannot be read ends a background check", "x402/settlement.py",
     "more = seen == SWEEP_SIZE and not unreadable", "more = seen == SWEEP_SIZE and not asked"),
    ("a background check asks a slow chain again and again", "x402/settlement.py",
     "min(since_ms, view.now_ms - SWEEP_PAUSE_MS)", "view.now_ms - SWEEP_PAUSE_MS"),
    ("a sweep stops after its first part", "x402/settlement.py",
     "more = seen == SWEEP_SIZE and not unreadable", "more = False"),
    ("a seller's words stand in the reason of a doubt", "x402/settlement.py",
     'return Doubt(f"status {reply.status}, settlement failed", receipt.transaction, receipt.error_reason or "")',
     'return Doubt(f"status {reply.status}, settlement failed: {receipt.error_reason}", receipt.transaction)'),
    ("a void of a tool that ran", "tools/flow.py", "        if end.void is not None:\n",
     "        end = replace(end, void=end.void or 'gone') if end.amount else end\n        if end.void is not None:\n"),
    ("a report leaves out what is assumed", "views/report_keys.py", "Evidence.ASSUMED", "Evidence.ESTIMATE"),
    ("fleet: a session draws without a look at what is left", "ledger/budgets.py",
     "spare = min(spare, max(0, free - need) // _PART)", "pass"),
    ("fleet: what has ended keeps what is idle", "ledger/budgets.py",
     "    if node.state is not NodeState.OPEN:\n        return 0\n    return node.idle if", "    return node.idle if"),
    ("fleet: reports count what is idle", "stores/memory.py", "return found if find_busy is None else", "return found if True else"),
    ("fleet: what is live below a budget is lost", "ledger/tree.py", "live[above.id] += node.live", "live[above.id] += 0"),
    ("fleet: the next process writes no bill", "ledger/lost.py", "    if end.capture is not None:\n", "    if False:\n"),
    ("fleet: the next process closes a purchase whose answer was lost", "ledger/lost.py",
     "    if end.delivery is Delivery.DONE:\n", "    if end.delivery is not None:\n"),
    ("fleet: the next process closes a purchase without its marks", "x402/delivery.py",
     "return None if _is_noted(context, presentation) else Delivery.DONE", "return Delivery.DONE"),
    ("fleet: what fails a second time is not written again", "flow/late_writes.py",
     "                    self._waiting.appendleft(write)\n", "                    pass\n"),
    ("fleet: an end that comes late hands over what was cut off", "x402/delivery.py",
     "(lose if presentation in context.cut_off else hand_over)", "(hand_over)"),
    ("fleet: a bill that is written twice ends its reservation twice", "ledger/token_budget.py",
     "        if reservation.state is HoldState.HELD or reservation.evidence is Evidence.ASSUMED:\n", "        if True:\n"),
)  # fmt: skip
"""(what is broken, file, the text that is replaced, its replacement, more of these three).

What begins with "fleet: " is played in a ledger in which sessions keep idle budget.
"""


def broken_copy(folder, file, old, new, *more):
    """Copy the package into *folder* with one text replaced, or several."""
    shutil.copytree(PACKAGE, folder / "x402guard", ignore=shutil.ignore_patterns("__pycache__"))
    for name, before, after in ((file, old, new), *more):
        path = folder / "x402guard" / name
        text = path.read_text()
        assert before in text, f"{name} has no {before!r}"
        path.write_text(text.replace(before, after))


def found_in(broken, first, most=MOST_STEPS, then=""):
    """Play a broken copy from the seed *first* on; return what was found, and after how many steps.

    *then* ``keep``: also a test file of the smallest such run, which passes where nothing is broken.
    """
    with tempfile.TemporaryDirectory() as folder:
        broken_copy(Path(folder), *broken[1:])
        store = "fleet" if broken[0].startswith("fleet: ") else "memory"
        command = [sys.executable, "-c", _PLAYER, str(first), str(most), then, store]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=1_800, check=False)
    if done.returncode:
        return {"steps": 0, "kind": f"no start: {done.stderr.strip().splitlines()[-1][:200]}"}
    return json.loads(done.stdout.strip().splitlines()[-1])


def main():
    """Play every break, or those whose name holds one of the arguments."""
    chosen = [each for each in BREAKS if not sys.argv[1:] or any(word in each[0] for word in sys.argv[1:])]
    firsts = [secrets.randbelow(10**9) for _ in chosen]
    with ThreadPoolExecutor(2) as pool:
        found = pool.map(found_in, chosen, firsts)
        print("| broken | steps | invariant | seed |\n|---|---|---|---|")
        missed = 0
        for broken, one in zip(chosen, found, strict=True):
            missed += not one["kind"]
            kind = one["kind"] or "**not found**"
            print(f"| {broken[0]} | {one['steps']:,} | {kind} | {one.get('seed', '')} |", flush=True)
    print(f"{len(chosen)} breaks, {missed} not found")
    return missed


if __name__ == "__main__":
    sys.exit(bool(main()))
