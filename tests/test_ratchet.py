"""What a reader has to carry: lines, settings, marks, events. A figure that grows fails, beside what ``test_work.py`` counts.

A commit that raises one says why in its body, and changes the figure here. A figure that has fallen is written down.
"""

import ast
import re
from functools import cache
from pathlib import Path

from x402guard.guard.defaults import each_default

PACKAGE = Path(__file__).parents[1] / "x402guard"

MOST_OF_THE_KERNEL = (2_500, 22)
"""Lines and files of ``kernel/``: no commit raises these."""

FIGURES = {"lines outside testing/": 66749, "settings": 99, "kinds of marks": 61, "journal events": 49}


@cache
def trees():
    """Every file outside of ``testing/``, by its path, with its lines and its tree."""
    paths = [path for path in sorted(PACKAGE.rglob("*.py")) if "testing" not in path.parts]
    texts = {str(path.relative_to(PACKAGE)): path.read_text() for path in paths}
    return {name: (text.count("\n"), ast.parse(text)) for name, text in texts.items()}


@cache
def constants():
    """The texts that have a name at the top of a file."""
    found = {}
    for _, tree in trees().values():
        for node in tree.body:
            if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, ast.Constant):
                target = node.targets[0] if isinstance(node, ast.Assign) else node.target
                if isinstance(target, ast.Name) and isinstance(node.value.value, str):
                    found.setdefault(target.id, node.value.value)
    return found


def text_of(node):
    """The text of a constant, or of a name of one."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    return constants().get(node.id) if isinstance(node, ast.Name) else None


def kinds_of_marks():
    """What functions and constants say of type ``MarkKey``, and the tables of keys: the first part of each."""
    found = set()
    for _, tree in trees().values():
        for node in ast.walk(tree):
            keys = []
            if (
                isinstance(node, ast.FunctionDef)
                and node.returns is not None
                and "MarkKey" in ast.unparse(node.returns)
            ):
                keys = [each for each in ast.walk(node) if isinstance(each, ast.Tuple)]
            elif isinstance(node, ast.AnnAssign) and "MarkKey" in ast.unparse(node.annotation):
                keys = [node.value]
            found |= {text_of(key.elts[0]) for key in keys if isinstance(key, ast.Tuple) and len(key.elts) == 2}
    return {kind for kind in found if kind and re.fullmatch(r"[a-z_]+", kind)}


def journal_events():
    """What ``record`` writes: the events of entries, and the names of those that have no amounts."""
    found = set()
    for _, tree in trees().values():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "record":
                found |= {text_of(node.args[1])} if len(node.args) > 1 else set()
            if isinstance(node, ast.Dict):
                pairs = zip(node.keys, node.values, strict=True)
                found |= {
                    f"event {text_of(value)}" for key, value in pairs if key is not None and text_of(key) == "name"
                }
    return {event for event in found if event and "None" not in event}


def settings():
    """Every setting that ``init`` writes, and that has a default."""
    return sum(1 for _ in each_default())


def test_the_kernel_stays_as_small_as_it_says():
    lines = [count for name, (count, _) in trees().items() if name.startswith("kernel/")]
    assert sum(lines) <= MOST_OF_THE_KERNEL[0]
    assert len(lines) <= MOST_OF_THE_KERNEL[1]


def test_no_figure_grows_unseen():
    found = {
        "lines outside testing/": sum(count for count, _ in trees().values()),
        "settings": settings(),
        "kinds of marks": len(kinds_of_marks()),
        "journal events": len(journal_events()),
    }
    assert found == FIGURES, "say in the commit why it grew, or write down what has fallen"
