"""The server's options: several words, what cannot have an effect, one flag a field."""

import argparse
import ssl
from dataclasses import fields

import pytest

from octavo.errors import ConfigError
from octavo.server.options import ServerConfig, add_server_flags


def parse(*words):
    parser = argparse.ArgumentParser(exit_on_error=False)
    add_server_flags(parser.add_argument_group("server"))
    return vars(parser.parse_args(words))


def refused(**options):
    with pytest.raises(ConfigError) as caught:
        ServerConfig(**options)
    assert next(iter(options)) in str(caught.value)
    return str(caught.value)


def test_each_field_is_a_flag_that_is_explained():
    parser = argparse.ArgumentParser()
    add_server_flags(parser.add_argument_group("server"))
    flags = {option for action in parser._actions for option in action.option_strings}
    for field in fields(ServerConfig):
        assert field.metadata["help"]
        assert "--" + field.name.replace("_", "-") in flags
    assert parse() == {}
    assert parse("--ssl-cert-reqs=2", "--disable-log-stats") == {
        "ssl_cert_reqs": int(ssl.CERT_REQUIRED), "disable_log_stats": True,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("words", "origins"),
    [
        (['["*"]'], ("*",)),  # vLLM's syntax
        (['["http://a", "https://b:8"]'], ("http://a", "https://b:8")),
        (["http://a,https://b"], ("http://a", "https://b")),
        (["http://a", "https://b, http://c"], ("http://a", "https://b", "http://c")),
        (["*"], ("*",)),
    ],
)
def test_origins_in_json_in_a_comma_list_or_in_words(words, origins):
    given = parse("--allowed-origins", *words)
    assert ServerConfig(**given).allowed_origins == origins
    assert parse("--allowed-origins=http://z", "--allowed-origins", *words) == {
        "allowed_origins": ("http://z", *origins)
    }


def test_a_key_is_taken_as_it_is():
    assert parse("--api-key", "a,b", '["c"]') == {"api_key": ("a,b", '["c"]')}
    with pytest.raises(SystemExit):
        parse("--allowed-origins", '["*"')


@pytest.mark.parametrize(
    ("field", "good", "bad"),
    [
        ("port", [0, 8000, 65535], [-1, 65536, "80", None]),
        ("root_path", ["", "/api"], ["api"]),
        ("api_key", [(), ("k",), ("k", "l")], ["k", ("",), ("a b",), ("k\n",), ("ключ",), None]),
        ("served_model_name", [("a", "b")], ["a", [1]]),
        ("max_body_mb", [1, 0.5], [0, -1, float("nan")]),
        ("drain_timeout", [0, 30], [-1, float("inf")]),
        ("stall_timeout", [1], [0]),
        ("stats_interval", [0.5], [0, -1]),
        ("log_level", [None, "debug"], ["DEBUG", "loud"]),
        ("log_format", [None, "text", "json"], ["xml"]),
        ("uvicorn_log_level", ["trace", "info"], ["loud"]),
        ("ssl_cert_reqs", [0], [3, -1, True]),
        ("uds", [None, "x"], [""]),
        ("forwarded_allow_ips", [("*",), ("10.0.0.0/8", "::1"), ()], [("proxy",), ("10.0.0.1/8",)]),
        ("allowed_origins", [("null",)], [
            ("http://page/",), ("page",), ("http://Page",), ("https://*.page",), ("http://page/x",),
        ]),
    ],
)  # fmt: skip
def test_ranges(field, good, bad):
    for value in good:
        assert getattr(ServerConfig(**{field: value}), field) == value
    for value in bad:
        refused(**{field: value})


@pytest.mark.parametrize(
    "options",
    [
        {"allow_credentials": True}, {"allowed_methods": ("GET",)}, {"allowed_headers": ("X-A",)},
        {"metrics_without_key": True}, {"ssl_keyfile": "k"}, {"ssl_ca_certs": "c"},
        {"ssl_cert_reqs": 2}, {"ssl_cert_reqs": 2, "ssl_certfile": "c"},
        {"ssl_ca_certs": "a", "ssl_certfile": "c"}, {"uds": "s", "port": 1},
        {"uds": "s", "host": "::1"}, {"stats_interval": 1, "disable_log_stats": True},
        {"allowed_methods": ("get",), "allowed_origins": ("*",)},
        {"allowed_headers": ("X A",), "allowed_origins": ("*",)},
    ],
)  # fmt: skip
def test_what_would_have_no_effect_is_refused(options):
    refused(**options)
