"""A server with a key, whose dashboard is tested; it can be started again on its port."""

import contextlib
from pathlib import Path

from serving import Server

KEY = "open-sesame"
# What the console says of any answer that is no success; the page says it in a sentence.
REFUSED = "the server responded with a status of 401"
DOWN = "net::ERR_"


class Site:
    """The server, which a test may start again on the same port."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._stack = contextlib.ExitStack()
        self.start(0)

    def start(self, port: int) -> None:
        options = {"port": port, "api_key": (KEY,)}
        server = Server(self._folder, options, max_num_seqs=8, num_gpu_blocks_override=257)
        self.server = self._stack.enter_context(server)
        self.server.http.headers["Authorization"] = f"Bearer {KEY}"

    def stop(self) -> int:
        port = self.server.port
        self._stack.close()
        return port
