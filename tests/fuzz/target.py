"""Open a model as the engine does, up to where it would be computed with, and judge the outcome.

An outcome is "loads" or "error" (one of Octavo's own, on one line, that names the file). All else
is a finding: another exception, too long, or too much memory.
"""

import os
import resource
import time
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from octavo.config import EngineConfig
from octavo.errors import OctavoError, RequestError
from octavo.layers.rope import cos_sin_table, query_cos_sin_table
from octavo.models import loader, registry
from octavo.models.weights import Weights
from octavo.text.chat import encode_chat
from octavo.text.loading import num_ids
from octavo.text.tokenizer import load_tokenizer

SECONDS = 2.0  # of processor time
# Beside twice the file: parsed tokens are larger than their bytes, and libraries are imported.
MEMORY = 24 << 20
ADDRESS_SPACE = 1 << 30  # beyond what the process has mapped when a run begins
LONGEST_MESSAGE = 2000
MESSAGES = [{"role": "user", "content": "hello <|eot|> </s>"}]


@dataclass(frozen=True)
class Outcome:
    """kind: "loads", "error" or "finding"; text: the message, or what is wrong."""

    kind: str
    text: str = ""


def open_tokenizer(path: Path) -> None:
    """Read a tokenizer and use it: a text, a text that ends, a conversation, the ids' texts."""
    num_ids(path)
    tokenizer = load_tokenizer(path)
    ids = tokenizer.encode("hello  <s> \N{SNOWMAN}")
    tokenizer.decode(ids)
    for token in range(min(tokenizer.vocab_size, 300)):
        tokenizer.token_bytes(token)
    if tokenizer.chat_templates:
        encode_chat(tokenizer, MESSAGES)


def open_model(path: Path) -> None:
    """Find, open, describe, check and read a model, then its tokenizer."""
    checkpoint, spec, window = loader.describe(EngineConfig(model=str(path)))
    architecture = registry.decoder_class(spec.family)
    weights = Weights(spec, architecture, checkpoint, "cpu", torch.float32)
    assert spec.longest >= spec.max_position
    for layer in set(spec.layers):
        if layer.query_temperature is not None:
            query_cos_sin_table(
                layer.rope, layer.query_temperature, layer.attention.head_dim, min(window, 99)
            )
        if layer.rope is not None:
            cos_sin_table(layer.rope, layer.attention.head_dim, min(window, 99))
    architecture.describe_attention(spec)
    architecture.components(spec)
    products = architecture.product_weights(spec)
    for name in architecture.parameter_shapes(spec):
        if name in products:
            weights.matrix("int4", name)
        else:
            weights.take(name)
    open_tokenizer(checkpoint.root)


@contextmanager
def memory_bound() -> Iterator[None]:
    """No more address space than ADDRESS_SPACE on top of what is mapped now."""
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGESIZE")
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (mapped + ADDRESS_SPACE, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def judge(path: Path, size: int, tokenizer_only: bool = False) -> Outcome:
    """What opening `path` comes to; size: bytes of its files."""
    outcome = Outcome("loads")
    tracemalloc.start()
    begin = time.process_time()
    try:
        (open_tokenizer if tokenizer_only else open_model)(path)
    except OctavoError as error:
        # A request's error is of a model that loads, and cannot serve a conversation.
        outcome = _said(str(error), None if isinstance(error, RequestError) else path)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # noqa: BLE001 - what else comes is what is looked for
        outcome = Outcome("finding", f"{type(error).__name__}: {str(error)[:300]} {_where(error)}")
    finally:
        took = time.process_time() - begin
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    if took > SECONDS:
        return Outcome("finding", f"took {took:.1f} s")
    if peak > 2 * size + MEMORY:
        return Outcome("finding", f"took {peak >> 20} MiB for files of {size >> 10} KiB")
    return outcome


def _said(message: str, path: Path | None) -> Outcome:
    if "\n" in message:
        return Outcome("finding", f"more than one line: {message!r}")
    if len(message) > LONGEST_MESSAGE:
        return Outcome("finding", f"{len(message)} characters: {message[:300]}")
    if path is not None and str(path) not in message:
        return Outcome("finding", f"names no file: {message}")
    return Outcome("error", message)


def _where(error: BaseException) -> str:
    at = error.__traceback__
    frames = []
    while at is not None:
        frames.append(f"{Path(at.tb_frame.f_code.co_filename).name}:{at.tb_lineno}")
        at = at.tb_next
    return "at " + " < ".join(reversed(frames[-4:]))
