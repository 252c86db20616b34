"""asyncio: many concurrent answers in one program, streamed as they come.

`AsyncLLM` runs the engine in a process of its own, so the event loop stays free. Prints the
answers of three tasks, each when it is complete, while a fourth is cancelled after ten tokens,
which frees its memory.

    python examples/async_engine.py
"""

import argparse
import asyncio

from octavo import AsyncLLM, SamplingParams
from octavo.params import RequestOutputKind

PROMPTS = ["The capital of Italy is", "Water boils at", "The largest planet is"]


async def answer(engine: AsyncLLM, prompt: str) -> None:
    """Complete one prompt. Each output has the whole text so far."""
    params = SamplingParams(temperature=0.0, max_tokens=24)
    text = ""
    async for output in engine.generate(prompt, params):
        text = output.outputs[0].text
    print(f"{prompt!r} -> {text!r}")


async def cut_short(engine: AsyncLLM, prompt: str, tokens: int) -> None:
    """Stop reading after some tokens: leaving the loop aborts the request."""
    params = SamplingParams(max_tokens=1000, seed=1, output_kind=RequestOutputKind.DELTA)
    count = 0
    async for output in engine.generate(prompt, params):
        count += len(output.outputs[0].token_ids)
        if count >= tokens:
            break
    print(f"{prompt!r} stopped after {count} tokens")


async def run(model: str) -> None:
    async with AsyncLLM(model) as engine:  # ends the engine's process
        await asyncio.gather(
            *(answer(engine, prompt) for prompt in PROMPTS),
            cut_short(engine, "Once upon a time", tokens=10),
        )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="smollm2")
    args = parser.parse_args()
    asyncio.run(run(args.model))


if __name__ == "__main__":
    main()
