"""The structure of the package, measured over its own source: rooms, floors, import circles, and the calls of one request.

``python -m tests.support.structure`` prints the figures.
"""

import ast
import itertools
import re
import sys
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import httpx

from tests.support.merchant import URL, Shop, client, make_guard
from x402guard import BudgetExhausted

PACKAGE = Path(__file__).parents[2] / "x402guard"


def sources():
    """Every module outside ``testing/``, which is a product of its own."""
    return sorted(path for path in PACKAGE.rglob("*.py") if path.relative_to(PACKAGE).parts[0] != "testing")


def is_of(package, filename):
    """True for a source file of the package in that folder, whatever the folders around it are called."""
    return Path(filename).is_relative_to(package)


def is_ours(filename):
    """True for a source file of this package, and for none of its tests and of what is installed beside them."""
    return is_of(PACKAGE, filename)


def module_of(path):
    return ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")


def run_at_load(tree):
    """The nodes of a file that run as it loads: not inside a function, not for type checkers alone."""
    waiting = list(tree.body)
    while waiting:
        node = waiting.pop()
        yield node
        if isinstance(node, (ast.Try, ast.ClassDef)):
            waiting += node.body
        elif isinstance(node, ast.If) and "TYPE_CHECKING" not in ast.unparse(node.test):
            waiting += node.body + node.orelse


def imports_of(nodes, modules):
    """The modules of the package that some nodes of a file import."""
    found = set()
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and node.module in modules:
            found |= {f"{node.module}.{alias.name}" for alias in node.names} & modules or {node.module}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names} & modules
    return found


def graph_of(paths, nodes_of):
    """Module → the modules that it imports, by those nodes of its tree that *nodes_of* finds."""
    modules = {module_of(path): path for path in paths}
    return {
        name: imports_of(nodes_of(ast.parse(path.read_text())), set(modules)) - {name} for name, path in modules.items()
    }


def import_graph():
    """Module → the modules that it imports as it loads."""
    return graph_of(sources(), run_at_load)


def whole_import_graph():
    """Module → the modules that it imports at any time: also inside functions, and for type checkers alone."""
    return graph_of(sorted(PACKAGE.rglob("*.py")), ast.walk)


def private_imports(path):
    """The modules of other packages that a file imports though their names begin with an underscore."""
    nodes = list(ast.walk(ast.parse(path.read_text())))
    named = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    for node in (node for node in nodes if isinstance(node, ast.ImportFrom)):
        named |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names if alias.name[0] == "_"}
    return {
        name
        for name in named
        if name != "__future__" and re.search(r"(^|\.)_", name) and name.split(".")[0] != PACKAGE.name
    }


def import_circle(graph):
    """One circle of imports, as the names on it; empty where there is none."""
    try:
        tuple(TopologicalSorter(graph).static_order())
    except CycleError as error:
        return list(error.args[1])
    return []


def floors(graph):
    """How many modules the longest chain of imports has."""
    height = {}
    for name in TopologicalSorter(graph).static_order():
        height[name] = 1 + max((height[each] for each in graph[name]), default=0)
    return max(height.values())


def rooms(graph):
    """The same graph, of the package's rooms and ground files."""
    room = {name: ".".join(name.split(".")[:2]) for name in graph}
    return {place: {room[each] for name in graph if room[name] == place for each in graph[name]} - {place}
            for place in set(room.values()) - {"x402guard", "x402guard.__main__"}}  # fmt: skip


def calls_during(action):
    """The files of the package whose functions are called while *action* runs, in order."""
    called = []

    def note(frame, event, _argument):
        path = frame.f_code.co_filename
        if event == "call" and is_ours(path) and not is_of(PACKAGE / "testing", path):
            called.append(path)

    sys.setprofile(note)
    try:
        action()
    finally:
        sys.setprofile(None)
    return called


def moves(called):
    return sum(one != other for one, other in itertools.pairwise(called))


def walk(session_budget, action):
    """The calls of one more request in a session that has bought twice before, on a ledger in memory."""
    with make_guard() as guard, guard.session("s", budget=session_budget) as session:
        http: httpx.Client = client(session, Shop())
        http.get(f"{URL}/1")
        http.get(f"{URL}/2")
        return calls_during(lambda: action(http))


def refused(http):
    try:
        http.get(URL)
    except BudgetExhausted:
        return
    raise AssertionError("the request was paid")


def figures():
    """Name → figure."""
    graph = import_graph()
    payment, refusal = walk("$1.00", lambda http: http.get(URL)), walk("$0.025", refused)
    return {
        "modules in the root": len(list(PACKAGE.glob("*.py"))),
        "modules": len(graph),
        "lines": sum(path.read_text().count("\n") for path in sources()),
        "floors of rooms": floors(rooms(graph)),
        "floors of modules": floors(graph),
        "circles": int(bool(import_circle(graph))),
        "calls of a payment": len(payment),
        "files of a payment": len(set(payment)),
        "moves of a payment": moves(payment),
        "calls of a refusal": len(refusal),
        "moves of a refusal": moves(refusal),
    }


if __name__ == "__main__":
    for name, figure in figures().items():
        print(f"{name}: {figure:,}")
