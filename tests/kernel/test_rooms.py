"""What a room may write, and who makes a proof: read from the source, so that a new one is seen."""

import ast
from pathlib import Path

from x402guard.kernel import proofs
from x402guard.kernel.change_set import MONEY_MARKS

PACKAGE = Path(proofs.__file__).parents[1]

MAKERS = {
    "Unsigned": {"kernel/released.py"},
    "Unsent": {"flow/effects.py"},
    "AtHead": {"ledger/findings.py"},
    "Final": {"ledger/findings.py"},
    "Cancelled": {"ledger/findings.py"},
    "UnusedPastDeadline": {"ledger/findings.py"},
    "Undone": {"ledger/evidence.py"},
    "Billed": {"ledger/bills.py"},
    "Stated": {"ledger/bills.py"},
    "ByOwner": {"ledger/owner.py", "ledger/purchases.py"},
    "PayAgain": {"x402/purchase.py"},
    "Lost": {"ledger/lost.py"},
}
"""Each proof is made in one room; the owner's commands on budgets and on purchases have a file each."""

WRITES = {"put_node", "put_hold", "take_step", "prove"}
AMOUNTS = {"captured", "held", "granted_in", "granted_out"}


def sources():
    """Every file of the package but the test material, with its calls."""
    for path in sorted(PACKAGE.rglob("*.py")):
        name = str(path.relative_to(PACKAGE))
        if not name.startswith("testing/"):
            tree = ast.parse(path.read_text())
            yield name, tree, [node for node in ast.walk(tree) if isinstance(node, ast.Call)]


def imported_proofs(tree):
    """The names under which a file knows the proofs: of the type, or of the module."""
    names, modules = {}, set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module == "x402guard.kernel.proofs":
            names |= {each.asname or each.name: each.name for each in node.names}
        if isinstance(node, ast.ImportFrom) and node.module == "x402guard.kernel":
            modules |= {each.asname or each.name for each in node.names if each.name == "proofs"}
    return names, modules


def test_each_proof_is_made_in_one_place():
    found = {}
    for name, tree, calls in sources():
        names, modules = imported_proofs(tree)
        for call in calls:
            made = call.func
            if isinstance(made, ast.Name) and names.get(made.id) in MAKERS:
                found.setdefault(names[made.id], set()).add(name)
        for node in (
            ast.walk(tree) if not name.startswith("kernel/") else ()
        ):  # chosen by an expression, and then called
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in modules:
                found.setdefault(node.attr, set()).add(name)
    assert found == MAKERS


def test_no_room_but_the_ledger_writes_a_node_a_hold_or_an_amount():
    wrong = []
    for name, _, calls in sources():
        if name.startswith(("kernel/", "ledger/")):
            continue
        for call in calls:
            verb = call.func.attr if isinstance(call.func, ast.Attribute) else ""
            moves = verb == "record" and AMOUNTS & {each.arg for each in call.keywords}
            on_view = isinstance(call.func, ast.Attribute) and ast.unparse(call.func.value).endswith("view")
            if on_view and (verb in WRITES or moves):
                wrong.append(f"{name}:{call.lineno} {verb}")
    assert wrong == []


def test_no_room_but_the_ledger_writes_a_mark_that_decides_about_money():
    wrong = []
    for name, tree, _ in sources():
        if name.startswith(("kernel/", "ledger/", "stores/", "views/")):
            continue
        for node in ast.walk(tree):
            first = node.elts[0] if isinstance(node, ast.Tuple) and len(node.elts) == 2 else None
            if isinstance(first, ast.Constant) and first.value in MONEY_MARKS:
                wrong.append(f"{name}:{node.lineno}")
    assert wrong == []


def test_the_kernel_imports_itself_the_errors_and_four_libraries():
    allowed = ("x402guard.kernel", "x402guard.errors", "msgspec", "coincurve", "eth_hash")
    wrong = []
    for name, tree, _ in sources():
        if not name.startswith("kernel/"):
            continue
        for node in ast.walk(tree):
            found = [each.name for each in node.names] if isinstance(node, ast.Import) else []
            found += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            ours = [
                each
                for each in found
                if each.startswith("x402guard") or "_" in each or each in ("msgspec", "coincurve")
            ]
            wrong += [f"{name}: {each}" for each in ours if each != "__future__" and not each.startswith(allowed)]
    assert wrong == []


def test_no_rule_about_money_is_an_assert():
    """So the mutants are stopped under ``python -O`` as well."""
    wrong = [f"{name}:{node.lineno}" for name, tree, _ in sources() if name.startswith("kernel/")
             for node in ast.walk(tree) if isinstance(node, ast.Assert)]  # fmt: skip
    assert wrong == []
