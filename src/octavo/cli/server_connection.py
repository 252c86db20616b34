"""Calls of a running server from a command: one connection a call, with the key, errors in words.

Not here: proxies, redirects, retries, and what an answer means.
"""

import contextlib
import http.client
import json
import ssl
from collections.abc import Iterator, Mapping
from typing import Any

from octavo.bench.http import Address
from octavo.errors import ConfigError, RequestError, cause

_CONNECT_SECONDS = 10


class ServerConnection:
    """A server by its URL, with or without http:// and /v1. Raises ConfigError for what
    is no URL or no key.

    read_seconds: how long a read may take; None is without a limit, for prompts that take time.
    """

    def __init__(
        self, url: str, key: str | None, agent: str, read_seconds: float | None = None
    ) -> None:
        whole = url if "://" in url or url.startswith("unix:") else f"http://{url}"
        self._address = address = Address.parse(whole, "url")
        self._path = address.path.removesuffix("/v1")
        scheme = "https" if address.tls else "http"
        self.url = f"{scheme}://{address.host_header}{self._path}"
        self.host = address.host
        self._read_seconds = read_seconds
        self._headers = {"User-Agent": agent, "Content-Type": "application/json"}
        if key is not None:
            if not (key.isascii() and key.isprintable()):
                raise ConfigError("the API key must be printable ASCII characters")
            self._headers["Authorization"] = f"Bearer {key}"

    @contextlib.contextmanager
    def request(
        self, method: str, path: str, body: Mapping[str, Any] | None = None
    ) -> Iterator[http.client.HTTPResponse]:
        """One call, whatever its status. Leaving the block closes the connection, which aborts an
        answer. Raises RequestError where the server does not answer."""
        connection = self._connection()
        response: http.client.HTTPResponse | None = None
        try:
            connection.connect()
            connection.sock.settimeout(self._read_seconds)
            data = None if body is None else json.dumps(body).encode()
            connection.request(method, self._path + path, data, self._headers)
            response = connection.getresponse()
            yield response
        # UnicodeError: of a host's name that cannot be one.
        except (OSError, http.client.HTTPException, UnicodeError) as error:
            raise RequestError(
                f"the server at {self.url} does not answer: {cause(error)}"
            ) from None
        finally:
            if response is not None:
                response.close()
            connection.close()

    def _connection(self) -> http.client.HTTPConnection:
        host, port = self._address.host, self._address.port
        if self._address.tls:
            context = ssl.create_default_context()
            return http.client.HTTPSConnection(
                host, port, timeout=_CONNECT_SECONDS, context=context
            )
        return http.client.HTTPConnection(host, port, timeout=_CONNECT_SECONDS)
