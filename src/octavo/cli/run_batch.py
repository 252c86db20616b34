"""`octavo run-batch`: answer a file of requests in OpenAI's batch format, and go on where it ended.

Input is read as a stream and answers are written as they come, each as one whole line, so that
neither file has to fit into memory and nothing that was answered is lost. Run again, it skips what
the output has; a line that was cut when the process was killed is removed and answered again.
"""

import argparse
import asyncio
import contextlib
import fcntl
import hashlib
import json
import os
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NamedTuple

from octavo import progress
from octavo.cli.arguments import Parser, add_engine_flags, engine_options
from octavo.config import OFFLINE_SCHEDULER, EngineConfig
from octavo.errors import ConfigError, RequestError
from octavo.log import can_redraw, configure

if TYPE_CHECKING:
    from octavo.server.batch import BatchEngine

_LINE_SECONDS = 10.0  # between lines of progress where there is no terminal
_MAX_LINE = 1 << 26  # bytes


def add_arguments(parser: Parser) -> None:
    parser.add_argument(
        "-i", "--input-file", required=True, metavar="FILE",
        help="requests, one JSON object a line: custom_id, method, url, body",
    )  # fmt: skip
    parser.add_argument(
        "-o", "--output-file", required=True, metavar="FILE",
        help="answers, one a line, as they come; what it holds already is not asked again",
    )  # fmt: skip
    parser.add_argument("--overwrite", action="store_true", help="start the output anew")
    parser.add_argument(
        "--served-model-name", nargs="+", default=(), metavar="NAME",
        help="names of the model in requests (default: MODEL)",
    )  # fmt: skip
    parser.add_argument("-v", "--verbose", action="store_true", help="show the engine's log")
    add_engine_flags(parser)


def run(args: argparse.Namespace, executor: str | None = None) -> int:
    """executor: `module:name`, for tests. 0 if each line has an answer, 1 if some failed."""
    configure(default="info" if args.verbose else "warning")
    asked = {"model": args.model, **engine_options(args, ("model", "served_model_name"))}
    config = EngineConfig.from_options({"scheduler": OFFLINE_SCHEDULER, **asked})
    source = Path(args.input_file).expanduser()
    with _input(source) as lines, open_output(Path(args.output_file).expanduser()) as out:
        if os.path.samestat(os.fstat(lines.fileno()), os.fstat(out.fileno())):
            raise ConfigError("--output-file is the input file; name another one")
        done = Done() if args.overwrite else Done.read(out)
        # Imported late: a mistake in a file is reported without the web framework.
        from octavo.engine.preflight import check_options
        from octavo.server.batch import batch_engine

        check_options(config)
        if args.overwrite:  # not before all that can be wrong was found right
            out.truncate(0)
        batch = Batch(lines, out, done, survey(source, done))
        if batch.all_done():
            return batch.summary()
        names = tuple(args.served_model_name)
        engine = batch_engine(config, names, *([executor] if executor else []))

        async def main() -> int:
            async with contextlib.AsyncExitStack() as stack:
                # On a terminal the engine's own process shows its phases.
                as_lines = config.load_progress and not can_redraw(sys.stderr)
                with progress.shown(as_lines), progress.phase(f"loading {config.model}"):
                    running = await stack.enter_async_context(engine)
                at_once = 2 * config.max_num_seqs * config.data_parallel_size
                return await batch.run(running, at_once)

        return asyncio.run(main())


class Done:
    """What the output has: digests of ids, and numbers of lines without one."""

    def __init__(self) -> None:
        self.ids: set[bytes] = set()
        self.lines: set[int] = set()
        self.failed = 0

    @classmethod
    def read(cls, out: IO[bytes]) -> "Done":
        """Read the answers so far and cut off a last line that is not whole.

        Raises ConfigError for a file that is something else.
        """
        done, end = cls(), 0
        out.seek(0)
        for number, line in enumerate(out, 1):
            if not line.endswith(b"\n"):
                break
            end += len(line)
            done._add(line, number)
        out.truncate(end)
        out.seek(end)
        return done

    def _add(self, line: bytes, number: int) -> None:
        try:
            value = json.loads(line)
            name, error = value["custom_id"], value["error"]
            where = -1 if name is not None else int(error["line"])
        except (ValueError, KeyError, TypeError):
            raise ConfigError(
                f"line {number} of the output file is no answer of a batch; name another file, "
                "or give --overwrite"
            ) from None
        self.failed += error is not None
        if name is None:
            self.lines.add(where)
        else:
            self.ids.add(digest(name))


class Survey(NamedTuple):
    """total: lines with text; missing: those among them without an answer."""

    total: int
    missing: int


class Selection:
    """Which lines of the input have no answer yet."""

    def __init__(self, done: Done) -> None:
        self._done = done
        self._seen: set[bytes] = set()  # ids so far, to find one that is given twice

    def add(self, number: int, line: bytes) -> "New | None":
        """The next line; None where it has its answer, or no text."""
        from octavo.server.batch import custom_id_of

        if not line.strip():
            return None
        long = len(line) > _MAX_LINE
        name = None if long else custom_id_of(line)
        repeated = name is not None and digest(name) in self._seen
        if name is None or repeated:
            if number in self._done.lines:
                return None
            if repeated:
                return New(number, line, f"custom_id {str(name)[:100]!r} is given twice")
            return New(number, line, f"longer than {_MAX_LINE >> 20} MiB" if long else None)
        self._seen.add(digest(name))
        return None if digest(name) in self._done.ids else New(number, line, None)


class New(NamedTuple):
    """A line without an answer. error: why it cannot be sent, where that is known already."""

    number: int
    line: bytes
    error: str | None


class Batch:
    """One run over a file.

    lines: the input; out: the output, only appended to; found: of the input.
    """

    def __init__(self, lines: IO[bytes], out: IO[bytes], done: Done, found: Survey) -> None:
        self._lines, self._out, self._done = lines, out, done
        self._total, self._missing = found
        self._before, self._failed_before = found.total - found.missing, done.failed
        self._answered = self._failed = self._tokens = 0

    def all_done(self) -> bool:
        return not self._missing

    async def run(self, engine: "BatchEngine", most: int) -> int:
        """Answer what is not answered, `most` requests at a time. Returns the exit code."""
        tasks: set[asyncio.Task[None]] = set()
        with self._progress() as show:
            try:
                async for number, line in self._new_lines():
                    tasks.add(asyncio.create_task(self._answer(engine, number, line)))
                    while len(tasks) >= most:
                        tasks = await self._some(tasks, show)
                while tasks:
                    tasks = await self._some(tasks, show)
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
        return self.summary()

    def summary(self) -> int:
        """Say what was done; the exit code."""
        failed = self._failed + self._failed_before
        parts = [f"{self._answered} answered now", f"{self._before} answered before"]
        if failed:
            parts.append(f'{failed} failed in all (see "error" in the output)')
        print(f"octavo run-batch: {', '.join(parts)}", file=sys.stderr)
        return 1 if failed else 0

    async def _some(self, tasks: "set[asyncio.Task[None]]", show: Any) -> "set[asyncio.Task[None]]":
        """Wait until one has ended, show how far it is; the tasks that go on."""
        ended, left = await asyncio.wait(tasks, timeout=1.0, return_when=asyncio.FIRST_COMPLETED)
        for task in ended:
            task.result()
        show()
        return left

    async def _new_lines(self) -> AsyncIterator[tuple[int, bytes]]:
        from octavo.server.batch import error_line

        selection, number = Selection(self._done), 0
        while line := await asyncio.to_thread(read_line, self._lines):
            number += 1
            if (new := selection.add(number, line)) is None:
                continue
            if new.error is not None:
                self._write(error_line(None, number, new.error))
            else:
                yield number, line

    async def _answer(self, engine: "BatchEngine", number: int, line: bytes) -> None:
        from octavo.server.batch import custom_id_of, error_line, parse_line

        try:
            request = parse_line(line)
        except RequestError as error:
            self._write(error_line(custom_id_of(line), number, str(error)))
        else:
            self._write(await engine.answer(request))

    def _write(self, reply: dict[str, Any]) -> None:
        """One line at once, so that only the last one can be cut. Raises ConfigError."""
        append(self._out, json.dumps(reply, allow_nan=False).encode() + b"\n")
        self._answered += 1
        self._failed += reply["error"] is not None
        usage = ((reply["response"] or {}).get("body") or {}).get("usage") or {}
        self._tokens += usage.get("completion_tokens", 0)

    @contextlib.contextmanager
    def _progress(self) -> Iterator[Any]:
        """A function that shows how far the batch is: a bar, or a line every 10 s."""
        began = shown = time.monotonic()
        if not can_redraw(sys.stderr):

            def say() -> None:
                nonlocal shown
                now = time.monotonic()
                if now - shown >= _LINE_SECONDS:
                    shown = now
                    print(self._line(now - began), file=sys.stderr, flush=True)

            yield say
            return
        from tqdm import tqdm

        with tqdm(total=self._total, initial=self._before, unit="req", dynamic_ncols=True) as bar:

            def draw() -> None:
                bar.n = self._before + self._answered
                rate = self._tokens / max(time.monotonic() - began, 1e-9)
                failed = f", {self._failed} failed" if self._failed else ""
                bar.set_postfix_str(f"{rate:.0f} tok/s{failed}", refresh=True)

            yield draw

    def _line(self, seconds: float) -> str:
        count = self._before + self._answered
        rate = self._answered / seconds
        left = (self._total - count) / rate if rate else 0
        return (
            f"{count} of {self._total} answered, {self._failed} failed; {rate:.1f} requests/s, "
            f"{self._tokens / seconds:.0f} tokens/s, about {left:.0f} s left"
        )


def digest(name: str) -> bytes:
    """Of a custom_id: a million of them take some 80 MB, whatever their length."""
    return hashlib.blake2b(name.encode("utf-8", "surrogatepass"), digest_size=12).digest()


def survey(path: Path, done: Done) -> Survey:
    """How much there is to do; the input may have changed since the output was begun."""
    selection, total, missing, number = Selection(done), 0, 0, 0
    with path.open("rb") as file:
        while line := read_line(file):
            number += 1
            total += bool(line.strip())
            missing += selection.add(number, line) is not None
    return Survey(total, missing)


def read_line(file: IO[bytes]) -> bytes:
    """The next line; of one that is longer than any request, the first bytes."""
    line = file.readline(_MAX_LINE + 1)
    rest = line
    while len(rest) > _MAX_LINE and not rest.endswith(b"\n"):
        rest = file.readline(_MAX_LINE + 1)
    return line


def append(out: IO[bytes], line: bytes) -> None:
    """Raises ConfigError where the file takes no more; what it has stays whole."""
    written = 0
    try:
        while written < len(line):
            written += os.write(out.fileno(), line[written:])
    except OSError as error:
        with contextlib.suppress(OSError):
            out.truncate(os.fstat(out.fileno()).st_size - written)
        raise ConfigError(
            f"--output-file {out.name} cannot be written: {error.strerror}; its answers are kept, "
            "and the same command goes on where it ended"
        ) from None


@contextlib.contextmanager
def _input(path: Path) -> Iterator[IO[bytes]]:
    with _opened("--input-file", path, "rb", "read") as file:
        yield file


@contextlib.contextmanager
def open_output(path: Path) -> Iterator[IO[bytes]]:
    """The output, which this process alone may write to while it is open."""
    with _opened("--output-file", path, "a+b", "written") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"--output-file {path}: another run-batch writes to it") from None
        yield file


def _opened(flag: str, path: Path, mode: str, verb: str) -> IO[bytes]:
    """Raises ConfigError. A pipe or a device cannot be read twice, which resuming needs."""
    try:
        if path.exists() and not path.is_file():
            raise ConfigError(f"{flag} {path} is no regular file; name one that can be read again")
        return path.open(mode)
    except OSError as error:
        raise ConfigError(f"{flag} {path} cannot be {verb}: {error.strerror}") from None
