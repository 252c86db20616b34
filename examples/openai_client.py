"""OpenAI's client against a server of your own: chat, streaming, and typed errors.

Start a server first, in another terminal:

    octavo serve smollm2
    python examples/openai_client.py

Prints an answer with its token counts, a streamed answer, two answers of concurrent requests, and
the error for a setting that is out of range. Needs the package `openai`.
"""

import argparse
import asyncio

from openai import AsyncOpenAI, BadRequestError, OpenAI


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--api-key", default="none", help="the server's --api-key, if it has one")
    args = parser.parse_args()

    client = OpenAI(base_url=args.url, api_key=args.api_key)
    answer = client.chat.completions.create(
        model=args.model,
        messages=[{"role": "user", "content": "Name a colour."}],
        max_tokens=24,
        temperature=0.0,
        # Fields that OpenAI's API lacks go into extra_body.
        extra_body={"repetition_penalty": 1.1},
    )
    print("answer:", answer.choices[0].message.content)
    if answer.usage:
        print(f"  [{answer.usage.prompt_tokens} + {answer.usage.completion_tokens} tokens]")

    print("stream: ", end="")
    with client.chat.completions.create(
        model=args.model,
        messages=[{"role": "user", "content": "Count to five."}],
        max_tokens=24,
        stream=True,
    ) as stream:
        for chunk in stream:
            print(chunk.choices[0].delta.content or "", end="", flush=True)
    print()

    asyncio.run(at_once(args.url, args.api_key, args.model))

    try:
        client.completions.create(model=args.model, prompt="Hello", temperature=3.0)
    except BadRequestError as error:
        print("error:", error.body)


async def at_once(url: str, api_key: str, model: str) -> None:
    """Concurrent requests share the steps of the engine."""
    async with AsyncOpenAI(base_url=url, api_key=api_key) as client:
        prompts = ["The capital of Italy is", "The capital of Japan is"]
        answers = await asyncio.gather(
            *(client.completions.create(model=model, prompt=p, max_tokens=8) for p in prompts)
        )
    for prompt, answer in zip(prompts, answers, strict=True):
        print(f"{prompt!r} -> {answer.choices[0].text!r}")


if __name__ == "__main__":
    main()
