"""A scheduling policy of your own: fair shares for several users.

A policy ranks the waiting requests, chooses whom to preempt, and limits the size of a step; it
never touches memory. This one serves the user with the fewest tokens so far, and publishes a
metric. Prints the requests in the order of their first tokens: the user with one request does
not wait for all those of the user with many.

    python examples/custom_scheduler.py

On a server, from this folder: octavo serve smollm2 --scheduler custom_scheduler:FairShare
"""

import argparse
from collections import Counter
from collections.abc import Collection, Iterable

from octavo import LLM, RequestOutput, SamplingParams
from octavo.core.request import Request
from octavo.schedulers import FIFOScheduler, Gauge, Load


class FairShare(FIFOScheduler):
    """The user with the fewest tokens first. A request's `priority` is the number of its user.

    What it does not override, it inherits: the newest request is preempted, and a long prompt
    is computed in chunks.
    """

    name = "fair-share"
    heeds_priority = True  # otherwise a request that sets a priority is rejected

    def __init__(self) -> None:
        super().__init__()
        self.tokens: Counter[int] = Counter()  # generated, by user

    def order(self, waiting: Collection[Request], now: float) -> Iterable[Request]:
        # Sorting keeps the order of arrival among the requests of one user.
        return sorted(waiting, key=lambda request: self.tokens[request.priority])

    def budget(self, load: Load) -> tuple[int, int]:
        for request in load.due:  # each of these gets a token in this step
            self.tokens[request.priority] += 1
        tokens, sequences = super().budget(load)
        return tokens, min(sequences, 2)  # two at once, only to make the order visible

    def gauges(self) -> Iterable[Gauge]:
        """`stats.policy["most_tokens"]`, and `octavo:fair_share_most_tokens` on /metrics."""
        most = max(self.tokens.values(), default=0)
        return [Gauge("most_tokens", "Tokens generated for the busiest user.", most)]


def first_token(output: RequestOutput) -> float:
    return (output.metrics and output.metrics.first_token_time) or 0.0


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="smollm2")
    args = parser.parse_args()

    llm = LLM(args.model, scheduler=FairShare())
    users = [1, 1, 1, 1, 1, 1, 2, 3, 3]
    prompts = [f"User {user} asks: what is {n} + {n}?" for n, user in enumerate(users)]
    params = SamplingParams(temperature=0.0, max_tokens=16)
    outputs = llm.generate(prompts, params, priority=users)

    for output in sorted(outputs, key=first_token):
        print(output.prompt)
    print(f"policy errors: {llm.engine.stats.policy_errors}, metrics: {llm.engine.stats.policy}")


if __name__ == "__main__":
    main()
