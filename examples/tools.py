"""An agent's loop: the model calls Python functions until it can answer.

    python examples/tools.py [--model NAME] [--ask QUESTION] [--turns N]

The functions' arguments are held to their JSON Schemas, so that they can be passed on as they are.
Small models talk about calls rather than make them: the first turn must be calls, in the model's
own format; each later one is calls or a sentence. With one turn, which suits the smallest, the
answer is asked for without tools. Prints each call with its result, and the answer.
"""

import argparse
import json
from collections.abc import Callable
from typing import Any

from octavo import LLM, SamplingParams, StructuredOutputsParams

STOCK = {"apple": 12, "pear": 0, "plum": 7}


def in_stock(item: str) -> str:
    """How many of an item are in stock."""
    return f"{STOCK.get(item.lower().removesuffix('s'), 0)} in stock"


def price(item: str, count: int) -> str:
    """What a number of items costs."""
    return f"{count * 30 / 100:.2f} euros"


FUNCTIONS: dict[str, Callable[..., str]] = {"in_stock": in_stock, "price": price}
ITEM = {"type": "string", "enum": list(STOCK)}
SCHEMAS: dict[str, dict[str, Any]] = {
    "in_stock": {"item": ITEM},
    "price": {"item": ITEM, "count": {"type": "integer", "minimum": 1, "maximum": 99}},
}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": function.__doc__,
            "parameters": {
                "type": "object",
                "properties": SCHEMAS[name],
                "required": list(SCHEMAS[name]),
                "additionalProperties": False,
            },
        },
    }
    for name, function in FUNCTIONS.items()
]


SENTENCE = StructuredOutputsParams(regex=r"[A-Z][^{}<>\n]{4,200}\.")


def answer(llm: LLM, question: str, turns: int) -> str:
    """The model's answer, after as many turns with calls as it takes, at most `turns`."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": question}]
    params = SamplingParams(temperature=0, max_tokens=400, structured_outputs=SENTENCE)
    for turn in range(turns):
        choice = "auto" if turn else "required"
        (output,) = llm.chat(
            messages,
            params,
            tools=TOOLS,
            tool_choice=choice,
            parallel_tool_calls=False,
            use_tqdm=False,
        )
        message = output.outputs[0].message
        assert message is not None
        if not message.tool_calls:
            return str(message.content)
        messages.append(message.as_message())
        for call in message.tool_calls:
            result = FUNCTIONS[call.name](**json.loads(call.arguments))
            print(f"{call.name}({call.arguments}) -> {result}")
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    (output,) = llm.chat(messages, params, use_tqdm=False)
    return output.outputs[0].text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="qwen2.5-coder-0.5b")
    parser.add_argument("--ask", default="How many apples do you have in stock?")
    parser.add_argument("--turns", type=int, default=1)
    args = parser.parse_args()
    with LLM(args.model, max_model_len=2048) as llm:
        print(answer(llm, args.ask, args.turns))


if __name__ == "__main__":
    main()
