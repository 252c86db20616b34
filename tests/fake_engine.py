"""An executor without weights that does what its prompts say, for tests over HTTP.

Ids are those of `kit.write_tokenizer`: bytes, then BOS, EOS, EOT, then pieces. In a prompt,
`[[65, 66]]` scripts the answer's ids (the last such list counts; then end-of-text), and words
give orders: `!raise` fails the step, `!kill` the process, `!stop` freezes it, `!fail` fails
this row alone, `!empty` does by the request's own fault, `!slow` takes 20 ms a token. Without a
script the answer is the alphabet, round
and round.

`python tests/fake_engine.py ...` is `octavo serve ...` over this executor.
"""

import functools
import json
import os
import re
import signal
import sys
import time
from pathlib import Path

from octavo.config import EngineConfig
from octavo.core.plan import PlanRow, RowResult, RunnerLimits, SampleSpec
from octavo.engine.fake import FakeRunner, hashed

BOS, EOS, EOT = 256, 257, 258
EXECUTOR = "fake_engine:create"


@functools.lru_cache(maxsize=256)
def read_script(prompt: tuple[int, ...]) -> tuple[str, list[int] | None]:
    text = bytes(t if t < 256 else 32 for t in prompt).decode("utf-8", "replace")
    lists = re.findall(r"\[(\[[\d, ]*\])\]", text)
    return text, json.loads(lists[-1]) if lists else None


class ScriptedRunner(FakeRunner):
    def _row(self, row: PlanRow, step: int) -> RowResult:
        if row.samples and "!fail" in self._text(row, step):
            return RowResult(row.request_id, error="this request was told to fail")
        if row.samples and "!empty" in self._text(row, step):
            error = "no token is left to draw"
            return RowResult(row.request_id, error=error, error_param="bad_words")
        return super()._row(row, step)

    def _text(self, row: PlanRow, step: int) -> str:
        history = self._history(row, step)
        return read_script(tuple(history[: len(history) - row.samples[0].position]))[0]


def say(history: list[int], spec: SampleSpec) -> int:
    text, script = read_script(tuple(history[: len(history) - spec.position]))
    if "!kill" in text:
        os.kill(os.getpid(), signal.SIGKILL)
    if "!stop" in text:
        os.kill(os.getpid(), signal.SIGSTOP)
    if "!raise" in text:
        raise MemoryError("told to")
    if "!slow" in text:
        time.sleep(0.02)
    if script is None:
        return 97 + spec.position % 26
    return script[spec.position] if spec.position < len(script) else EOS


def draw(history: list[int], spec: SampleSpec) -> int:
    """A letter or a digit that depends on all tokens, the seed, the choice and the position."""
    if spec.position >= 2 and "!kill" in read_script(tuple(history[: -spec.position]))[0]:
        os.kill(os.getpid(), signal.SIGKILL)
    return 33 + hashed(history, spec, 90)


def create_hashed(config: EngineConfig) -> ScriptedRunner:
    """As `create`, with answers that tell whether a token is right; steps take a while."""
    runner = create(config)
    runner.next_token = draw
    seconds = json.loads((Path(config.model) / "fake.json").read_text()).get("step_seconds", 0)
    runner.before_step = lambda plan: time.sleep(seconds)
    return runner


def create(config: EngineConfig) -> ScriptedRunner:
    folder = Path(config.model)
    if (folder / "broken").exists():
        from octavo.errors import CheckpointError

        raise CheckpointError("this checkpoint was told to be broken")
    settings = json.loads((folder / "fake.json").read_text())
    window = config.max_model_len or 512
    limits = RunnerLimits(
        num_blocks=config.num_gpu_blocks_override or 1025,
        block_size=config.block_size,
        block_bytes=1024,
        max_model_len=window,
        vocab_size=settings["vocab_size"],
        eos_token_ids=(EOS,),
        model=folder.name,
        architecture="Scripted",
        dtype="none",
        kv_cache_dtype="none",
        device="none",
        generation_defaults=settings.get("generation", {}),
    )
    time.sleep(settings.get("load_seconds", 0))
    return ScriptedRunner(limits, say)


def main(arguments: list[str]) -> int:
    from octavo.cli import serve
    from octavo.cli.arguments import Parser
    from octavo.errors import OctavoError

    parser = Parser(prog="octavo serve")
    serve.add_arguments(parser)
    try:
        return serve.run(parser.parse(arguments), EXECUTOR)
    except OctavoError as error:
        print(f"octavo: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
