"""The server's socket."""

import socket

import pytest

from octavo.errors import ConfigError
from octavo.server.listener import address_of, bind
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
