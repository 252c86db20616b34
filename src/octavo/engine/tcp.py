"""The two sockets of a link between machines: TCP, encrypted, each end known by its key.

The server binds both, so only it needs ports that others can reach; the engine process connects.
Each end makes a pair of keys for one start (CURVE) and learns the other's public key from the
launcher: a secret key never leaves the machine on which it was made. Whoever connects without
the engine's key is refused, and disturbs nothing.

A connection is never made anew: what the network lost between two connections would be a gap in
an answer. When one ends, the engine process exits. Who starts it, and what its end means, is
`engine.launcher` and `engine.link`; sockets on one machine are files and need none of this.
"""

import hmac
import ipaddress
import socket
import time
from collections.abc import Sequence

import zmq
import zmq.asyncio
from zmq.auth.asyncio import AsyncioAuthenticator
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils.monitor import recv_monitor_message

from octavo.engine.messages import EngineKeys
from octavo.errors import ConfigError, EngineDeadError
from octavo.log import get_logger

logger = get_logger(__name__)

CONNECT_SECONDS = 10.0  # from the engine's first packet until both ends have proved their keys
# A machine that is lost sends nothing, not even the end of its connections. The server notices
# earlier (`engine.link`), and moves the requests; this ends an engine that nobody hears.
# Not by ZeroMQ's own heartbeats: after one, libzmq 4.3.5 loses what a PUSH socket with keys sends.
LOST_SECONDS = 30.0
_KEEPALIVE_SECONDS = 10
_DOMAIN = "octavo"

AnySocket = zmq.Socket[bytes]


class ServerEnds:
    """The binding side: two sockets, and the keys that are let in.

    on_loop: those who connect are answered on the running event loop; else in a thread.
    """

    def __init__(self, on_loop: bool = True) -> None:
        self._on_loop = on_loop
        self._public, self._secret = zmq.curve_keypair()
        self._admitted: set[bytes] = set()
        self._refused = 0
        self._authenticator: AsyncioAuthenticator | ThreadAuthenticator | None = None

    @property
    def public(self) -> str:
        return self._public.decode()

    def bind(self, inbox: AnySocket, outbox: AnySocket, host: str, port: int = 0) -> list[str]:
        """Bind to this machine's address `host`; to `port` and the next one, if it is not 0.

        Returns the addresses of `inbox` and `outbox`. Raises ConfigError.
        """
        if self._on_loop:
            self._authenticator = AsyncioAuthenticator(zmq.asyncio.Context.shadow(inbox.context))
        else:
            self._authenticator = ThreadAuthenticator(inbox.context)
        self._authenticator.start()
        self._authenticator.configure_curve_callback(_DOMAIN, credentials_provider=self)
        found = []
        for i, end in enumerate((inbox, outbox)):
            end.curve_server = True
            end.curve_secretkey = self._secret
            end.zap_domain = _DOMAIN.encode()
            end.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
            _bind(end, host, port + i if port else 0)
            found.append(end.getsockopt_string(zmq.LAST_ENDPOINT))
        return found

    def admit(self, public: str) -> None:
        """Let this key in from now on."""
        self._admitted.add(public.encode())

    def callback(self, domain: str, key: bytes) -> bool:
        """Whether this key is let in; the name is the authenticator's."""
        if any(hmac.compare_digest(key, known) for known in self._admitted):
            return True
        self._refused += 1
        if self._refused == 1:
            logger.warning("a connection to an engine's sockets was refused: its key is unknown")
        return False

    def close(self) -> None:
        """Before the sockets' context is destroyed, which waits for all of its sockets."""
        if self._authenticator is not None:
            self._authenticator.stop()
            self._authenticator = None


class EngineEnds:
    """The engine process's side: connects, and notices the end of a connection."""

    def __init__(self, context: "zmq.Context[AnySocket]", keys: EngineKeys) -> None:
        self._context = context
        self._keys = keys
        self._monitors: list[AnySocket] = []

    @property
    def monitors(self) -> Sequence[AnySocket]:
        """Readable once a connection has ended."""
        return self._monitors

    def inbox(self, address: str) -> AnySocket:
        """A socket for commands. Raises EngineDeadError."""
        return self.connect(zmq.PULL, address)

    def outbox(self, address: str) -> AnySocket:
        """A socket for reports. Raises EngineDeadError."""
        return self.connect(zmq.PUSH, address)

    def connect(self, kind: int, address: str) -> AnySocket:
        """A socket of this kind, whose other end has proved its key. Raises EngineDeadError."""
        made = self._context.socket(kind)
        try:
            self._connect(made, address)
        except BaseException:
            made.close(linger=0)
            raise
        return made

    def _connect(self, made: AnySocket, address: str) -> None:
        made.set_hwm(0)
        made.curve_serverkey = self._keys.server.encode()
        made.curve_publickey = self._keys.public.encode()
        made.curve_secretkey = self._keys.secret.encode()
        made.setsockopt(zmq.RECONNECT_IVL, -1)
        made.setsockopt(zmq.CONNECT_TIMEOUT, int(1000 * CONNECT_SECONDS))
        made.setsockopt(zmq.HANDSHAKE_IVL, int(1000 * CONNECT_SECONDS))
        if address.startswith("tcp://["):
            made.setsockopt(zmq.IPV6, 1)
        made.setsockopt(zmq.TCP_KEEPALIVE, 1)
        made.setsockopt(zmq.TCP_KEEPALIVE_IDLE, _KEEPALIVE_SECONDS)
        made.setsockopt(zmq.TCP_KEEPALIVE_INTVL, _KEEPALIVE_SECONDS)
        made.setsockopt(zmq.TCP_KEEPALIVE_CNT, int(LOST_SECONDS / _KEEPALIVE_SECONDS) - 1)
        made.setsockopt(zmq.TCP_MAXRT, int(1000 * LOST_SECONDS))  # for what was sent
        monitor = made.get_monitor_socket(
            zmq.EVENT_HANDSHAKE_SUCCEEDED
            | zmq.EVENT_HANDSHAKE_FAILED_AUTH
            | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
            | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
            | zmq.EVENT_DISCONNECTED
            | zmq.EVENT_CLOSED
        )
        self._monitors.append(monitor)
        made.connect(address)
        _wait_for_handshake(monitor, address)

    def close(self) -> None:
        """Before the context is ended, which waits for all of its sockets."""
        for monitor in self._monitors:
            monitor.close(linger=0)


def _wait_for_handshake(monitor: AnySocket, address: str) -> None:
    deadline = time.monotonic() + CONNECT_SECONDS
    while (left := deadline - time.monotonic()) > 0 and monitor.poll(int(1000 * left)):
        event = recv_monitor_message(monitor)["event"]
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            return
        if event == zmq.EVENT_CLOSED:
            break
        raise EngineDeadError(
            f"the server at {address} refused this engine process, or is another program: "
            "the keys do not match"
        )
    raise EngineDeadError(
        f"the server at {address} cannot be reached from {socket.gethostname()} within "
        f"{CONNECT_SECONDS:g} s: check the address, the route and the firewall"
    )


def _bind(end: AnySocket, host: str, port: int) -> None:
    """Raises ConfigError that names the address."""
    try:
        if ipaddress.ip_address(host).version == 6:
            end.setsockopt(zmq.IPV6, 1)
            end.bind(f"tcp://[{host}]:{port or '*'}")
        else:
            end.bind(f"tcp://{host}:{port or '*'}")
    except ValueError:
        raise ConfigError(f"data_parallel_address {host!r} is not an IP address") from None
    except zmq.ZMQError as error:
        if error.errno == zmq.EADDRINUSE:
            raise ConfigError(
                f"port {port} of {host} is taken: choose another data_parallel_rpc_port, or 0 for "
                "any free one"
            ) from None
        raise ConfigError(
            f"the engine's sockets cannot listen on {host}, port {port}: {error.strerror}; "
            "data_parallel_address must be an address of this machine"
        ) from None
