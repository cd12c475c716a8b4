"""Makes docs/reference/defaults.md from the code: ``python -m tests.support.defaults_page > docs/reference/defaults.md``."""

import dataclasses
import sys

from x402guard import Policy
from x402guard.guard.defaults import each_default

HEAD = """\
# Defaults

Every setting of a guard, with what it is unless you say otherwise. `x402guard init` writes the same as a settings file.
In Python, a key of `[policy]` is an argument of `Policy`, one of `[policy.loop]` an argument of `Policy(loop=Loop(…))`.
This page is made from the code, and a test holds it to that.
"""


def page():
    """The page, as it has to stand in the docs."""
    lines, table = [HEAD], None
    for each in each_default():
        if each.table != table:
            table = each.table
            lines.append(
                f"\n## `{f'[{table}]' if table else 'x402guard.toml'}`\n\n| setting | default | what it is |\n|---|---|---|"
            )
        default = "not set" if each.value is None else f"`{each.value}`"
        if each.name == "networks":
            default = "the test networks"
        lines.append(f"| `{each.name}` | {default} | {each.meaning.replace('|', chr(92) + '|')} |")
    return "\n".join([*lines, *policies()]) + "\n"


def policies():
    """The table of the three policies to start from: each setting in which they differ, whole."""
    kinds = (Policy.careful(), Policy.balanced(), Policy.permissive())
    yield "\n## Three policies to start from\n"
    yield "`Policy.careful()` is for real money in new hands, `Policy.balanced()` is what a guard has that is given none, and"
    yield "`Policy.permissive()` leaves an agent alone within its budget. Each takes what you change:"
    yield "`Policy.careful(max_steps=50)`. What is not here is the same in all three.\n"
    yield "| setting | careful | balanced | permissive |\n|---|---|---|---|"
    for field in dataclasses.fields(Policy):
        values = [getattr(kind, field.name) for kind in kinds] if field.init else []
        if len(set(map(repr, values))) > 1:
            yield f"| `{field.name}` | " + " | ".join(map(shown, values)) + " |"


def shown(value):
    """A setting as it is written; of a part, what differs from its own defaults."""
    if not dataclasses.is_dataclass(value):
        return f"`{value!r}`"
    usual = type(value)()
    parts = [(field.name, getattr(value, field.name)) for field in dataclasses.fields(value) if field.init]
    changed = ", ".join(f"{name}={part!r}" for name, part in parts if part != getattr(usual, name))
    return f"`{type(value).__name__}({changed})`"


if __name__ == "__main__":
    sys.stdout.write(page())
