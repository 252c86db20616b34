"""The workloads, as token ids, so that every engine does the same work. Standard library only.

W1  64 mixed requests at once: 32-480 tokens in, 16-240 out (15,302 in, 8,075 out in all)
W2  one stream: 32 in, 128 out
W3  32 requests that share their first 512 tokens: 32 more each, 64 out
W4  8 long prompts: 3,500 in, 128 out
W5  one prompt: 2,000 in, 1 out
W6  16 mixed requests at once, the first of W1's (3,564 in, 2,116 out in all)
W7  one token: 32 in, 1 out; what W2 takes beyond it is decoding

W1 and W6 are the same in every repetition; the others draw fresh tokens, so that a prefix cache
only gains from sharing inside one repetition.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass

# Plain words of SmolLM2's vocabulary: above its control tokens, below its end.
_LOW, _HIGH = 300, 49_000


@dataclass(frozen=True)
class Job:
    """One request: prompt token ids, and exactly how many tokens to generate."""

    prompt: list[int]
    max_tokens: int


def mixed(repetition: int = 0) -> list[Job]:
    draw = random.Random(0)
    return [Job(_tokens(draw, draw.randint(32, 480)), draw.randint(16, 240)) for _ in range(64)]


def stream(repetition: int = 0) -> list[Job]:
    return [Job(_tokens(random.Random(100 + repetition), 32), 128)]


def shared_prefix(repetition: int = 0) -> list[Job]:
    draw = random.Random(200 + repetition)
    prefix = _tokens(draw, 512)
    return [Job(prefix + _tokens(draw, 32), 64) for _ in range(32)]


def long_prompts(repetition: int = 0) -> list[Job]:
    draw = random.Random(300 + repetition)
    return [Job(_tokens(draw, 3500), 128) for _ in range(8)]


def prompt(repetition: int = 0) -> list[Job]:
    return [Job(_tokens(random.Random(400 + repetition), 2000), 1)]


def few_mixed(repetition: int = 0) -> list[Job]:
    return mixed(repetition)[:16]


def first_token(repetition: int = 0) -> list[Job]:
    return [Job(_tokens(random.Random(500 + repetition), 32), 1)]


WORKLOADS: dict[str, Callable[[int], list[Job]]] = {
    "W1": mixed,
    "W2": stream,
    "W3": shared_prefix,
    "W4": long_prompts,
    "W5": prompt,
    "W6": few_mixed,
    "W7": first_token,
}


def _tokens(draw: random.Random, count: int) -> list[int]:
    return [draw.randrange(_LOW, _HIGH) for _ in range(count)]
