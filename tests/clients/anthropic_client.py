"""Anthropic's own client: python anthropic_client.py URL KEY MODEL [scripted].

Whole and streamed messages, a loop of tools, counts, typed errors. `scripted`: the server is over
the tests' scripted engine, which says what a prompt asks for; else a real model answers, and what
it says is not looked at. Run in an environment that has the library; nothing of Octavo is imported.
"""

import sys

import anthropic

TOOL = {
    "name": "weather",
    "description": "The weather in a city.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 20}},
        "required": ["city"],
        "additionalProperties": False,
    },
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
THOUGHT = "<think>hm</think>"


class Checks:
    def __init__(self, url: str, key: str, model: str, scripted: bool) -> None:
        self.client = anthropic.Anthropic(base_url=url, api_key=key, max_retries=0)
        self.url, self.key, self.model, self.scripted = url, key, model, scripted

    def text(self, question: str, answer: str) -> str:
        """What makes the scripted engine give this answer; to a model, the question."""
        if not self.scripted:
            return question
        body = {"prompt": answer, "add_special_tokens": False}
        return f"say [{self.client.post('/tokenize', body=body, cast_to=object)['tokens']}]"

    def asked(self, question: str, answer: str = "Red.", **more: object) -> dict:
        messages = [{"role": "user", "content": self.text(question, answer)}]
        return {"model": self.model, "max_tokens": 100, "messages": messages, **more}

    def run(self) -> None:
        for check in (self.whole, self.stream, self.tools, self.thinking, self.form, self.count,
                      self.errors, self.keys):  # fmt: skip
            print(f"{check.__name__}: {check()}", flush=True)

    def whole(self) -> str:
        message = self.client.messages.create(**self.asked("Name a colour."))
        assert message.type == "message"
        assert message.role == "assistant"
        assert message.stop_reason in ("end_turn", "max_tokens")
        assert message.usage.output_tokens > 0
        assert message._request_id
        return f"{message.content[0].text[:40]!r} {message.usage.to_dict()}"

    def stream(self) -> str:
        asked = self.asked("Name a colour.", extra_body={"temperature": 0})
        with self.client.messages.stream(**asked) as stream:
            events = [event.type for event in stream]
            message = stream.get_final_message()
        assert events[0] == "message_start"
        assert events[-1] == "message_stop"
        whole = self.client.messages.create(**asked)
        assert [b.to_dict() for b in message.content] == [b.to_dict() for b in whole.content]
        assert message.usage.output_tokens == whole.usage.output_tokens
        raw = self.client.messages.create(**asked, stream=True)
        assert [event.type for event in raw][-1] == "message_stop"
        return f"{len(events)} events, the same content as the whole"

    def tools(self) -> str:
        asked = self.asked("What is the weather in Rome?", CALL, tools=[TOOL], max_tokens=200)
        one = {"type": "auto" if self.scripted else "any", "disable_parallel_tool_use": True}
        with self.client.messages.stream(**asked, tool_choice=one) as stream:
            message = stream.get_final_message()
        calls = [block for block in message.content if block.type == "tool_use"]
        assert message.stop_reason == "tool_use", message
        assert all(set(call.input) == {"city"} for call in calls)
        results = [
            {"type": "tool_result", "tool_use_id": call.id, "content": "18 degrees"}
            for call in calls
        ]
        then = self.text("So is it warm?", "Mild.")
        turns = [
            *asked["messages"],
            {"role": "assistant", "content": message.content},
            {"role": "user", "content": [*results, {"type": "text", "text": then}]},
        ]
        last = self.client.messages.create(**{**asked, "messages": turns})
        assert last.usage.cache_read_input_tokens > 0
        return f"{[(c.name, c.input) for c in calls]} then {last.stop_reason}"

    def thinking(self) -> str:
        asked = self.asked("Think.", THOUGHT + "so", max_tokens=1200)
        with self.client.messages.stream(**asked, thinking={"type": "adaptive"}) as stream:
            message = stream.get_final_message()
        kinds = [block.type for block in message.content]
        if self.scripted:
            assert kinds == ["thinking", "text"]
            assert message.content[0].thinking == "hm"
            assert message.content[0].signature
        return f"{kinds}"

    def form(self) -> str:
        schema = TOOL["input_schema"]
        config = {"format": {"type": "json_schema", "schema": schema}}
        asked = self.asked("Which city?", '{"city": "Rome"}')
        message = self.client.messages.create(**asked, output_config=config)
        return repr(message.content[0].text[:40])

    def count(self) -> str:
        asked = self.asked("What is the weather?", tools=[TOOL])
        message = self.client.messages.create(**asked)
        del asked["max_tokens"]
        found = self.client.messages.count_tokens(**asked).input_tokens
        used = message.usage
        assert found == used.input_tokens + used.cache_read_input_tokens
        return f"{found} tokens"

    def errors(self) -> str:
        wrong = [
            (anthropic.NotFoundError, {**self.asked("x"), "model": "other"}),
            (anthropic.BadRequestError, self.asked("x", max_tokens=20_000)),
            (anthropic.BadRequestError, {**self.asked("x"), "system": "word " * 10**5}),
            (anthropic.BadRequestError, self.asked("x", extra_body={"max_toknes": 1})),
        ]
        for kind, asked in wrong:
            error = self.refused(self.client, asked)
            assert type(error) is kind, error
            assert error.type in ("not_found_error", "invalid_request_error")
            assert error.request_id
        return ", ".join(kind.__name__ for kind, _ in wrong)

    def keys(self) -> str:
        bearer = anthropic.Anthropic(base_url=self.url, auth_token=self.key, max_retries=0)
        assert bearer.messages.create(**self.asked("x")).content
        error = self.refused(self.client.with_options(api_key="wrong"), self.asked("x"))
        assert type(error) is anthropic.AuthenticationError, error
        return f"x-api-key, Bearer, {type(error).__name__}"

    def refused(self, client: anthropic.Anthropic, asked: dict) -> anthropic.APIStatusError:
        try:
            client.messages.create(**asked)
        except anthropic.APIStatusError as error:
            return error
        raise AssertionError("an invalid request was answered")


if __name__ == "__main__":
    url, key, model, *rest = sys.argv[1:]
    Checks(url, key, model, rest == ["scripted"]).run()
