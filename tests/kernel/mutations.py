"""Small changes of one source file: each is one thing that a slip of the hand could have made of it."""

import ast
import copy
from pathlib import Path

PAIRS = [
    (ast.Eq, ast.NotEq),
    (ast.Lt, ast.LtE),
    (ast.Gt, ast.GtE),
    (ast.In, ast.NotIn),
    (ast.Is, ast.IsNot),
    (ast.And, ast.Or),
    (ast.Add, ast.Sub),
]
SWAPPED = {one: other for pair in PAIRS for one, other in (pair, pair[::-1])}
SWAPPED_NAMES = {"max": "min", "min": "max"}

REFUSALS = {"refuse", "_inconsistent"}
"""Their first argument is a rule, which is changed too. What follows is a message."""

TEXTS = {"__repr__", "place", "_name", "_played", "_check_loaded", "refuse", "_inconsistent"}
"""Functions whose texts are parts of messages."""

MOST_SHOWN = 110


class Mutation:
    """One change of one node of a file's syntax tree.

    Attributes:
        function: the outermost function that it is in, with its class; "" outside of all.
        lines: first and last line of what runs it.
        what: the change in words, unique in its function.
    """

    def __init__(self, path: Path, function: str, lines: tuple[int, int], node, new, what: str) -> None:
        self.path, self.function, self.lines, self.what = path, function, lines, what
        self._node, self._new, self._is_made = node, new, False

    @property
    def key(self) -> tuple[str, str, str]:
        """What names it in the list of survivors: no line number, which any edit moves."""
        return self.path.name, self.function or "-", self.what

    def make(self) -> None:
        """Change the tree, for good and once: each mutation is made in a process of its own."""
        if self._is_made:
            return
        self._is_made = True
        new = copy.deepcopy(self._new)
        ast.copy_location(new, self._node)
        self._node.__class__ = new.__class__
        self._node.__dict__.clear()
        self._node.__dict__.update(new.__dict__)
        ast.fix_missing_locations(self._node)


def mutations_of(path: Path) -> tuple[ast.Module, list[Mutation]]:
    """Return the tree of a file, and every change of it."""
    tree = ast.parse(path.read_text())
    finder = _Finder(path)
    finder.visit(tree)
    return tree, finder.found


def _short(node) -> str:
    text = " ".join(ast.unparse(node).split()).replace("|", "∣")
    return text if len(text) <= MOST_SHOWN else f"{text[:MOST_SHOWN]}…"


class _Finder(ast.NodeVisitor):
    """Walks a tree and notes the changes. It leaves out annotations, docstrings, messages and names of types."""

    def __init__(self, path: Path) -> None:
        self.path, self.found = path, []
        self._names: list[str] = []
        self._is_inside = False
        self._lines = (0, 0)
        self._above: list[ast.AST] = []
        self._times: dict[tuple[str, str], int] = {}

    def add(self, node, new, what: str = "") -> None:
        function = ".".join(self._names) if self._is_inside else ""
        what = what or f"{_short(node)} → {_short(new)}"
        times = self._times[function, what] = self._times.get((function, what), 0) + 1
        what += f" #{times}" if times > 1 else ""
        self.found.append(Mutation(self.path, function, self._lines, node, new, what))

    def visit(self, node):
        """Visit a node; of a statement, the lines of its head are what runs it."""
        if isinstance(node, ast.stmt):
            head = getattr(node, "test", None) or getattr(node, "iter", None) or getattr(node, "subject", None)
            end = node if head is None else head
            self._lines = (node.lineno, end.end_lineno)
        elif isinstance(node, ast.match_case):
            self._lines = (node.pattern.lineno, node.pattern.end_lineno)
        self._above.append(node)
        super().visit(node)
        self._above.pop()

    def _visit_all(self, nodes) -> None:
        for node in nodes:
            if node is not None:
                self.visit(node)

    def visit_ClassDef(self, node):
        self._names.append(node.name)
        self._visit_all(node.body)
        self._names.pop()

    def visit_FunctionDef(self, node):
        self._visit_all([*node.args.defaults, *node.args.kw_defaults])
        if self._is_inside:
            self._visit_all(node.body)
            return
        self._names.append(node.name)
        self._is_inside = True
        self._visit_all(node.body)
        self._is_inside = False
        self._names.pop()

    def visit_Assign(self, node):
        names = [name.id for name in ast.walk(node.targets[0]) if isinstance(name, ast.Name)]
        if names == ["__slots__"] or not self._names:
            return  # a plain assignment of a module is the name of a type
        values = node.value.elts if isinstance(node.value, ast.Tuple) and len(names) > 1 else [node.value]
        for number, value in enumerate(values):
            if len(names) != len(values) or names[number] != "place":
                self.visit(value)

    def visit_AnnAssign(self, node):
        self._visit_all([node.value])

    def visit_AugAssign(self, node):
        if type(node.op) in SWAPPED:
            self.add(node, ast.AugAssign(node.target, SWAPPED[type(node.op)](), node.value))
        self.visit(node.value)

    def visit_If(self, node):
        lines = self._lines
        self._fork(node.test, "if ")
        self.visit(node.test)
        only = len(node.body) == 1 and not node.orelse  # to leave out what it does is the branch not taken
        for each in node.body:
            if only and isinstance(each, ast.Raise | ast.Expr):
                self._lines = (each.lineno, each.end_lineno)
                self._visit_rule(each)
            else:
                self.visit(each)
        self._visit_all(node.orelse)
        self._lines = lines

    def _fork(self, test, word: str) -> None:
        for value in (True, False):
            self.add(test, ast.Constant(value), f"{word}{_short(test)} → {word}{value}")

    def visit_IfExp(self, node):
        self._fork(node.test, "… if ")
        self.generic_visit(node)

    def visit_comprehension(self, node):
        for test in node.ifs:
            self._fork(test, "for … if ")
        self.generic_visit(node)

    def visit_Raise(self, node):
        self.add(node, ast.Pass(), "raise left out")

    def visit_Expr(self, node):
        if isinstance(node.value, ast.Call):
            self.add(node, ast.Pass(), f"{_short(node.value.func)}(…) left out")
            self._visit_rule(node)

    def _visit_rule(self, node) -> None:
        call = getattr(node, "value", None)
        if isinstance(call, ast.Call):
            is_refusal = getattr(call.func, "id", "") in REFUSALS
            self._visit_all(call.args[:1] if is_refusal else [call])

    def visit_Compare(self, node):
        for number, op in enumerate(node.ops):
            ops = [*node.ops[:number], SWAPPED[type(op)](), *node.ops[number + 1 :]]
            self.add(node, ast.Compare(node.left, ops, node.comparators))
        self.generic_visit(node)

    def visit_BoolOp(self, node):
        self.add(node, ast.BoolOp(SWAPPED[type(node.op)](), node.values))
        for number, value in enumerate(node.values):
            rest = [*node.values[:number], *node.values[number + 1 :]]
            new = rest[0] if len(rest) == 1 else ast.BoolOp(node.op, rest)
            self.add(node, new, f"{_short(node)} without {_short(value)}")
        self.generic_visit(node)

    def visit_UnaryOp(self, node):
        if isinstance(node.op, ast.Not | ast.USub):
            self.add(node, node.operand)
        self.generic_visit(node)

    def visit_BinOp(self, node):
        if type(node.op) in SWAPPED:
            self.add(node, ast.BinOp(node.left, SWAPPED[type(node.op)](), node.right))
        self.generic_visit(node)

    def visit_Call(self, node):
        if getattr(node.func, "id", "") in SWAPPED_NAMES:
            swapped = ast.Name(SWAPPED_NAMES[node.func.id], ast.Load())
            self.add(node, ast.Call(swapped, node.args, node.keywords))
        self.generic_visit(node)

    def visit_Constant(self, node):
        value, is_text = node.value, bool(self._names) and self._names[-1] in TEXTS
        others = ()
        if isinstance(value, bool):
            others = (not value,)
        elif isinstance(value, int):
            others = value + 1, value - 1
        elif isinstance(value, str | bytes) and not is_text:
            others = (value + ("x" if isinstance(value, str) else b"x"),)
        for other in others:
            place = _short(self._above[-2]) if isinstance(self._above[-2], ast.expr) else "value"
            self.add(node, ast.Constant(other), f"{place}: {value!r} → {other!r}")

    def visit_JoinedStr(self, node):
        if self._names and self._names[-1] in TEXTS:
            return
        for number, part in enumerate(node.values):
            if isinstance(part, ast.Constant):
                values = [*node.values]
                values[number] = ast.Constant(f"{part.value}x")
                self.add(node, ast.JoinedStr(values))
