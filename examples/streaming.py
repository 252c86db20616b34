"""Streaming: print an answer while it is generated, and stop it early.

`LLM.stream` yields the new text of each step. Leaving the loop aborts the request, which frees
its part of the KV cache at once. Prints one answer token by token, then the first 20 tokens of
another, with the time to the first token.

    python examples/streaming.py
"""

import argparse
import time
from itertools import islice

from octavo import LLM, SamplingParams


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="smollm2")
    args = parser.parse_args()

    llm = LLM(args.model)
    params = SamplingParams(temperature=0.7, top_p=0.9, max_tokens=120, seed=1)
    messages = [{"role": "user", "content": "Tell me a short story about a lighthouse."}]

    asked, first = time.perf_counter(), None
    for output in llm.stream(messages, params):
        first = first or time.perf_counter()
        print(output.outputs[0].text, end="", flush=True)
    print(f"\n[first token after {(first or asked) - asked:.3f} s]\n")

    answer = llm.stream("Counting upwards: one, two, three,", params)
    for output in islice(answer, 20):
        print(output.outputs[0].text, end="", flush=True)
    answer.close()  # aborts the request
    print(f"\n[stopped; {llm.engine.stats.running} requests are running]")


if __name__ == "__main__":
    main()
