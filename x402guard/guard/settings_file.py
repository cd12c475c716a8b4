"""Says which settings file is the owner's: one that is named, or one in the working directory that its user has trusted.

The maker of the folder has written a file that merely lies there: a repository, an archive, an agent. Nothing of it
is read, but the hash of its bytes. What was trusted is kept outside of the folder, for each user, by place and hash. A file
that was trusted and has changed, or is gone, is an error: without its rules, a guard would let more pass.
"""

from __future__ import annotations

import fcntl
import grp
import hashlib
import json
import logging
import os
import pwd
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Final

from msgspec import Struct

from x402guard.errors import ConfigError
from x402guard.stores.outbox import state_folder

CONFIG_FILE: Final = "x402guard.toml"
CONFIG: Final = "X402GUARD_CONFIG"
_MOST_BYTES: Final = 1_000_000
_LOG: Final = logging.getLogger("x402guard")


class SettingsFile(Struct, frozen=True):
    """A settings file, read once: what is trusted is what is used. *path* is as it was named."""

    path: Path
    content: bytes


def find_settings(path: Path | None = None) -> SettingsFile | None:
    """Return the settings file to use, or None.

    It is *path*, or what ``X402GUARD_CONFIG`` names, or ``x402guard.toml`` in the working directory if it is trusted.
    Raises ``ConfigError`` if a named file cannot be read, for a trusted one that has changed or that others can write, and
    where one lies and the list of trusted files cannot be believed: without its rules more would pass.
    """
    named = os.environ.get(CONFIG, "")
    if path is None and named:
        path = None if named == "none" else Path(named)
        if path is None:
            return None
    if path is not None:
        return read_settings_file(path)
    here = Path(CONFIG_FILE)
    found, kept = _lying_here(here), _kept()
    try:
        was_trusted = _trusted(kept).get(_place(here))
    except _Untrusted as error:
        if found is not None:
            raise ConfigError(
                f"{CONFIG_FILE}: whether it is trusted cannot be told: {error}; or set {CONFIG}=none"
            ) from None
        return None
    if found is not None and was_trusted == _hash(found):
        _refuse_unless_private(here)
        return found
    if was_trusted is not None:
        raise ConfigError(
            f"{CONFIG_FILE}: it is not the file that was trusted here, or is gone; look at it, and run `x402guard config "
            f"trust` (or `config trust --forget`), or set {CONFIG}=none"
        )
    if found is not None or here.exists() or here.is_symlink():
        _say_untrusted(str(here.absolute()), "" if found is None else _hash(found))
    return None


def read_settings_file(path: Path) -> SettingsFile:
    """Return the file at *path*, read once. Raises ``ConfigError``."""
    try:
        is_there = path.is_file()
    except OSError as error:
        raise ConfigError(f"config: {path} cannot be looked at: {error.strerror}") from None
    if not is_there:
        raise ConfigError(f"config: there is no file {path}")
    try:
        return SettingsFile(path, path.read_bytes())
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from None


def _lying_here(path: Path) -> SettingsFile | None:
    """Return what lies in the working directory; None for what is no file, cannot be read, or is too long."""
    try:
        state = path.stat()
        if not stat.S_ISREG(state.st_mode) or state.st_size > _MOST_BYTES:
            return None
        with path.open("rb") as file:
            return SettingsFile(path, file.read(_MOST_BYTES))
    except OSError:  # also a link to a file that is away
        return None


@lru_cache(maxsize=64)
def _say_untrusted(path: str, digest: str) -> None:  # once for each content
    del digest
    fix = f"if it is yours, look at it and run `x402guard config trust`, or name it with {CONFIG}={path}"
    _LOG.warning("%s is not read, because its owner has not trusted it as it is; %s", path, fix)


def _refuse_unless_private(path: Path) -> None:
    """Raise ``ConfigError`` for a trusted file that another user owns or can write: it may change as it is read."""
    state = path.stat()
    fix = f"name it with {CONFIG}={path.absolute()} if it is yours, or set {CONFIG}=none"
    if state.st_uid not in (os.getuid(), 0):
        raise ConfigError(f"{CONFIG_FILE}: it belongs to another user (uid {state.st_uid}), and is not read; {fix}")
    if state.st_mode & stat.S_IWOTH or (state.st_mode & stat.S_IWGRP and not _is_own_group(state)):
        raise ConfigError(f"{CONFIG_FILE}: other users can write it, and it is not read; run: chmod go-w {CONFIG_FILE}")


def _is_own_group(state: os.stat_result) -> bool:
    """True if a file's group is its owner's alone, as many systems set it up."""
    try:
        name, group = pwd.getpwuid(state.st_uid).pw_name, grp.getgrgid(state.st_gid)
    except KeyError:
        return False
    return group.gr_name == name and not set(group.gr_mem) - {name}


def trust(file: SettingsFile) -> None:
    """Trust a settings file as it was read, where it lies, for this user. Raises ``ConfigError``."""
    _keep(lambda known: known | {_place(file.path): _hash(file)})


def forget(path: Path) -> None:
    """Trust what lies at *path* no more. Raises ``ConfigError``."""
    _keep(lambda known: {place: digest for place, digest in known.items() if place != _place(path)})


def _keep(change: Callable[[dict[str, str]], dict[str, str]]) -> None:
    kept = _kept()
    if kept is None:
        raise ConfigError(f"config: this user has no home folder to keep what is trusted; name the file with {CONFIG}")
    try:
        kept.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with _alone(kept.parent):
            written = kept.with_name(f"{kept.name}.{os.getpid()}")
            written.touch(mode=0o600)
            written.write_text(json.dumps(change(_trusted(kept)), indent=1), encoding="ascii")
            written.replace(kept)
    except _Untrusted as error:
        raise ConfigError(f"config: {error}") from None
    except OSError as error:
        raise ConfigError(f"config: {kept} cannot be written: {error}") from None


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Keep other processes from changing the list meanwhile: of two, one would be lost."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _kept() -> Path | None:
    folder = state_folder()
    return None if folder is None else folder / "trusted.json"


def _place(path: Path) -> str:
    """Return where a file lies: the place of a link, not of what it leads to."""
    try:
        return os.fspath(path.absolute().parent.resolve() / path.name)
    except FileNotFoundError:
        raise ConfigError(
            f"{path.name}: the working directory is gone: change to another one, or name the file by {CONFIG}"
        ) from None


class _Untrusted(Exception):  # noqa: N818 - it becomes a ``ConfigError``
    """The list of trusted files cannot be believed."""


def _trusted(kept: Path | None) -> dict[str, str]:
    """Return what is trusted: place → hash. Raises ``_Untrusted`` for a list that others can write, or that cannot be read."""
    if kept is None:
        return {}
    try:
        state, content = kept.stat(), kept.read_bytes()
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise _Untrusted(f"{kept} cannot be read: {error.strerror}") from None
    if state.st_uid != os.getuid():
        raise _Untrusted(f"{kept} belongs to another user (uid {state.st_uid}); set HOME to that of uid {os.getuid()}")
    if state.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise _Untrusted(f"{kept} can be written by other users; look at it, and run: chmod 600 {kept}")
    try:
        return dict[str, str](json.loads(content))
    except (ValueError, TypeError):
        raise _Untrusted(
            f"{kept} is no list that x402guard has written; remove it, and run: x402guard config trust"
        ) from None


def _hash(file: SettingsFile) -> str:
    return hashlib.sha256(file.content).hexdigest()
