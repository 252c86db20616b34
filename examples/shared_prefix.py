"""Retrieval with a shared prefix: several questions about one document.

The passages that were retrieved come first in the prompt and the question last, so prompts with
the same passages begin with the same tokens. The prefix cache computes those once. Prints for
each question how many of its prompt tokens were found in the cache, then the hit rate.

    python examples/shared_prefix.py
"""

import argparse

from octavo import LLM, SamplingParams

PASSAGES = [  # repeated to stand for longer ones
    3 * "The blue whale is the largest animal known to have lived. It can reach a length of 30 "
    "metres. Blue whales eat almost only krill, up to four tonnes a day. ",
    3 * "Coffee plants are grown in over 70 countries. The most common species are arabica and "
    "robusta. Coffee beans are dried and then roasted; roasting takes 10 to 20 minutes. ",
]
QUESTIONS = [
    "How long are blue whales?",
    "Which coffee species are common?",
    "What do blue whales eat?",
    "How long does the roasting of coffee beans take?",
    "How much krill does a blue whale eat in a day?",
]


def retrieve(question: str) -> str:
    """The passage that shares most words with the question; a real system searches an index."""
    words = set(question.lower().strip("?").split())
    return max(PASSAGES, key=lambda passage: len(words & set(passage.lower().split())))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="smollm2")
    args = parser.parse_args()

    llm = LLM(args.model)
    params = SamplingParams(temperature=0.0, max_tokens=24)
    for question in QUESTIONS:
        context = f"Answer from this text only.\n\n{retrieve(question)}"
        messages = [
            {"role": "system", "content": context},
            {"role": "user", "content": question},
        ]
        (output,) = llm.chat(messages, params, use_tqdm=False)
        cached, total = output.num_cached_tokens, len(output.prompt_token_ids)
        print(f"{question}\n  {output.outputs[0].text.strip()!r}  [{cached} of {total} cached]")

    print(f"hit rate: {llm.engine.stats.cache_hit_rate:.0%}")


if __name__ == "__main__":
    main()
