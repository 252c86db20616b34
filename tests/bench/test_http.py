"""Addresses are read in every form; what a connection does is in test_load.py."""

import pytest

from octavo.bench.http import Address
from octavo.errors import ConfigError


@pytest.mark.parametrize(
    ("url", "found", "host"),
    [
        ("http://127.0.0.1:8000", Address("127.0.0.1", 8000, False, ""), "127.0.0.1:8000"),
        ("http://a.example/", Address("a.example", 80, False, ""), "a.example"),
        ("https://a.example/api/", Address("a.example", 443, True, "/api"), "a.example"),
        ("http://[::1]:9", Address("::1", 9, False, ""), "[::1]:9"),
    ],
)
def test_an_address_is_read(url: str, found: Address, host: str) -> None:
    assert Address.parse(url) == found
    assert found.host_header == host


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "ftp://a", "http://", "http://a:99999", ""])
def test_a_wrong_address_is_named(url: str) -> None:
    with pytest.raises(ConfigError, match="base-url"):
        Address.parse(url)
