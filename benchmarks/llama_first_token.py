"""Start llama.cpp's server and stop at its first token: prints the seconds from its start.

python -m benchmarks.llama_first_token MODEL

In an environment that holds it (`benchmarks.environments`).
"""

import sys
import time

from benchmarks.peers.llama_server import LlamaServer
from benchmarks.workloads import Job


def main(model: str) -> None:
    begin = time.time()
    server = LlamaServer({"model": model, "slots": 1, "context": 4096, "cmake": ""})
    try:
        server.run([Job([1, 2, 3, 4], 1)], lambda _: None)
        print(round(time.time() - begin, 3))
    finally:
        server.close()


if __name__ == "__main__":
    main(sys.argv[1])
