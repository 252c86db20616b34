"""One answer with a library's defaults: python defaults.py langchain_openai|litellm URL KEY MODEL.

Run in an environment that has the library; nothing of Octavo is imported.
"""

import sys

QUESTION = "Name three primary colours."


def langchain_openai(url: str, key: str, model: str) -> None:
    from langchain_openai import ChatOpenAI

    chat = ChatOpenAI(base_url=url, api_key=key, model=model)
    answer = chat.invoke(QUESTION)
    print("invoke:", repr(answer.content[:70]), answer.usage_metadata)
    chunks = list(chat.stream(QUESTION))
    text = "".join(chunk.content for chunk in chunks)
    assert text
    print("stream:", len(chunks), "chunks", repr(text[:50]))
    batch = chat.batch([QUESTION, "Count to five."])
    assert all(answer.content for answer in batch)
    print("batch:", len(batch), "answers")


def litellm(url: str, key: str, model: str) -> None:
    import litellm

    asked = {
        "model": f"openai/{model}",
        "api_base": url,
        "api_key": key,
        "messages": [{"role": "user", "content": QUESTION}],
    }
    answer = litellm.completion(**asked)
    print("completion:", repr(answer.choices[0].message.content[:70]), dict(answer.usage))
    parts = [
        chunk.choices[0].delta.content or "" for chunk in litellm.completion(**asked, stream=True)
    ]
    assert "".join(parts)
    print("stream:", len(parts), "chunks")
    try:
        litellm.completion(**{**asked, "model": "openai/other"})
    except litellm.NotFoundError as error:
        print("typed error:", type(error).__name__, str(error)[:60])
    else:
        raise AssertionError("an unknown model was answered")


if __name__ == "__main__":
    {"langchain_openai": langchain_openai, "litellm": litellm}[sys.argv[1]](*sys.argv[2:])
