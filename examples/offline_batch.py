"""Offline batch: complete a list of prompts with one call.

Prints each prompt with its completion, then the rate. All prompts are submitted together and
batched continuously: a short answer leaves the batch as soon as it is done, and the next prompt
takes its place. Outputs come back in the order of the prompts.

    python examples/offline_batch.py
"""

import argparse

from octavo import LLM, SamplingParams

PROMPTS = [
    "The capital of Italy is",
    "Water boils at",
    "The three primary colours are",
    "A binary search works by",
]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="smollm2")
    args = parser.parse_args()

    llm = LLM(args.model)
    # Temperature 0 always takes the most likely token, so every run gives the same answers.
    params = SamplingParams(temperature=0.0, max_tokens=24)
    for output in llm.generate(PROMPTS, params):
        print(f"{output.prompt!r} -> {output.outputs[0].text!r}")

    stats = llm.engine.stats
    print(f"{stats.generation_tokens} tokens, {stats.throughput:.0f} tokens/s")


if __name__ == "__main__":
    main()
