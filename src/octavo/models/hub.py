"""Models of the Hugging Face hub: which of a repository's files are a model, and fetching them.

`octavo pull` plans here, with sizes, before anything is fetched; an engine that starts from an id
(`models.files`) only fetches. Files lie in Hugging Face's own cache folder, which other programs
share. Neither code nor pickles are ever fetched.
"""

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from octavo.errors import CheckpointError, ModelNotFoundError, brief
from octavo.models.folder import CONFIG, INDEX, SINGLE, weights_of_index

DESCRIPTIONS = ("*.json", "*.jinja", "*.model", "merges.txt")
HUB_ID = re.compile(r"[\w][\w.-]*/[\w][\w.-]*")
# A part of a model in several files, as `gguf-split` names them.
PART = re.compile(r"(?P<stem>.+)-\d{5}-of-(?P<count>\d{5})(?P<suffix>\.\w+)")
_SHOWN = 12  # files named in an error
_CHUNK = 1 << 20
_TIMEOUT_SECONDS = 20.0  # of an answer without files; the library's default is to wait for ever


@dataclass(frozen=True, slots=True)
class HubPlan:
    """What to fetch of a repository: the bytes of each file, the weights among them."""

    repo: str
    revision: str  # the commit
    sizes: Mapping[str, int]
    weights: tuple[str, ...]
    licence: str | None = None  # as the model's card has it
    digests: Mapping[str, str] = field(default_factory=dict)  # SHA-256, of large files

    @property
    def num_bytes(self) -> int:
        return sum(self.sizes.values())


def split_id(name: str) -> tuple[str, str | None]:
    """`owner/name:file` as (id, file); the file is None where none is named."""
    repo, colon, file = name.partition(":")
    return repo, file if colon else None


def plan(repo: str, revision: str | None, file: str | None) -> HubPlan:
    """Ask the hub what a model is made of. `file`: one of its GGUF files, or a part of its name.

    Raises ModelNotFoundError, which says what to do, for a repository that cannot be read or
    holds no model that can be served.
    """
    from huggingface_hub import HfApi

    try:
        info = HfApi().model_info(
            repo, revision=revision, files_metadata=True, timeout=_TIMEOUT_SECONDS
        )
    except Exception as error:
        raise ModelNotFoundError(explain(repo, error, revision)) from error
    sizes = {item.rfilename: item.size or 0 for item in info.siblings or ()}
    top = {name: size for name, size in sizes.items() if "/" not in name}
    commit = info.sha or revision or "main"
    if file is None and CONFIG in top and any(name.endswith(".safetensors") for name in top):
        weights = _safetensors(repo, commit, top)
        chosen = [name for name in top if _describes(name)]
    else:
        weights, chosen = choose_gguf(repo, list(sizes), file, sizes), []
    licence = getattr(info.card_data, "license_name", None) or getattr(
        info.card_data, "license", None
    )
    files = (*chosen, *weights)
    digests = {s.rfilename: s.lfs.sha256 for s in info.siblings or () if s.lfs is not None}
    return HubPlan(
        repo,
        commit,
        {name: sizes[name] for name in files},
        tuple(weights),
        licence if isinstance(licence, str) else None,
        {name: digests[name] for name in files if name in digests},
    )


def fetch(repo: str, revision: str | None, files: Sequence[str]) -> Path:
    """The folder with these files (patterns are allowed), fetched where they are not here.

    A fetch that was interrupted goes on where it ended. Raises ModelNotFoundError.
    """
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(repo, revision=revision, allow_patterns=list(files)))
    except Exception as error:
        raise ModelNotFoundError(explain(repo, error, revision)) from error


def check_fetched(root: Path, found: HubPlan, names: Iterable[str]) -> None:
    """Raise CheckpointError, and remove the file, where one is not what the hub says it is."""
    for name in names:
        path = root / name
        if (wanted := found.digests.get(name)) is None:
            continue
        with path.open("rb") as file:
            digest = sha256(file)
        if digest != wanted:
            path.resolve().unlink()  # the cache's blob, which `path` is a link to
            path.unlink(missing_ok=True)
            raise CheckpointError(
                f"{name} of {found.repo} came with SHA-256 {digest}, and the hub says {wanted}; it "
                "was removed, pull it again"
            )


def sha256(file: IO[bytes]) -> str:
    digest = hashlib.sha256()
    while chunk := file.read(_CHUNK):
        digest.update(chunk)
    return digest.hexdigest()


def hub_folder() -> Path:
    """Where Hugging Face keeps what it fetches."""
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)


def cached_models() -> list[tuple[str, int, Path]]:
    """(id, bytes, folder) of each model in Hugging Face's cache."""
    from huggingface_hub import scan_cache_dir

    if not hub_folder().is_dir():
        return []
    found = [repo for repo in scan_cache_dir(hub_folder()).repos if repo.repo_type == "model"]
    return sorted((repo.repo_id, repo.size_on_disk, repo.repo_path) for repo in found)


def choose_gguf(
    repo: str, files: Sequence[str], wanted: str | None, sizes: Mapping[str, int] | None = None
) -> list[str]:
    """The files of the one GGUF model that `wanted` names: a file's name, or a part of it such as
    "Q4_K_M". Raises ModelNotFoundError, listing the choices, where it is not one."""
    models: dict[str, list[str]] = {}
    for name in sorted(files):
        if name.endswith(".gguf"):
            part = PART.fullmatch(name)
            models.setdefault(f"{part['stem']}.gguf" if part else name, []).append(name)
    if not models:
        raise ModelNotFoundError(
            f"{repo} on Hugging Face holds no {CONFIG} with safetensors and no .gguf file"
            + (", only other formats of weights" if _others(files) else "")
        )
    found = models
    if wanted is not None:
        exact = {key: parts for key, parts in models.items() if wanted in (key, *parts)}
        folded = wanted.lower()
        found = exact or {k: parts for k, parts in models.items() if folded in k.lower()}
    if len(found) == 1:
        return next(iter(found.values()))
    shown = [_sized(key, parts, sizes) for key, parts in (found or models).items()]
    more = f" and {len(shown) - _SHOWN} more" if len(shown) > _SHOWN else ""
    how = f"no file is called {wanted!r}" if not found else f"{len(found)} files fit"
    raise ModelNotFoundError(
        f"{repo}: {how}; name one, as {repo}:FILE or with --file: {', '.join(shown[:_SHOWN])}{more}"
    )


def explain(repo: str, error: BaseException, revision: str | None = None) -> str:
    """Why a repository cannot be read, and the cure, on one line."""
    from huggingface_hub import errors

    causes = [error]
    while (cause := causes[-1].__cause__ or causes[-1].__context__) is not None:
        causes.append(cause)

    def has(*kinds: type[BaseException]) -> bool:
        return any(isinstance(found, kinds) for found in causes)

    status = next((s for s in map(_status, causes) if s is not None), None)
    page = f"https://huggingface.co/{repo}"
    if has(errors.GatedRepoError):
        return (
            f"model {repo!r} is gated: accept its terms on {page}, make a token of your account, "
            "and set HF_TOKEN to it"
        )
    if has(errors.RevisionNotFoundError):
        return f"model {repo!r} has no revision {revision!r} on Hugging Face"
    if status == 401 and "invalid" in str(error).lower() and "token" in str(error).lower():
        return f"model {repo!r}: Hugging Face does not know the token in HF_TOKEN; make a new one"
    if has(errors.RepositoryNotFoundError) or status in (401, 404):
        return (
            f"model {repo!r}: Hugging Face has no such model, or it is private; check the name, or "
            "set HF_TOKEN to a token that may read it"
        )
    if has(errors.HFValidationError):
        return f"model {repo!r} is no Hugging Face id, which has the form 'owner/name'"
    if status is not None:
        return f"model {repo!r} cannot be fetched: the hub answers {status}{_cure(status)}"
    if has(OSError) and (full := next((c for c in causes if getattr(c, "errno", 0) == 28), None)):
        return f"model {repo!r} cannot be fetched: {full}; HF_HOME names another cache folder"
    if has(json.JSONDecodeError):
        return (
            f"model {repo!r}: the answer is not the hub's: no JSON; a proxy or its login page may "
            "have sent it, or HF_ENDPOINT names no hub"
        )
    if _is_named(causes, "ReadTimeout", "ReadError", "RemoteProtocolError"):
        return (
            f"model {repo!r}: the connection to Hugging Face broke off ({brief(error, 100)}); run "
            "the same again: what has come is kept"
        )
    if has(errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled) or _is_network(causes):
        return (
            f"model {repo!r}: not in the download cache, and Hugging Face cannot be reached (no "
            "network, or HF_HUB_OFFLINE is set); HF_ENDPOINT names a mirror"
        )
    return f"model {repo!r} cannot be fetched: {brief(error, 200)}"


def _status(error: BaseException) -> int | None:
    """The HTTP status of an answer of the hub."""
    status: Any = getattr(getattr(error, "response", None), "status_code", None)
    return status if isinstance(status, int) else None


def _cure(status: int) -> str:
    if status == 403:
        return ": the token in HF_TOKEN may not read it, or a proxy refuses it"
    if status == 429:
        return ", too many requests: wait some minutes, or set HF_TOKEN, which raises the limit"
    return "; try again later" if status >= 500 else ""


def _is_network(causes: Sequence[BaseException]) -> bool:
    return _is_named(causes, "ConnectError", "ConnectionError", "TransportError", "Timeout")


def _is_named(causes: Sequence[BaseException], *names: str) -> bool:
    """By name: which library raises them has changed before."""
    return any(kind.__name__ in names for cause in causes for kind in type(cause).__mro__)


def _safetensors(repo: str, commit: str, top: Mapping[str, int]) -> list[str]:
    if INDEX in top:
        folder = fetch(repo, commit, [INDEX])
        return sorted(set(weights_of_index(folder / INDEX).values()) & top.keys())
    if SINGLE in top:
        return [SINGLE]
    return [name for name in top if name.endswith(".safetensors")]


def _describes(name: str) -> bool:
    return name.endswith((".json", ".jinja", ".model")) or name == "merges.txt"


def _others(files: Sequence[str]) -> bool:
    return any(name.endswith((".bin", ".pt", ".pth", ".ckpt", ".h5", ".onnx")) for name in files)


def _sized(key: str, parts: Sequence[str], sizes: Mapping[str, int] | None) -> str:
    total = sum(sizes.get(part, 0) for part in parts) if sizes else 0
    return f"{key} ({size_text(total)})" if total else key


def size_text(num_bytes: float) -> str:
    """A size for a person."""
    for unit in ("B", "kB", "MB", "GB"):
        if num_bytes < 1000 or unit == "GB":
            return f"{num_bytes:.0f} {unit}" if unit in ("B", "kB") else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1000
    raise AssertionError
