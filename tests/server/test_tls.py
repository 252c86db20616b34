"""TLS: its files are checked before anything is loaded, and it is served."""

import shutil
import ssl
import subprocess

import httpx
import pytest

from octavo.errors import ConfigError
from octavo.server.options import ServerConfig
from octavo.server.tls import check_tls

pytestmark = pytest.mark.skipif(not shutil.which("openssl"), reason="makes keys with openssl")


def check(**options):
    check_tls(ServerConfig(**{name: str(value) for name, value in options.items()}))


def test_files_that_fit(certificate):
    check(ssl_certfile=certificate / "both.pem")
    check(ssl_certfile=certificate / "cert.pem", ssl_keyfile=certificate / "key.pem")
    check_tls(ServerConfig())


def test_files_that_do_not(certificate, tmp_path):
    cert, key = certificate / "cert.pem", certificate / "key.pem"
    (tmp_path / "text").write_text("hello")
    secret = tmp_path / "secret.pem"
    subprocess.run(["openssl", "pkey", "-in", key, "-aes256", "-passout", "pass:x", "-out", secret],
                   check=True)  # fmt: skip
    for words, options in {
        "ssl_certfile: .*nowhere does not exist": {"ssl_certfile": tmp_path / "nowhere"},
        f"ssl_certfile: {tmp_path} is not a file": {"ssl_certfile": tmp_path},
        "ssl_keyfile: .*nowhere does not exist": {
            "ssl_certfile": cert, "ssl_keyfile": tmp_path / "nowhere",
        },
        "is not that of the certificate": {
            "ssl_certfile": cert, "ssl_keyfile": certificate / "other.pem",
        },
        "holds no private key; give it with": {"ssl_certfile": cert},
        "text holds no private key in PEM": {
            "ssl_certfile": cert, "ssl_keyfile": tmp_path / "text",
        },
        "text holds no certificate in PEM": {"ssl_certfile": tmp_path / "text"},
        "is encrypted": {"ssl_certfile": cert, "ssl_keyfile": secret},
    }.items():  # fmt: skip
        with pytest.raises(ConfigError, match=words):
            check(**options)
    with pytest.raises(ConfigError, match=r"ssl_ca_certs: .*text holds no certificate"):
        check_tls(
            ServerConfig(
                ssl_certfile=str(cert), ssl_keyfile=str(key), ssl_cert_reqs=2,
                ssl_ca_certs=str(tmp_path / "text"),
            )
        )  # fmt: skip


def test_it_is_served(make_server, certificate):
    both = str(certificate / "both.pem")
    server = make_server({"ssl_certfile": both})
    assert server.url.startswith("https://")
    trusted = ssl.create_default_context(cafile=str(certificate / "cert.pem"))
    url = server.url.replace("127.0.0.1", "localhost")
    with httpx.Client(base_url=url, verify=trusted) as client:
        assert client.get("/health").status_code == 200
        # What is refused below the application gets its answer here, too.
        reply = client.get("/health", headers={"X": "y" * (1 << 17)})
        assert reply.status_code == 431
    server.stream(server.say("AB"))


def test_clients_without_a_certificate_are_refused(make_server, certificate):
    both, cert = str(certificate / "both.pem"), str(certificate / "cert.pem")
    tls = ssl.create_default_context(cafile=cert)
    tls.check_hostname = False  # the server is asked by its address
    without = ssl.create_default_context(cafile=cert)
    without.check_hostname = False
    tls.load_cert_chain(both)
    options = {"ssl_certfile": both, "ssl_ca_certs": cert, "ssl_cert_reqs": 2}
    server = make_server(options, tls=tls)
    assert server.http.get("/health").status_code == 200
    with pytest.raises(httpx.TransportError), httpx.Client(verify=without) as client:
        client.get(server.url + "/health")
    server.assert_alive()
