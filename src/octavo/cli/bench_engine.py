"""What `octavo bench latency` and `throughput` share: the engine, or several, and files of
figures."""

import argparse
import asyncio
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from octavo.cli.arguments import Parser, engine_options
from octavo.errors import ConfigError
from octavo.log import configure
from octavo.params import RequestOutputKind

if TYPE_CHECKING:
    from octavo.async_llm import AsyncLLM
    from octavo.llm import LLM
    from octavo.outputs import RequestOutput
    from octavo.params import SamplingParams
    from octavo.text.interface import ModelTokenizer


def add_output_flags(parser: Parser) -> None:
    parser.add_argument("--disable-detokenize", action="store_true", help="leave out the text")
    parser.add_argument("--output-json", type=Path, metavar="FILE", help="save the figures as JSON")


class Engines:
    """What of an `LLM` is measured, over the engines of an `AsyncLLM`."""

    def __init__(self, engine: "AsyncLLM") -> None:
        self._engine = engine

    def get_tokenizer(self) -> "ModelTokenizer":
        return asyncio.run(self._engine.get_tokenizer())

    def generate(
        self, prompts: Any, sampling_params: Any = None, *, use_tqdm: bool = True
    ) -> "list[RequestOutput]":
        """Whole answers, in order. `sampling_params`: one, or one for each prompt."""
        params = sampling_params
        each = params if isinstance(params, Sequence) else [params] * len(prompts)
        return asyncio.run(self._generate(list(zip(prompts, each, strict=True))))

    async def _generate(self, asked: "list[tuple[Any, SamplingParams]]") -> "list[RequestOutput]":
        config = self._engine.config
        room = asyncio.Semaphore(
            config.data_parallel_size * (config.max_num_seqs + config.waiting_limit)
        )

        async def answer(prompt: Any, params: "SamplingParams") -> "RequestOutput":
            final = params.with_(output_kind=RequestOutputKind.FINAL_ONLY)
            async with room:
                (output,) = [one async for one in self._engine.generate(prompt, final)]
            return output

        return await asyncio.gather(*(answer(*one) for one in asked))


def load(args: argparse.Namespace, **usual: Any) -> "LLM | Engines":
    """The engine of the flags; `usual` where they say nothing."""
    configure(default="warning")
    check_output(args.output_json)
    options = {"load_progress": sys.stderr.isatty(), **usual, **engine_options(args, ("model",))}
    if options.get("data_parallel_size", 1) > 1:
        from octavo.async_llm import AsyncLLM

        return Engines(AsyncLLM(model=args.model, **options))
    from octavo.llm import LLM

    return LLM(model=args.model, **options)


def check_output(path: Path | None) -> None:
    """Raise ConfigError unless figures can be saved, before any is measured."""
    if path is not None and (path.is_dir() or not path.parent.is_dir()):
        raise ConfigError(f"--output-json {path}: must be a file in a folder that exists")


def save(path: Path | None, figures: dict[str, Any]) -> None:
    if path is not None:
        path.write_text(json.dumps(figures, indent=4) + "\n")
