"""A setting that two readers could read differently is refused: twice the same key, null, 0 for false, capitals."""

import os

import pytest

from x402guard import ConfigError
from x402guard.guard.settings import load_settings, settings_sources


@pytest.fixture(autouse=True)
def _clean(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.upper().startswith("X402GUARD_")]:
        monkeypatch.delenv(name)


@pytest.mark.parametrize(
    ("variable", "value", "says"),
    [
        ("POLICY", '{"hosts": ["a.b"], "hosts": ["c.d"]}', "POLICY: a key appears twice in one object: 'hosts'"),
        ("POLICY", '{"loop": {"window_s": 1, "window_s": 2}}', "POLICY: a key appears twice in one object: 'window_s'"),
        ("CHAINS", '{"base": "http://a", "base": "http://b"}', "CHAINS: a key appears twice in one object: 'base'"),
        ("ASSETS", '[{"network": "a", "network": "b"}]', "ASSETS: a key appears twice"),
        ("CHAINS", f'{{"{"ab" * 32}": "http://a", "{"ab" * 32}": "http://b"}}', "CHAINS: a key appears twice"),
        ("POLICY", '{"hosts": null}', "POLICY: null is no value; leave out what is not set"),
        (
            "POLICY",
            '{"velocity": {"calls_per_hour": 1}, "Velocity": false}',
            "POLICY: a name appears twice, in capitals",
        ),
        ("POLICY", "null", "POLICY: null is no value"),
        ("POLICY__HOSTS", "null", "POLICY__HOSTS: null is no value"),
        ("POLICY__VELOCITY", '{"dollars_per_hour": null}', "POLICY__VELOCITY: null is no value"),
        ("POLICY__VELOCITY", '{"dollars_per_hour": NaN}', "POLICY__VELOCITY: NaN is not a JSON number"),
        ("METERING__MODELS", '{"a": null}', "METERING__MODELS: null is no value"),
        ("POLICY__HOSTS", "[a.b, c.d]", r'POLICY__HOSTS: not JSON: .*; write it as \["a", "b"\]'),
        ("POLICY__HOSTS", "[" * 5000, "POLICY__HOSTS: nested too deeply"),
        ("POLICY__VELOCITY", "0", "policy.velocity: 0 is not a table; write its keys, or false for no such rule"),
        ("POLICY", '{"loop": 0}', "policy.loop: 0 is not a table"),
    ],
)
def test_json_in_the_environment_has_one_reading(monkeypatch, variable, value, says):
    monkeypatch.setenv(f"X402GUARD_{variable}", value)
    with pytest.raises(ConfigError, match=says) as caught:
        load_settings()
    assert "abab" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('[policy]\nhosts = ["a.b"]\n[Policy]\nhosts = ["c.d"]\n', "Policy: settings are written in small letters"),
        ('Budget = "$5"\n', "Budget: settings are written in small letters .*; write budget$"),
        ("[policy]\nvelocity = 0\n", "policy.velocity: 0 is not a table"),
        ("[policy]\nloop = 0.0\n", r"policy.loop: 0.0 is not a table"),
        ('budget = "$5"  # ours\rsession_budget = "$50"\n', "cannot be read"),
        ("budget = " + "[" * 20_000, "cannot be read"),
    ],
)
def test_a_file_has_one_reading(tmp_path, text, says):
    file = tmp_path / "rules.toml"
    file.write_bytes(text.encode())
    with pytest.raises(ConfigError, match=says):
        load_settings(file)


def test_false_is_no_such_rule(tmp_path, monkeypatch):
    file = tmp_path / "rules.toml"
    file.write_text("[policy]\nvelocity = false\n")
    assert load_settings(file).policy.build().velocity is None
    monkeypatch.setenv("X402GUARD_POLICY__VELOCITY", "false")
    assert load_settings().policy.build().velocity is None


def test_a_file_may_begin_with_a_byte_order_mark(tmp_path):
    file = tmp_path / "rules.toml"
    file.write_bytes('budget = "$5.00"\n'.encode("utf-8-sig"))
    assert load_settings(file).budget == "$5.00"
    assert settings_sources(file).startswith("nothing from the environment; budget from ")
