"""All settings, from the environment and ``x402guard.toml``. Tests check ``docs/reference/settings.md`` against it."""

from __future__ import annotations

import difflib
import os
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final, Literal, TypeAlias, get_args

from msgspec import Struct
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, SecretStr, ValidationError
from pydantic.fields import FieldInfo
from pydantic_settings import (
    BaseSettings,
    EnvSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    SettingsError,
    TomlConfigSettingsSource,
)

from x402guard.assets import Asset, AssetRegistry
from x402guard.chain.settings import Chain
from x402guard.errors import ConfigError
from x402guard.flow.context import DEFAULT_BODY_BYTES, MAX_CLOCK_JUMP_S, Mode
from x402guard.guard.notices import Webhook
from x402guard.guard.settings_file import CONFIG, CONFIG_FILE, SettingsFile, find_settings
from x402guard.guard.tables import Number, ProxySettings, Whole, table_of, two_readings
from x402guard.kernel.evm import Address
from x402guard.ledger.purchases import DEFAULT_FLIGHT_S, DEFAULT_MEMORY_S
from x402guard.llm import Metering
from x402guard.policy import Policy
from x402guard.policy.checks import WITHOUT_SIGN
from x402guard.stores import DEFAULT_LEDGER
from x402guard.stores.memory import MOST_ENDED
from x402guard.strict_json import NotReadable, read_json
from x402guard.x402.signer import LocalSigner, address_in, refuse_key

ENV_PREFIX: Final = "X402GUARD_"
PRIVATE_KEY: Final = "X402GUARD_PRIVATE_KEY"
KEYSTORE_PASSWORD: Final = "X402GUARD_KEYSTORE_PASSWORD"  # noqa: S105 - a name
WEBHOOK_SECRET: Final = "X402GUARD_WEBHOOK_SECRET"  # noqa: S105 - a name
REPORT_KEY_PASSWORD: Final = "X402GUARD_REPORT_KEY_PASSWORD"  # noqa: S105 - a name
_SECRET_NAMES: Final = (PRIVATE_KEY, KEYSTORE_PASSWORD, WEBHOOK_SECRET)
_READ_BEFORE: Final[dict[str, SecretStr]] = {}  # the secrets that this process has taken out of its environment


if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

if TYPE_CHECKING:  # the tables are made as this module loads
    PolicySettings: TypeAlias = Any
    MeteringSettings: TypeAlias = Any
    AssetSettings: TypeAlias = Any
else:
    PolicySettings, MeteringSettings, AssetSettings = table_of(Policy), table_of(Metering), table_of(Asset)


def _as_table(given: object) -> object:
    """Return a table for a URL or a list of URLs."""
    return {"urls": given} if isinstance(given, (str, list)) else given


def _as_list(urls: object) -> object:
    return [urls] if isinstance(urls, str) else urls


class ChainSettings(BaseModel):
    """One table ``[chains.NETWORK]``; each key is an argument of ``Chain``."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    urls: Annotated[list[str], BeforeValidator(_as_list)] = Field(repr=False)
    finality: Literal["finalized", "safe"] | Whole = "finalized"
    timeout_s: Number = 5.0

    def chain(self) -> Chain:
        """Return the chain. Raises ``ConfigError``."""
        return Chain(self.urls, finality=self.finality, timeout_s=self.timeout_s)


class Settings(BaseSettings):
    """The settings that ``Guard.from_env`` reads: ``X402GUARD_*`` first, then ``x402guard.toml``.

    Lists and tables in the environment are JSON. A key of ``[policy]`` is ``X402GUARD_POLICY__…``, one of
    ``[metering]`` ``X402GUARD_METERING__…``.
    """

    model_config = SettingsConfigDict(
        env_prefix=ENV_PREFIX, env_nested_delimiter="__", toml_file=None, extra="forbid", frozen=True
    )

    private_key: SecretStr | None = None
    keystore: str | None = None
    keystore_password: SecretStr | None = None
    ledger: str = DEFAULT_LEDGER
    budget: str | dict[str, str] | None = None
    # A URL often holds an access key: in ``chains`` and in ``webhook_url``.
    chains: dict[str, Annotated[ChainSettings, BeforeValidator(_as_table)]] = Field({}, repr=False)
    assets: list[AssetSettings] = []
    policy: PolicySettings = PolicySettings()
    metering: MeteringSettings = MeteringSettings()
    proxy: ProxySettings = ProxySettings()
    unsafe_no_chain: bool = False
    unsafe_async_failover: bool = False
    unsafe_trust_receipts: bool = False
    max_body_bytes: Whole = DEFAULT_BODY_BYTES
    flight_s: Whole = DEFAULT_FLIGHT_S
    purchase_memory_s: Whole = DEFAULT_MEMORY_S
    memory_sessions: Whole = MOST_ENDED
    session_budget: str | None = None
    approver: Literal["terminal", "queue"] | None = None
    webhook_url: str | None = Field(None, repr=False)
    webhook_secret: SecretStr | None = None
    kill_file: str | None = None
    max_clock_jump_s: Whole = MAX_CLOCK_JUMP_S
    background_checks: bool = True
    ledger_must_exist: bool = False
    mode: Mode = "enforce"
    telemetry: bool = False

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,  # noqa: ARG003 - pydantic's signature
        dotenv_settings: PydanticBaseSettingsSource,  # noqa: ARG003 - pydantic's signature
        file_secret_settings: PydanticBaseSettingsSource,  # noqa: ARG003 - pydantic's signature
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """The environment goes before the file. A ``.env`` file is not read: keys leak from there."""
        return init_settings, _Environment(settings_cls), _TomlWithoutKey(settings_cls)

    def registry(self) -> AssetRegistry:
        """Return the tokens that may be paid with: the built-in ones, and those of the settings. Raises ``ConfigError``."""
        return AssetRegistry(tuple(asset.build() for asset in self.assets))

    @property
    def asks(self) -> bool:
        """True if the settings name an approver."""
        return self.approver is not None

    def guard_arguments(self, *, pays: bool = True) -> dict[str, Any]:
        """Return the arguments for ``Guard``; without a signer unless it *pays*."""
        wallet = self.budget.get("amount") if isinstance(self.budget, dict) else self.budget
        for name, amount in (("budget", wallet), ("session_budget", self.session_budget)):
            if amount is not None and not amount.strip().strip(" $0."):
                raise ConfigError(f"{name}: {amount!r:.40} is a budget of nothing; {WITHOUT_SIGN}")
        return {
            "signer": self._signer() if pays else None,
            "ledger": self.ledger,
            "policy": self.policy.build(),
            "metering": self.metering.build(),
            "assets": [asset.build() for asset in self.assets],
            "chains": self.read_chains() or None,
            "unsafe_no_chain": self.unsafe_no_chain,
            "unsafe_async_failover": self.unsafe_async_failover,
            "unsafe_trust_receipts": self.unsafe_trust_receipts,
            "budget": self.budget,
            "max_body_bytes": self.max_body_bytes,
            "flight_s": self.flight_s,
            "purchase_memory_s": self.purchase_memory_s,
            "memory_sessions": self.memory_sessions,
            "session_budget": self.session_budget,
            "approver": self.approver,
            "webhook": self._webhook(),
            "kill_file": self.kill_file,
            "max_clock_jump_s": self.max_clock_jump_s,
            "background_checks": self.background_checks,
            "ledger_must_exist": self.ledger_must_exist,
            "mode": self.mode,
            "telemetry": self.telemetry,
        }

    def payer(self) -> Address | None:
        """Return the account of the key or the keystore that is set, without its password; None if none is.

        Raises ``ConfigError`` for a key or a keystore that cannot be read.
        """
        self._check_one_key()
        if self.private_key is not None:
            return LocalSigner.from_key(self.private_key.get_secret_value()).address
        return None if self.keystore is None else address_in(self.keystore)

    def _check_one_key(self) -> None:
        if self.private_key is not None and self.keystore is not None:
            raise ConfigError(f"keystore: {PRIVATE_KEY} is set too, or was when this process began; set one of them")

    def _signer(self) -> LocalSigner | None:
        self._check_one_key()
        if self.private_key is not None:
            return LocalSigner.from_key(
                self.private_key.get_secret_value()
            )  # unwrapped here: crash reports show locals
        if self.keystore is None:
            return None
        password = self.keystore_password
        if password is None:
            refuse_key(self.keystore)
            raise ConfigError(f"keystore: {self.keystore} has a password; set {KEYSTORE_PASSWORD}")
        return LocalSigner.from_keystore(self.keystore, password=password.get_secret_value())

    def read_chains(self) -> dict[str, Chain]:
        """Return each network's chain. Raises ``ConfigError`` naming the network."""
        chains = {}
        for network, given in self.chains.items():
            try:
                chains[network] = given.chain()
            except ConfigError as error:
                raise ConfigError(f"chains[{network!r}]: {error}") from error
        return chains

    def _webhook(self) -> Webhook | None:
        if self.webhook_url is None:
            return None
        secret = self.webhook_secret
        return Webhook(url=self.webhook_url, secret="" if secret is None else secret.get_secret_value())


def load_settings(path: Path | None = None) -> Settings:
    """Read the settings, and remove the secrets from the environment. Later calls in this process still return them.

    ``path`` is a TOML file; by default that of ``X402GUARD_CONFIG``, else ``x402guard.toml`` in the working directory, if
    it is trusted. Raises ``ConfigError`` naming the setting, never with a secret in it.
    """
    try:
        _check_names()
        return _with_secrets(_read(find_settings(path)))
    finally:
        for name in [name for name in os.environ if name.upper() in _SECRET_NAMES]:
            os.environ.pop(name, None)  # another thread may have taken it


def _with_secrets(settings: Settings) -> Settings:
    """Return settings with the secrets that were read before; those that are set now come first."""
    for name in _SECRETS:
        secret = getattr(settings, name)
        if secret is not None:
            _READ_BEFORE[name] = secret
    before = {name: secret for name, secret in _READ_BEFORE.items() if getattr(settings, name) is None}
    return settings.model_copy(update=before)


def settings_sources(path: Path | None = None) -> str:
    """Return which settings come from the environment and which from the file, in one line. Raises as ``load_settings``."""
    given = sorted(name for name in os.environ if name.upper().startswith(ENV_PREFIX) and name not in _NO_SETTINGS)
    said = f"{', '.join(given) or 'nothing'} from the environment"
    file = find_settings(path)
    if file is None:
        return f"{said}; no file"
    keys = ", ".join(_toml(file))
    unused = "; its table [policy] is not used, because the environment sets the policy" if _sets_policy() else ""
    return f"{said}; {keys or 'nothing'} from {file.path.absolute()}{unused}"


class Stated(Struct, frozen=True):
    """One setting as it was written ("set" for what may hold a key), its variable or file, and whether it lets more pass."""

    name: str
    value: str
    source: str
    loosens: bool


def check_settings(file: SettingsFile) -> list[Stated]:
    """Return what a file states, as it was read. Raises ``ConfigError`` for an error in it."""
    _read(file)
    return [row for row in _stated(file) if row.source == str(file.path.absolute())]


def stated_settings(path: Path | None = None) -> list[Stated]:
    """Return each setting that the environment or the file states, by name. Raises as ``load_settings``."""
    return _stated(find_settings(path))


def _stated(file: SettingsFile | None) -> list[Stated]:
    given: list[tuple[str, Any, str]] = []
    for variable, value in os.environ.items():
        if variable.upper().startswith(ENV_PREFIX) and variable not in _NO_SETTINGS:
            given.append((variable[len(ENV_PREFIX) :].lower().replace("__", "."), value, variable))
    for name, value in ({} if file is None else _toml(file)).items():
        if name == "policy" and _sets_policy():
            continue
        inner = value if name in _TABLES and isinstance(value, dict) else {"": value}
        source = str(file.path.absolute()) if file is not None else ""
        given += [(f"{name}.{key}" if key else name, part, source) for key, part in inner.items()]
    return [
        Stated(name, "set" if name.partition(".")[0] in _MAY_HOLD_KEYS else f"{value}", source, _may_loosen(name))
        for name, value, source in sorted(given, key=lambda row: row[0])
    ]


def _may_loosen(name: str) -> bool:
    return name in _LOOSENS or "unsafe_" in name or name in _TABLES


_METERING: Final = frozenset(["models", "free", "fixed_prices", "allowances", "prices", "endpoints", "aliases"])
_LOOSENS: Final = frozenset(f"metering.{name}" for name in _METERING) | {
    *("assets", "mode", "chains", "ledger", "webhook_url", "approver", "purchase_memory_s", "proxy.paths"),
    "policy.sellers",
}


def _sets_policy() -> bool:
    return any(name.upper().startswith(f"{ENV_PREFIX}POLICY") for name in os.environ)


def _read(file: SettingsFile | None) -> Settings:
    class FromFile(Settings):
        its_file: ClassVar[SettingsFile | None] = file
        model_config = SettingsConfigDict(toml_file=None if file is None else file.path)

    try:
        return FromFile()
    except ValidationError as error:
        raise ConfigError(_in_our_words(error, None if file is None else file.path)) from None
    except ConfigError:
        raise
    except SettingsError as error:
        field = str(error).partition('field "')[2].partition('"')[0]  # pydantic names it, but not its value
        hint = "lists and tables in the environment are JSON, such as " + _JSON_HINTS.get(field, _JSON_LIST)
        raise ConfigError(f"{ENV_PREFIX}{field.upper()}: not JSON; {hint}") from None


def _toml(file: SettingsFile) -> dict[str, Any]:
    """Return what a file says. Raises ``ConfigError`` if it is no TOML."""
    try:
        # Editors on Windows begin a file with a byte order mark, which tomllib does not know.
        return tomllib.loads(file.content.decode("utf-8-sig"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        told = str(error).replace("Cannot overwrite a value", "a key is there twice")
        raise ConfigError(f"{file.path}: cannot be read: {told}") from None


def _in_our_words(error: ValidationError, path: Path | None) -> str:
    """Return the first error with the setting's name as its owner wrote it, and how to write it."""
    first = error.errors(include_url=False)[0]
    # For a table that may also be false, pydantic names the model, which the owner never wrote.
    loc = [str(part) for part in first["loc"] if not (isinstance(part, str) and _PYDANTICS.search(part))]
    if first["type"] == "extra_forbidden":
        known = [name for name in _fields_at(Settings, loc[:-1]) if name not in _SECRETS]
        near = difflib.get_close_matches(loc[-1], known, n=1)
        hint = f"; did you mean {near[0]}?" if near else f"; known are {', '.join(known)}"
        if len(loc) > 1 and loc[-1] in _fields_at(Settings, []):
            hint = f"; {loc[-1]} is a setting of its own: it stands above the first [table] of the file"
        return f"{'.'.join(loc)}: there is no such setting (in {path or CONFIG_FILE} or {ENV_PREFIX}*){hint}"
    variable = f"{ENV_PREFIX}{'__'.join(loc[: 2 if loc[0] in _TABLES else 1]).upper()}"
    where = f"(set by {variable}, or in {path or CONFIG_FILE})"
    return f"{'.'.join(loc)}: {_what_is_wrong(first, loc)} {where}"


def _what_is_wrong(error: ErrorDetails, loc: list[str]) -> str:
    """Return what is wrong with a value, and how to write it. A value that may hold a key is not shown."""
    kind, expected = error["type"], error.get("ctx", {}).get("expected", "")
    hidden = loc[0] in _MAY_HOLD_KEYS or _LIKE_A_KEY.search(str(error["input"]))
    given = "it" if hidden else f"{error['input']!r:.60}"
    money = loc[-1] in _MONEY or loc[:2] in _TABLES_OF_MONEY
    words = {
        "missing": f"it is missing; write {loc[-1]} = …",
        "int_parsing": f"{given} is not a whole number",
        "int_type": f"{given} is not a whole number",
        "int_from_float": f"{given} is not a whole number",
        "bool_parsing": f"{given} is neither true nor false",
        "bool_type": f"{given} is neither true nor false",
        "float_parsing": f"{given} is not a number",
        "float_type": f"{given} is not a number",
        "list_type": f'{given} is not a list; write a list, such as ["a", "b"]',
        "dict_type": f"{given} is not a table",
        "model_type": f"{given} is not a table{_instead(loc)}",
        "literal_error": f"{given} is not {expected}",
        "string_type": f"{given} is not text" + ('; write it as text, such as "$5.00"' if money else ""),
    }
    return words.get(kind) or str(error["msg"])


def _instead(loc: list[str]) -> str:
    if loc[0] == "chains":
        return "; write a URL, or a list of URLs"
    return "; write its keys, or false for no such rule" if loc[0] == "policy" and len(loc) == 2 else ""


_PYDANTICS: Final = re.compile(r"Settings$|^(list|dict|function-before)\[|^str$")
_LIKE_A_KEY: Final = re.compile(r"[0-9a-fA-F]{32}")
_MAY_HOLD_KEYS: Final = frozenset({"private_key", "keystore_password", "webhook_secret", "webhook_url", "chains"})
_MONEY: Final = frozenset({"session_budget", "above", "ceiling", "budget", "per_payment_cap", "reorg_exposure", "usd"})
_TABLES_OF_MONEY: Final = (["metering", "models"], ["metering", "fixed_prices"], ["metering", "allowances"])


def _fields_at(table: type[BaseModel], loc: list[str]) -> Mapping[str, object]:
    """Return the settings of the table at *loc*. Its numbers and free names go through lists and mappings."""
    for part in loc:
        field = table.model_fields.get(part)
        inner = [] if field is None else tables_in(field.annotation)
        table = inner[0] if inner else table
    return table.model_fields


def tables_in(annotation: object) -> list[type[BaseModel]]:
    """Return the tables that a setting of this type can have."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [table for inner in get_args(annotation) for table in tables_in(inner)]


_SECRETS: Final = frozenset({"private_key", "keystore_password", "webhook_secret"})
# Tables of the file whose keys can also be set one by one in the environment.
_TABLES: Final[dict[str, type[BaseModel]]] = {
    "policy": PolicySettings,
    "metering": MeteringSettings,
    "proxy": ProxySettings,
}
_NO_SETTINGS: Final = frozenset({"X402GUARD_ANVIL", CONFIG, REPORT_KEY_PASSWORD})  # what others read
_JSON_LIST: Final = '["a", "b"]'
_JSON_HINTS: Final = {
    "chains": '{"base-sepolia": "https://…"}',
    "assets": '[{"network": "…", "address": "…"}]',
    "policy": '{"per_payment_cap": "$0.50"}',
    "metering": '{"unbounded_output": "refuse"}',
}


_NOT_IN_A_FILE: Final = (
    ("private_key", "key", PRIVATE_KEY),
    ("keystore_password", "password", KEYSTORE_PASSWORD),
    ("webhook_secret", "secret", WEBHOOK_SECRET),
)


class _Environment(EnvSettingsSource):
    """The environment, whose lists and tables are JSON that has one reading, and no null.

    With pydantic's own reader, the last of two equal keys would win, and null would mean "no such rule".
    """

    def decode_complex_value(self, field_name: str, field: FieldInfo, value: Any) -> Any:  # noqa: ARG002 - pydantic's
        if field_name == "budget" and value.lstrip()[:1] != "{":
            return value  # dollars, which are JSON, too
        try:
            found = read_json(value)
        except NotReadable as error:
            if value.lstrip()[:1] not in ("{", "["):
                raise  # the setting may be a text as well
            key = "" if _LIKE_A_KEY.search(error.words) else error.words
            shape = _JSON_HINTS.get(field_name, _JSON_LIST)
            hint = f"; write it as {shape}" if str(error).startswith("not JSON") else ""
            raise ConfigError(f"{_variable_of(value, field_name)}: {error}{key and f': {key!r:.60}'}{hint}") from None
        if wrong := two_readings(found):
            raise ConfigError(f"{_variable_of(value, field_name)}: {wrong}")
        return found


def _variable_of(value: str, field_name: str) -> str:
    """Return the name of the variable with this value: pydantic knows the last part of the name alone."""
    names = (n for n, given in os.environ.items() if given == value and n.startswith(ENV_PREFIX))
    return next((n for n in names if n.endswith(field_name.upper())), field_name)


class _TomlWithoutKey(TomlConfigSettingsSource):
    """The TOML file without secrets, and without its policy if the environment sets one, which would be mixed with it.

    Files are copied, committed and backed up.
    """

    def __init__(self, settings_cls: type[BaseSettings]) -> None:
        self._file: SettingsFile | None = getattr(settings_cls, "its_file", None)
        super().__init__(settings_cls)

    def _read_file(self, file_path: Any) -> dict[str, Any]:
        values = {} if self._file is None else _toml(self._file)
        for name in values:
            if name not in Settings.model_fields and name.lower() in Settings.model_fields:
                # pydantic would take one of [policy] and [Policy], and drop the other.
                raise ConfigError(
                    f"{name}: settings are written in small letters (in {file_path}); write {name.lower()}"
                )
        return values

    def __call__(self) -> dict[str, Any]:
        values = super().__call__()
        for name, what, variable in _NOT_IN_A_FILE:
            if name in values:
                raise ConfigError(f"{name}: a {what} does not belong in a settings file; set {variable} instead")
        return {name: value for name, value in values.items() if name != "policy" or not _sets_policy()}


def _check_names() -> None:
    """Raise ``ConfigError`` for an unknown ``X402GUARD_*`` name: ignoring a typo would drop a limit."""
    known = {f"{ENV_PREFIX}{name.upper()}" for name in Settings.model_fields}  # the whole policy as JSON, too
    nested = {
        f"{ENV_PREFIX}{table.upper()}__{name.upper()}" for table, kind in _TABLES.items() for name in kind.model_fields
    }
    for name in os.environ:
        if name.upper().startswith(ENV_PREFIX) and name not in known | nested | _NO_SETTINGS:
            near = difflib.get_close_matches(name.upper(), known | nested, n=1)
            tables = " and ".join(f"{ENV_PREFIX}{table.upper()}__…" for table in _TABLES)
            hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(sorted(known))}, {tables}"
            raise ConfigError(f"{name}: there is no such setting; {hint}")
