"""The configuration of the HTTP server: what `octavo serve` takes beside the engine's options.

A value that could have no effect, such as an origin that no browser sends or TLS options without
a certificate, is refused. Files and sockets are looked at in `server.tls` and `server.listener`.
"""

import argparse
import ipaddress
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal
from urllib.parse import urlsplit

from octavo.config import check_type
from octavo.errors import ConfigError, nearest
from octavo.log import FORMATS, LEVELS
from octavo.utils.flags import add_flags, flag_name

STATS_SECONDS = 10.0
_METHODS = ("*", "DELETE", "GET", "HEAD", "OPTIONS", "PATCH", "POST", "PUT")
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/\s,*A-Z]+")  # as browsers write it in `Origin`
_KEY = re.compile(r"[!-~]+")  # what fits into a header behind `Bearer `
_TOKEN = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")  # a header's name (RFC 9110)

ReasoningField = Literal["both", "reasoning", "reasoning_content"]
UvicornLevel = Literal["critical", "error", "warning", "info", "debug", "trace"]


def _option(default: Any, help: str, **metadata: Any) -> Any:
    return field(default=default, metadata={"help": help, **metadata})


def _words(default: tuple[str, ...], help: str, split: bool = True) -> Any:
    """Several words: each a value or, where `split`, a comma list or a JSON list of values."""
    return field(default=default, metadata={"help": help, "words": True, "split": split})


@dataclass(frozen=True)
class ServerConfig:
    """The configuration of `octavo serve`. Raises ConfigError, naming field, value and remedy."""

    host: str = _option("127.0.0.1", "address to listen on; 0.0.0.0 is every interface")
    port: int = _option(8000, "port to listen on; 0 chooses a free one", low=0)
    uds: str | None = _option(
        None, "path of a Unix socket to listen on, in place of host and port; its mode is 0660"
    )
    ssl_keyfile: str | None = _option(
        None, "TLS: PEM file with the private key, if it is not in --ssl-certfile"
    )
    ssl_certfile: str | None = _option(None, "TLS: PEM file with the certificate and its chain")
    ssl_ca_certs: str | None = _option(
        None, "TLS: PEM file with the authorities that sign clients' certificates"
    )
    ssl_cert_reqs: int = _option(
        0, "TLS: clients' certificates are 0 not asked for, 1 optional, 2 required", low=0
    )
    api_key: tuple[str, ...] = _words(
        (),
        "keys, of which requests must have one, except for /health and /ping; better set in "
        "OCTAVO_API_KEY",
        split=False,
    )
    metrics_without_key: bool = _option(False, "serve /metrics without a key")
    served_model_name: tuple[str, ...] = _words(
        (), "names of the model in requests; answers have the first one"
    )
    root_path: str = _option("", "path prefix under which a proxy serves this server")
    allowed_origins: tuple[str, ...] = _words(
        (), "origins whose web pages may call (CORS), such as https://example.com, or *"
    )
    allowed_methods: tuple[str, ...] = _words(("*",), "CORS: methods that those pages may use")
    allowed_headers: tuple[str, ...] = _words(("*",), "CORS: headers that those pages may send")
    allow_credentials: bool = _option(False, "CORS: those pages may send cookies")
    forwarded_allow_ips: tuple[str, ...] = _words(
        ("127.0.0.1", "::1"),
        "addresses and networks of proxies whose X-Forwarded-For is believed, or *; the log shows "
        "the client's address from it",
    )
    max_body_mb: float = _option(32, "maximum size of a request body in MiB")
    drain_timeout: float = _option(30, "seconds for running requests to finish after SIGTERM")
    stall_timeout: float = _option(
        60, "seconds after which a stream that its client does not read is ended"
    )
    keep_alive_timeout: float = _option(
        75, "seconds that an idle connection stays open; above those of a proxy in front"
    )
    exclude_tools_when_tool_choice_none: bool = _option(
        False, "do not show the model tools that tool_choice 'none' forbids"
    )
    reasoning_field: ReasoningField = _option(
        "both", "names under which chat answers have reasoning: clients read one or the other"
    )
    log_requests: bool = _option(False, "log prompts and answers too, not only their sizes")
    log_level: str | None = _option(
        None, f"least severe level to log: {', '.join(LEVELS)}; default: OCTAVO_LOG_LEVEL, or info"
    )
    log_format: str | None = _option(
        None, "text, or json: one object per line; default: OCTAVO_LOG_FORMAT, or text"
    )
    uvicorn_log_level: UvicornLevel = _option("error", "the same for the HTTP library's own log")
    stats_interval: float = _option(
        STATS_SECONDS, "seconds between lines with rates in the log, while requests are served"
    )
    disable_log_stats: bool = _option(False, "leave out the lines with rates")
    dashboard: bool = _option(True, "serve /dashboard: the engine's blocks, requests and rates")
    otlp_traces_endpoint: str | None = _option(
        None, "OpenTelemetry: URL of a collector that takes OTLP over HTTP, such as "
              "http://localhost:4318; each request becomes a span"
    )  # fmt: skip
    restart_engine: bool = _option(
        False, "start an engine that has died again; its requests continue"
    )

    def __post_init__(self) -> None:
        for item in fields(self):
            (_check_words if "words" in item.metadata else check_type)(
                item, getattr(self, item.name)
            )
        self._check_address()
        self._check_access()
        self._check_proxies()
        self._check_tls()
        self._check_log()
        self._check_spans()
        if not 0 <= self.drain_timeout < 1e6:
            raise ConfigError(f"drain_timeout must be seconds from 0, not {self.drain_timeout}")
        for name in ("max_body_mb", "stall_timeout", "keep_alive_timeout", "stats_interval"):
            if not 0 < getattr(self, name) < 1e6:
                raise ConfigError(f"{name} must be above 0, not {getattr(self, name)}")

    def _check_address(self) -> None:
        if self.port > 65535:
            raise ConfigError(f"port must be between 0 and 65535, not {self.port}")
        if self.uds == "":
            raise ConfigError("uds must not be empty; leave it out to listen on host and port")
        if self.uds and (self.host, self.port) != (ServerConfig.host, ServerConfig.port):
            raise ConfigError(
                f"uds is {self.uds!r}, so that host and port have no effect; give either"
            )
        if self.root_path and not self.root_path.startswith("/"):
            raise ConfigError(f"root_path must start with '/', not {self.root_path!r}")

    def _check_access(self) -> None:
        for key in self.api_key:
            if not key:
                raise ConfigError("api_key must not be empty; leave it out for none")
            if not _KEY.fullmatch(key):
                raise ConfigError(
                    "api_key must be printable ASCII characters without spaces: no client can "
                    "send another one in a header (is there a newline at its end?)"
                )
        if self.metrics_without_key and not self.api_key:
            raise ConfigError("metrics_without_key needs an api_key; without one all is open")
        for origin in self.allowed_origins:
            if origin not in ("*", "null") and not _ORIGIN.fullmatch(origin):
                raise ConfigError(
                    f"allowed_origins has {origin!r}, which no browser sends; an origin is a "
                    "scheme and a host in lower case, such as https://example.com or "
                    "http://localhost:3000, without a path or a '/' at the end; or it is '*'"
                )
        for method in self.allowed_methods:
            if method not in _METHODS:
                raise ConfigError(
                    f"allowed_methods has {method!r}{nearest(method.upper(), _METHODS)}; known: "
                    f"{', '.join(_METHODS)}"
                )
        for header in self.allowed_headers:
            if not _TOKEN.fullmatch(header):
                raise ConfigError(f"allowed_headers has {header!r}, which is no header's name")
        for name in ("allowed_methods", "allowed_headers", "allow_credentials"):
            if not self.allowed_origins and getattr(self, name) != getattr(ServerConfig, name):
                raise ConfigError(f"{name} has no effect without allowed_origins")

    def _check_proxies(self) -> None:
        for proxy in self.forwarded_allow_ips:
            try:
                if proxy != "*":
                    ipaddress.ip_network(proxy)
            except ValueError as error:
                raise ConfigError(
                    f"forwarded_allow_ips has {proxy!r}; give addresses such as 10.0.0.7, networks "
                    f"such as 10.0.0.0/8, or '*' ({error})"
                ) from None

    def _check_tls(self) -> None:
        if not self.ssl_certfile:
            for name in ("ssl_keyfile", "ssl_ca_certs", "ssl_cert_reqs"):
                if getattr(self, name):
                    raise ConfigError(f"{name} has no effect without ssl_certfile")
        if self.ssl_cert_reqs > 2:
            raise ConfigError(f"ssl_cert_reqs must be 0, 1 or 2, not {self.ssl_cert_reqs}")
        if bool(self.ssl_ca_certs) != bool(self.ssl_cert_reqs):
            raise ConfigError(
                f"ssl_ca_certs is {self.ssl_ca_certs!r} and ssl_cert_reqs is {self.ssl_cert_reqs}: "
                "to check clients' certificates give both (1: optional, 2: required)"
            )

    def _check_log(self) -> None:
        for name, known in (("log_level", LEVELS), ("log_format", FORMATS)):
            value = getattr(self, name)
            if value is not None and value not in known:
                raise ConfigError(f"{name} must be one of {known}, not {value!r}")
        if self.disable_log_stats and self.stats_interval != STATS_SECONDS:
            raise ConfigError("stats_interval has no effect with disable_log_stats")

    def _check_spans(self) -> None:
        given = self.otlp_traces_endpoint
        if given is None:
            return
        try:
            url = urlsplit(given)
            whole = url.scheme in ("http", "https") and bool(url.hostname) and (url.port or 1) > 0
        except ValueError:
            whole = False
        if not whole:
            raise ConfigError(
                f"otlp_traces_endpoint must be a URL such as http://localhost:4318, not {given!r}; "
                "spans are sent as OTLP over HTTP, not gRPC"
            )

    @property
    def scheme(self) -> str:
        return "https" if self.ssl_certfile else "http"


def _check_words(item: Any, value: object) -> None:
    if not isinstance(value, tuple) or not all(isinstance(word, str) for word in value):
        raise ConfigError(f"{item.name} must be a tuple of str, not {value!r}")


class _Words(argparse.Action):
    """Collects the words of a flag, which may be given several times."""

    def __call__(
        self, parser: Any, namespace: argparse.Namespace, values: Any, option: str | None = None
    ) -> None:
        split = _WORDS[self.dest].metadata["split"]
        try:
            found = [part for word in values for part in (_parts(word) if split else [word])]
        except ValueError as error:
            parser.error(f"argument {option}: {error}")
        setattr(namespace, self.dest, (*getattr(namespace, self.dest, ()), *found))


def _parts(word: str) -> list[str]:
    """The values of one word: a JSON list of strings, or a comma list."""
    if not word.lstrip().startswith("["):
        return [part for part in map(str.strip, word.split(",")) if part]
    try:
        value = json.loads(word)
    except ValueError:
        value = None
    if not isinstance(value, list) or not all(isinstance(part, str) for part in value):
        raise ValueError(f"{word!r} is not a JSON list of strings, such as '[\"*\"]'")
    return value


_WORDS = {item.name: item for item in fields(ServerConfig) if "words" in item.metadata}


def add_server_flags(group: argparse._ArgumentGroup) -> None:
    """One flag for each field of ServerConfig. Flags left out leave no attribute."""
    add_flags(group, ServerConfig, skip=tuple(_WORDS))
    for name, item in _WORDS.items():
        usual = " ".join(getattr(ServerConfig, name)) or "none"
        group.add_argument(
            flag_name(name),
            dest=name,
            nargs="+",
            action=_Words,
            metavar="WORD",
            default=argparse.SUPPRESS,
            help=f"{item.metadata['help']} (default: {usual})",
        )


def last_word(given: Mapping[str, Any]) -> tuple[str, tuple[str, ...], str] | None:
    """What may be the model in `serve --api-key KEY MODEL`: (field, other words, last word).

    A flag that takes several words takes also a model that follows it. None where no flag, or
    more than one, has several.
    """
    several = [name for name in _WORDS if len(given.get(name, ())) > 1]
    if len(several) != 1:
        return None
    words: Sequence[str] = given[several[0]]
    return several[0], tuple(words[:-1]), words[-1]
