"""Writes what agents read beside the site: ``llms.txt`` with a line for each page, and each page as the Markdown it is made of."""

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.nav import Navigation, Section
from mkdocs.structure.pages import Page

_FIRST = re.compile(r"^(?!#|\||>|```|- |<|!)(\S.*(?:\n\S.*)*)", re.MULTILINE)
_found: list[str] = []


def on_nav(nav: Navigation, config: MkDocsConfig, **_: object) -> None:
    """Write a section for each section of the menu, a line for each page."""
    _found[:] = [f"# {config.site_name}", "", f"> {config.site_description}", ""]
    for item in nav.items:
        if isinstance(item, Page):
            _found.append(_line(item))
        if isinstance(item, Section):
            _found.extend(["", f"## {item.title}", ""])
            _found.extend(_line(page) for page in item.children if isinstance(page, Page))


def on_post_build(config: MkDocsConfig, **_: object) -> None:
    """Write the list, and put each page's source beside it."""
    site, docs = Path(config.site_dir), Path(config.docs_dir)
    (site / "llms.txt").write_text("\n".join(_found) + "\n")
    for source in docs.rglob("*.md"):
        beside = site / source.relative_to(docs)
        beside.parent.mkdir(parents=True, exist_ok=True)
        beside.write_text(source.read_text())


def _line(page: Page) -> str:
    """Return a line of the list: the page's name in the menu, its Markdown, and its first sentence."""
    text = Path(page.file.abs_src_path or "").read_text()
    first = _FIRST.search(text)
    sentence = (
        "" if first is None else re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", " ".join(first[1].split())).split(". ")[0]
    )
    return f"- [{page.title or page.file.name}]({page.file.src_uri}): {sentence.rstrip('.:')}."
