"""The package as it is installed: what a plain install brings, what the archives hold, and what a package page shows."""

import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from email import message_from_bytes
from importlib.metadata import distribution

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.support.processes import ROOT
from tests.support.structure import PACKAGE, private_imports

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PAGE = (ROOT / "docs" / "reference" / "dependencies.md").read_text()


def plain_install():
    """Name → distribution of everything that ``pip install x402guard`` brings, itself included."""
    found, todo = {}, [("x402guard", frozenset())]
    for name, extras in todo:
        dist = distribution(name)
        found[canonicalize_name(name)] = dist
        for line in dist.requires or ():
            wanted = Requirement(line)
            needed = wanted.marker is None or any(wanted.marker.evaluate({"extra": extra}) for extra in ("", *extras))
            if needed and (canonicalize_name(wanted.name), frozenset(wanted.extras)) not in todo:
                todo.append((canonicalize_name(wanted.name), frozenset(wanted.extras)))
    return found


def megabytes(dist):
    files = [dist.locate_file(file) for file in dist.files or () if file.suffix != ".pyc"]
    return sum(path.stat().st_size for path in files if path.exists()) / 10**6


def test_the_page_says_how_many_packages_a_plain_install_brings_and_how_large_they_are():
    stated = re.search(r"brings\s(\d+) packages besides x402guard, (\d+) MB", PAGE)
    found = plain_install()
    del found["x402guard"]
    size = sum(map(megabytes, found.values()))
    most_packages, most_mb = int(stated[1]), int(stated[2])
    assert most_packages - 3 <= len(found) <= most_packages, sorted(found)
    assert 0.9 * most_mb <= size <= most_mb, f"{size:.1f} MB"


def test_what_a_private_name_is_taken_from_is_pinned_and_the_page_says_why():
    """A private name may go with the next large version, and nobody would announce it."""
    found = {name for path in sorted(PACKAGE.rglob("*.py")) for name in private_imports(path)}
    assert found == {"anyio._core._eventloop", "genai_prices.types._providers_from_raw"}
    pins = {canonicalize_name(pin.name): pin.specifier for pin in map(Requirement, PROJECT["dependencies"])}
    for module in found:
        package = canonicalize_name(module.split(".")[0])
        assert "<" in [each.operator for each in pins[package]], package
        assert distribution(package).version in pins[package]
        assert f"`{module}`" in PAGE


def test_what_only_the_test_network_needs_is_in_its_extra():
    assert not {"eth-tester", "py-evm", "starlette", "uvicorn"} & set(plain_install())


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dist")
    subprocess.run([sys.executable, "-m", "hatchling", "build", "-d", str(folder)], cwd=ROOT, check=True, timeout=100)
    return folder


def test_the_source_archive_holds_what_the_readme_speaks_of(built):
    (path,) = built.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    linked = set(re.findall(r"\]\((?!https?:)([^)#]+)", (ROOT / "README.md").read_text()))
    assert {
        "Makefile",
        "README.md",
        "LICENSE",
        "pyproject.toml",
        "examples/openai_sdk.py",
        "tests/conftest.py",
    } <= names
    assert {link for link in linked if not any(name == link or name.startswith(f"{link}/") for name in names)} == set()
    assert not [name for name in names if "node_modules" in name or name.endswith((".pyc", ".db"))]


def test_a_package_page_has_no_link_that_leads_nowhere(built):
    (path,) = built.glob("*.whl")
    with zipfile.ZipFile(path) as wheel:
        (metadata,) = (name for name in wheel.namelist() if name.endswith("/METADATA"))
        assert "x402guard/py.typed" in wheel.namelist()
        page = message_from_bytes(wheel.read(metadata)).get_payload(decode=True).decode()
    assert page.startswith("# x402guard")
    assert re.findall(r"\]\((?!https?:)", page) == []
    assert "settings (`docs/reference/settings.md`)" in page.lower()
