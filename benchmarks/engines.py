"""The engines that can be measured, by name, and how to start each."""

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.processes import EngineProcess


@dataclass(frozen=True)
class EngineSpec:
    """module: its file in benchmarks/peers. options: for it, beside `model`.

    requirements: steps of `pip install` arguments for an environment of its own; none: it runs
    in ours. needs_folder: it reads no GGUF, but a folder in Hugging Face layout.
    """

    module: str
    options: dict[str, Any] = field(default_factory=dict)
    requirements: tuple[tuple[str, ...], ...] = ()
    needs_folder: bool = False
    environment: dict[str, str] = field(default_factory=dict)


ENGINES: dict[str, EngineSpec] = {
    "octavo": EngineSpec("octavo_llm", {"dtype": "bfloat16", "load_progress": False}),
    "octavo-fp32": EngineSpec("octavo_llm", {"dtype": "float32", "load_progress": False}),
    "static-8": EngineSpec("transformers_static", {"batch": 8}),
    "static-16": EngineSpec("transformers_static", {"batch": 16}),
    "static-32": EngineSpec("transformers_static", {"batch": 32}),
}


def start(name: str, model: Path, log: Path | None = None, **options: Any) -> EngineProcess:
    """Start an engine on a .gguf file, in its own environment. Raises PeerError."""
    spec = ENGINES[name]
    return EngineProcess(
        name,
        f"benchmarks.peers.{spec.module}",
        {"model": str(model), **spec.options, **options},
        python=sys.executable,
        environment=spec.environment,
        log=log,
    )


def model_file(model: str) -> Path:
    """The .gguf file of a model's name or path."""
    from octavo.models.files import embedded_path

    path = Path(model)
    return path if path.suffix == ".gguf" else embedded_path(model)
