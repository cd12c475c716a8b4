"""The committed contract artifacts belong to the committed sources."""

import hashlib
import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
SOURCES = ROOT / "contracts"
ARTIFACTS = ROOT / "x402guard" / "testing" / "artifacts"
CONTRACTS = ["DollarToken", "ExactPermit2Proxy", "Permit2Like", "UptoPermit2Proxy"]


def _imported(file: str) -> set[str]:
    direct = re.findall(r'from "\./(\w+\.sol)"', (SOURCES / file).read_text(encoding="utf-8"))
    return {file}.union(*(_imported(each) for each in direct))


def _source_sha256(file: str) -> str:
    whole = "".join(f"{name}\n{(SOURCES / name).read_text(encoding='utf-8')}" for name in sorted(_imported(file)))
    return hashlib.sha256(whole.encode()).hexdigest()


def _artifact(name: str) -> dict:
    return json.loads((ARTIFACTS / f"{name}.json").read_text(encoding="utf-8"))


def test_no_artifact_is_missing_or_left_over():
    assert sorted(path.stem for path in ARTIFACTS.glob("*.json")) == CONTRACTS


@pytest.mark.parametrize("name", CONTRACTS)
def test_artifact_was_compiled_from_the_committed_sources(name):
    artifact = _artifact(name)
    assert list(artifact) == [
        "contractName", "compiler", "settings", "sourceSha256", "abi", "bytecode", "deployedBytecode",
    ]  # fmt: skip
    assert artifact["contractName"] == name
    assert artifact["sourceSha256"] == _source_sha256(f"{name}.sol"), "run `npm run compile` in contracts/"


@pytest.mark.parametrize("name", CONTRACTS)
def test_artifact_names_the_compiler_that_package_json_fixes(name):
    wanted = json.loads((SOURCES / "package.json").read_text(encoding="utf-8"))["devDependencies"]["solc"]
    assert _artifact(name)["compiler"].startswith(f"{wanted}+")


@pytest.mark.parametrize("name", CONTRACTS)
def test_runtime_code_can_be_placed_at_any_address(name):
    artifact = _artifact(name)
    assert not any(entry["type"] == "constructor" for entry in artifact["abi"])
    # An immutable would be a hole in the runtime code that only a constructor fills: the creation code of a contract
    # without one ends in exactly that runtime code.
    assert artifact["bytecode"].endswith(artifact["deployedBytecode"].removeprefix("0x"))


def test_every_source_carries_our_licence():
    for path in SOURCES.glob("*.sol"):
        assert path.read_text(encoding="utf-8").startswith("// SPDX-License-Identifier: Apache-2.0\n"), path.name
