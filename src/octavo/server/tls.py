"""TLS of the server: its files are checked at start, before anything is loaded.

uvicorn makes the context that is served with, from the same files.
"""

import os
import ssl

from octavo.errors import ConfigError
from octavo.server.options import ServerConfig


def check_tls(options: ServerConfig) -> None:
    """Raise ConfigError unless certificate, key and authorities can be read and fit together."""
    if options.ssl_certfile is None:
        return
    for name in ("ssl_certfile", "ssl_keyfile", "ssl_ca_certs"):
        path = getattr(options, name)
        if path is not None and not (os.access(path, os.R_OK) and os.path.isfile(path)):
            problem = (
                "does not exist" if not os.path.exists(path)
                else "cannot be read" if os.path.isfile(path)
                else "is not a file"
            )  # fmt: skip
            raise ConfigError(f"{name}: {path} {problem}")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    key = options.ssl_keyfile or options.ssl_certfile
    try:
        context.load_cert_chain(options.ssl_certfile, options.ssl_keyfile, _no_password)
    except _EncryptedKeyError:
        raise ConfigError(
            f"ssl_keyfile: the key in {key} is encrypted, and a server cannot ask for a password; "
            "decrypt it: openssl pkey -in KEY -out PLAIN"
        ) from None
    except ssl.SSLError as error:
        raise ConfigError(_problem(options, key, error)) from error
    if options.ssl_ca_certs is not None:
        try:
            context.load_verify_locations(options.ssl_ca_certs)
        except ssl.SSLError as error:
            raise ConfigError(
                f"ssl_ca_certs: {options.ssl_ca_certs} holds no certificate in PEM"
            ) from error


class _EncryptedKeyError(Exception):
    """OpenSSL asked for a password."""


def _no_password() -> str:
    raise _EncryptedKeyError


def _problem(options: ServerConfig, key: str, error: ssl.SSLError) -> str:
    certificate = options.ssl_certfile
    if error.reason == "KEY_VALUES_MISMATCH":
        return f"ssl_keyfile: the key in {key} is not that of the certificate in {certificate}"
    try:
        ssl.create_default_context(cafile=certificate)
    except ssl.SSLError:
        return f"ssl_certfile: {certificate} holds no certificate in PEM"
    if options.ssl_keyfile is None:
        return f"ssl_certfile: {certificate} holds no private key; give it with ssl_keyfile"
    return f"ssl_keyfile: {key} holds no private key in PEM"
