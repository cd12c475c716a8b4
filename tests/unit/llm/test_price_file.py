"""What is taken in is what its owner said yes to."""

import json

import pytest

from x402guard import ConfigError
from x402guard.vendors.price_file import read_prices, write_prices


def a_book(price):
    model = {"id": "m", "match": {"equals": "m"}, "prices": {"input_mtok": price, "output_mtok": price}}
    return json.dumps([{"id": "p", "name": "P", "api_pattern": "https://p", "models": [model]}])


def test_a_file_that_changed_after_the_yes_is_not_taken_in(tmp_path):
    path, target = tmp_path / "new.json", tmp_path / "taken.json"
    path.write_text(a_book(1))
    seen = read_prices(path)[1]
    path.write_text(a_book(0))
    with pytest.raises(ConfigError, match="was changed after its hash was confirmed"):
        write_prices(path, target, seen=seen)
    assert not target.exists()
    path.write_text(a_book(1))
    assert write_prices(path, target, seen=seen) == seen
