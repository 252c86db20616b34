"""Chat: a conversation of several turns, through the model's own chat template.

Prints each question with its answer. The whole history is sent with every turn; the prefix cache
recognizes the part that was computed before, and the last column shows how much that was.

    python examples/chat.py
"""

import argparse

from octavo import LLM

QUESTIONS = ["Why is the sky blue?", "And why is it red at sunset?", "Say that in one sentence."]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="smollm2")
    args = parser.parse_args()

    llm = LLM(args.model)
    # The model's recommended settings, where its checkpoint has any, with a few changes.
    params = llm.get_default_sampling_params().with_(temperature=0.0, max_tokens=80)
    messages = [{"role": "system", "content": "You are a helpful physics teacher."}]
    for question in QUESTIONS:
        messages.append({"role": "user", "content": question})
        (output,) = llm.chat(messages, params, use_tqdm=False)
        answer = output.outputs[0].text
        messages.append({"role": "assistant", "content": answer})
        tokens, cached = len(output.prompt_token_ids), output.num_cached_tokens
        print(f"> {question}\n{answer}\n  [{tokens} prompt tokens, {cached} cached]")


if __name__ == "__main__":
    main()
