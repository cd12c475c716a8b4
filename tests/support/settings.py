"""A settings file in the working directory, as its owner has written and trusted it."""

from pathlib import Path

from x402guard.guard.settings_file import read_settings_file, trust


def owners_file(folder, text) -> Path:
    """Write ``x402guard.toml`` in a folder, and trust it."""
    path = Path(folder) / "x402guard.toml"
    path.write_text(text)
    trust(read_settings_file(path))
    return path
