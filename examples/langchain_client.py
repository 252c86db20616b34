"""LangChain over a server of your own: a chain, a stream, and a batch.

Start a server first, in another terminal:

    octavo serve smollm2
    python examples/langchain_client.py

Prints one translation, one streamed sentence, and two answers of a batch. Needs the package
`langchain-openai`.
"""

import argparse

from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_openai import ChatOpenAI


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--api-key", default="none", help="the server's --api-key, if it has one")
    args = parser.parse_args()

    chat = ChatOpenAI(base_url=args.url, api_key=args.api_key, model=args.model, max_tokens=32)
    prompt = ChatPromptTemplate.from_messages(
        [("system", "Translate into {language}."), ("user", "{text}")]
    )
    chain = prompt | chat | StrOutputParser()

    print("chain:", chain.invoke({"language": "French", "text": "Good morning!"}))

    print("stream: ", end="")
    for piece in chain.stream({"language": "Spanish", "text": "Good night!"}):
        print(piece, end="", flush=True)
    print()

    for answer in chat.batch(["Name a colour.", "Name a fruit."]):
        print("batch:", answer.content)


if __name__ == "__main__":
    main()
