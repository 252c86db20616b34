"""A separate environment for each third-party engine, created on demand with pip.

They are in Octavo's cache folder, with the model in the format that the engine reads. An engine
that cannot be installed is reported (PeerError) and skipped.
"""

import hashlib
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from benchmarks.processes import PeerError
from benchmarks.system import usable_cores
from octavo.log import cache_dir

# Run inside an environment: what an installed package requires, but for some names.
_REQUIREMENTS = """
import importlib.metadata, sys
from pip._vendor.packaging.requirements import Requirement
for text in importlib.metadata.requires(sys.argv[1]) or ():
    found = Requirement(text)
    wanted = found.marker is None or found.marker.evaluate({"extra": ""})
    if wanted and found.name.lower() not in sys.argv[2:]:
        print(text.split(";")[0].strip())
"""


def python_of(
    name: str, requirements: tuple[str, ...], without: tuple[str, ...] = (), cmake: str = ""
) -> Path:
    """The interpreter of the environment `name`, made new when its requirements changed.

    requirements: installed one after the other. without: names that the last one requires but
    that are not installed for it. cmake: flags for those that are compiled here.
    """
    folder = cache_dir() / "peers" / name
    python = folder / "bin" / "python"
    stamp = folder / ".requirements"
    recipe = (requirements, without, cmake) if cmake else (requirements, without)
    wanted = hashlib.sha256(repr(recipe).encode()).hexdigest()
    if stamp.is_file() and stamp.read_text() == wanted:
        return python
    _say(f"making an environment for {name} (once)")
    run(name, [sys.executable, "-m", "venv", "--clear", str(folder)])
    pip = [str(python), "-m", "pip", "--disable-pip-version-check", "-qq", "install"]
    if cmake:  # pip keeps what it compiled, and does not ask with which flags
        pip.append("--no-cache-dir")
    for requirement in requirements if not without else requirements[:-1]:
        run(name, [*pip, requirement], _compiling(cmake) if cmake else None)
    if without:
        package = re.split(r"[=<>~!\[]", requirements[-1])[0]
        run(name, [*pip, "--no-deps", requirements[-1]])
        rest = run(name, [str(python), "-c", _REQUIREMENTS, package, *without])
        run(name, [*pip, *rest.splitlines()])
    stamp.write_text(wanted)
    return python


def _compiling(cmake: str) -> dict[str, str]:
    """Variables for a package that is compiled by cmake while it is installed."""
    jobs = os.environ.get("CMAKE_BUILD_PARALLEL_LEVEL", str(usable_cores()))
    return {"CMAKE_ARGS": cmake, "LLAMA_CPP_BUILD_JOBS": jobs}


def models_dir() -> Path:
    """Where models are that were made or converted for measurements: all can be made again."""
    return cache_dir() / "peers" / "models"


def folder_of(model: Path) -> Path:
    """The model of a .gguf file as a folder in Hugging Face layout, in bf16 (made once).

    A model that is a folder is given back.
    """
    if model.is_dir():
        return model
    return _folder_of(model)


def _folder_of(gguf: Path) -> Path:
    import torch
    import transformers

    from benchmarks.peers.transformers_static import load

    folder = models_dir() / gguf.stem
    if (folder / "tokenizer_config.json").is_file():
        return folder
    _say(f"writing {gguf.name} as a folder in Hugging Face layout (once)")
    model = load(str(gguf), torch.bfloat16, "sdpa")
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    tokenizer.save_pretrained(folder)
    return folder


def run(name: str, command: list[str], more: Mapping[str, str] | None = None) -> str:
    """Run a step of an engine's preparation; what it printed. Raises PeerError, its last words.

    more: environment variables in addition to this process's.
    """
    environment = {**os.environ, **(more or {})}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        said = (done.stderr or done.stdout).strip().splitlines() or ["it said nothing"]
        raise PeerError(f"{name} cannot be prepared: {said[-1]}")
    return done.stdout


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
