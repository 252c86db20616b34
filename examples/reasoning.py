"""Reasoning: a model thinks within a budget, then gives an answer of a given form.

The model here was not trained to think: a chat template lets it begin with `<think>`, as the
templates of models that were do by themselves. Prints both parts of the answer.

    python examples/reasoning.py
"""

import argparse

from octavo import LLM, SamplingParams, StructuredOutputsParams

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{{ m.content.split('</think>')[-1] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="smollm2")
    args = parser.parse_args()

    llm = LLM(args.model, chat_template=TEMPLATE)
    params = SamplingParams(
        temperature=0,
        max_tokens=100,
        thinking_token_budget=40,
        structured_outputs=StructuredOutputsParams(choice=["yes", "no"]),
    )
    question = {"role": "user", "content": "Is Rome the capital of Italy?"}
    (output,) = llm.chat([question], params, use_tqdm=False)
    message = output.outputs[0].message
    assert message is not None, "an answer that has ended has one"
    print(f"reasoning: {message.reasoning}")
    print(f"answer: {message.content}")


if __name__ == "__main__":
    main()
