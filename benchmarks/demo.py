"""The demonstration: 48 chat prompts at once, then the same work with static batching.

    python -m benchmarks.demo [--model smollm2] [--batch 16]

First Octavo answers all prompts (greedy, until the model ends its answers) and some pairs are
shown. Then both engines run the same measured work: the same prompt tokens, and exactly the same
number of output tokens each, end-of-text ignored. The last line is JSON.
"""

import argparse
import json
import statistics
import sys
import textwrap
from pathlib import Path
from typing import Any

from tqdm import tqdm

from benchmarks.engines import model_file, start
from benchmarks.processes import PeerError
from benchmarks.prompts import ChatPrompt, chat_prompts
from benchmarks.rows import percentile, row, save, table
from benchmarks.workloads import Job
from octavo.errors import OctavoError

_SHOWN = (0, 1, 3, 12, 24)


def main() -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n", 1)[0])
    parser.add_argument("--model", default="smollm2", help="embedded name or .gguf file")
    parser.add_argument("--count", type=int, default=48, help="how many of the 48 prompts")
    parser.add_argument("--batch", type=int, default=16, help="rows of a static batch")
    parser.add_argument("--log", type=Path, help="append what the engines say to this file")
    parser.add_argument("--save", action="store_true", help="save a row in benchmarks/results/")
    args = parser.parse_args()
    try:
        return _demo(args)
    except (OctavoError, PeerError) as error:
        print(f"demo: {error}", file=sys.stderr)
        return 1


def _demo(args: argparse.Namespace) -> int:
    prompts, model = chat_prompts()[: args.count], model_file(args.model)
    _title(f"Octavo answers {len(prompts)} chat prompts at once")
    jobs = _answer(prompts, model)
    _title("The same work, measured: same prompts, same number of tokens, end-of-text ignored")
    results = {
        "Octavo": _measure("octavo", model, jobs, args.log),
        f"static batches of {args.batch}": _measure(
            "static-16", model, jobs, args.log, batch=args.batch
        ),
    }
    print("\n" + table(("", *results), _lines(results)) + "\n")
    ours, theirs = results.values()
    saved = 1 - ours["latency_mean_s"] / theirs["latency_mean_s"]
    print(f"Octavo is {ours['tokens_per_s'] / theirs['tokens_per_s']:.1f} times as fast, and the "
          f"mean latency is {abs(saved):.0%} {'lower' if saved >= 0 else 'higher'}."
          )  # fmt: skip
    values = row("demo", octavo=ours, static=theirs, batch=args.batch)
    if args.save:
        save(values)
    print(json.dumps(values))
    return 0


def _answer(prompts: list[ChatPrompt], model: Path) -> list[Job]:
    """Answer all prompts as a user would and show some; the jobs of the measured run."""
    from octavo import LLM, SamplingParams

    llm = LLM(str(model), dtype="bfloat16", max_model_len=4096)
    conversations = [[{"role": "user", "content": prompt.text}] for prompt in prompts]
    params = [SamplingParams(temperature=0.0, max_tokens=prompt.max_tokens) for prompt in prompts]
    outputs = llm.chat(conversations, params)
    for i in (i for i in _SHOWN if i < len(prompts)):
        print(f"\nQ: {_short(prompts[i].text)}\nA: {_short(outputs[i].outputs[0].text, 400)}")
    llm.close()
    return [
        Job(list(output.prompt_token_ids), prompt.max_tokens)
        for output, prompt in zip(outputs, prompts, strict=True)
    ]


def _measure(
    name: str, model: Path, jobs: list[Job], log: Path | None, **options: Any
) -> dict[str, Any]:
    """Run the jobs on one engine in a process of its own."""
    with tqdm(total=len(jobs), desc=f"{name} starts", unit="prompt", dynamic_ncols=True) as bar:
        engine = start(name, model, log, **options)
        try:
            bar.unpause()
            bar.set_description(name)
            result = engine.run(jobs, lambda done: bar.update(done - bar.n))
        finally:
            engine.close()
        bar.update(len(jobs) - bar.n)
    latency = result["latency_s"]
    return {
        "seconds": round(result["wall_s"], 2),
        "tokens_per_s": round(result["output_tokens"] / result["wall_s"], 1),
        "latency_mean_s": round(statistics.fmean(latency), 2),
        "latency_p99_s": round(percentile(latency, 0.99), 2),
        "in_flight": round(result["in_flight"], 1),
        "kv_use": round(result["kv"]["use"], 3),
        "kv_most_held_slots": result["kv"]["most_held_slots"],
        "peak_rss_mb": result["peak_rss_mb"],
        "start_s": round(engine.startup_s, 1),
        "engine": engine.facts,
    }


def _lines(results: dict[str, dict[str, Any]]) -> list[list[str]]:
    shown = [
        ("output tokens per second", "tokens_per_s", "{:.1f}"),
        ("seconds in all", "seconds", "{:.1f}"),
        ("mean latency, s", "latency_mean_s", "{:.1f}"),
        ("P99 latency, s", "latency_p99_s", "{:.1f}"),
        ("requests in flight (mean)", "in_flight", "{:.1f}"),
        ("KV slots in use / reserved", "kv_use", "{:.1%}"),
        ("peak memory, MB", "peak_rss_mb", "{:,}"),
        ("start to first token, s", "start_s", "{:.1f}"),
    ]
    return [
        [name, *(form.format(values[key]) for values in results.values())]
        for name, key, form in shown
    ]


def _short(text: str, most: int = 200) -> str:
    """One paragraph of at most `most` characters, indented under its first line."""
    return textwrap.indent(
        textwrap.fill(textwrap.shorten(" ".join(text.split()), most, placeholder=" ..."), 90), "   "
    ).lstrip()


def _title(text: str) -> None:
    print(f"\n== {text}\n", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
