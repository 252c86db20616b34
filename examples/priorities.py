"""Priorities: which request runs first, by its `priority` and by a `weight_fn`.

Requests are served by their priority number, the lowest first. Among equals, the highest weight
comes first; this weight prefers short prompts but grows with waiting time, so long prompts are
not starved. One request runs at a time here, only to make the order visible. Prints the requests
in the order in which they finished.

    python examples/priorities.py
"""

import argparse

from octavo import LLM, SamplingParams
from octavo.schedulers import PriorityScheduler, RequestView

LONG = "Summarize the following notes. " + "The meeting began at nine and was short. " * 12
REQUESTS = [  # (prompt, priority)
    (LONG + "Part one.", 0),
    (LONG + "Part two.", 0),
    ("Translate 'good morning' into French.", 0),
    ("Name a prime number.", 0),
    ("This one is urgent: what is 2 + 2?", -1),
]


def weight(request: RequestView) -> float:
    """Shortest prompt first; after ten seconds of waiting a prompt counts as half as long."""
    return (1 + request.waited / 10) / request.prompt_len


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="smollm2")
    args = parser.parse_args()

    llm = LLM(args.model, scheduler=PriorityScheduler(weight_fn=weight), max_num_seqs=1)
    prompts, priorities = zip(*REQUESTS, strict=True)
    outputs = llm.generate(
        list(prompts), SamplingParams(temperature=0.0, max_tokens=16), priority=list(priorities)
    )

    def finished(index: int) -> float:
        metrics = outputs[index].metrics
        return metrics.finished_time or 0.0 if metrics else 0.0

    for index in sorted(range(len(outputs)), key=finished):
        tokens = len(outputs[index].prompt_token_ids)
        print(f"priority {priorities[index]:2}, {tokens:3} prompt tokens: {prompts[index][-40:]!r}")
    print(f"weight_fn failed {llm.engine.stats.policy_errors} times")


if __name__ == "__main__":
    main()
