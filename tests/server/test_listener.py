"""The server's socket."""

import socket
import stat

import pytest

from octavo.errors import ConfigError
from octavo.server.listener import address_of, bind, bind_unix
from octavo.server.options import ServerConfig


@pytest.mark.parametrize(("host", "port"), [("no.such.host.invalid", 8000), ("203.0.113.1", 8000)])
def test_srv_10_addresses_that_are_not_ours(host, port):
    with pytest.raises(ConfigError, match=f"cannot listen on {host} port {port}"):
        bind(host, port, 60)


def test_srv_10_ports_that_are_none():
    for port in (70000, -1):
        with pytest.raises(ConfigError, match="port must be"):
            ServerConfig(port=port)
    with bind("127.0.0.1", 0, 60) as listener:
        assert listener.getsockname()[1] > 0


def test_srv_10_a_taken_port_is_refused_and_a_left_one_is_free():
    with bind("127.0.0.1", 0, 60) as first:
        port = first.getsockname()[1]
        with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1 port {port}"):
            bind("127.0.0.1", port, 60)
        assert address_of(first) == f"http://127.0.0.1:{port}"
        with socket.create_connection(("127.0.0.1", port)):
            first.setblocking(True)
            first.accept()[0].close()  # leaves a connection in TIME_WAIT
    bind("127.0.0.1", port, 60).close()


def test_what_is_sent_is_not_held_back_for_company(server):
    server.http.get("/health")
    connections = server.runner._server.server_state.connections
    ends = [connection.transport.get_extra_info("socket") for connection in connections]
    assert ends
    assert all(end.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) for end in ends)


def test_a_unix_socket_has_its_mode_and_goes_with_the_server(tmp_path):
    path = tmp_path / "socket"
    with bind_unix(str(path)) as listener:
        assert stat.S_IMODE(path.stat().st_mode) == 0o660
        assert address_of(listener) == f"unix:{path}"
        with pytest.raises(ConfigError, match="another process listens on"):
            bind_unix(str(path))
    assert not path.exists()


def test_a_stale_socket_is_replaced_and_other_files_are_not(tmp_path):
    path = tmp_path / "socket"
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))
    first = bind_unix(str(path))
    path.unlink()
    with bind_unix(str(path)):
        first.close()  # its file is another one's now
        assert path.exists()
    path.write_text("mine")
    with pytest.raises(ConfigError, match="is not a socket"):
        bind_unix(str(path))
    assert path.read_text() == "mine"
    with pytest.raises(ConfigError, match=r"uds: cannot listen on .*No such file"):
        bind_unix(str(tmp_path / "none" / "socket"))
    with pytest.raises(ConfigError, match="longer than the 107 bytes"):
        bind_unix("x" * 108)
