"""`response_format` and `structured_outputs` over HTTP: what is enforced, and what is refused."""

import json
import threading
from typing import Literal

import jsonschema
import pytest

USER = {"role": "user", "content": "hi"}
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer", "maximum": 99, "minimum": 0}, "b": {"enum": ["x"]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}


def json_schema(schema, **fields):
    described = {"name": "answer", "schema": schema, **fields}
    return {"type": "json_schema", "json_schema": described}


def chat(server, **fields):
    reply = server.post("/v1/chat/completions", messages=[USER], max_tokens=450, **fields)
    assert reply.status_code == 200, reply.text
    return reply.json()["choices"]


def refused(server, path="/v1/chat/completions", **fields):
    prompt = {"messages": [USER]} if path.endswith("/chat/completions") else {"prompt": "a"}
    reply = server.post(path, **prompt, **fields)
    assert reply.status_code == 400, reply.text
    error = reply.json()["error"]
    return error["param"], error["message"]


def test_a_schema_is_kept_to_whole_and_streamed(server):
    fields = {"response_format": json_schema(SCHEMA, strict=True, description="d"), "n": 2}
    texts = [choice["message"]["content"] for choice in chat(server, **fields)]
    for text in texts:
        jsonschema.validate(json.loads(text), SCHEMA)
    events = server.events("/v1/chat/completions", messages=[USER], max_tokens=450, **fields)
    for index, text in enumerate(texts):
        parts = [c["delta"].get("content", "") for e in events for c in e["choices"]
                 if c["index"] == index]  # fmt: skip
        assert "".join(parts) == text


def test_other_forms(server):
    (choice,) = chat(server, response_format={"type": "json_object"})
    assert isinstance(json.loads(choice["message"]["content"]), dict)
    assert choice["finish_reason"] == "stop"
    (choice,) = chat(server, structured_outputs={"choice": ["yes", "no"]})
    assert choice["message"]["content"] in ("yes", "no")
    free = chat(server, response_format={"type": "text"})
    assert free == chat(server)
    tight = {"structured_outputs": {"disable_any_whitespace": True}}
    (choice,) = chat(server, response_format=json_schema(SCHEMA), **tight)
    assert " " not in choice["message"]["content"]
    tag = {"structures": [{"begin": "c", "schema": {"const": 1}, "end": "!"}], "triggers": ["c"]}
    (choice,) = chat(server, response_format={"type": "structural_tag", **tag})
    assert choice["message"]["content"].startswith("abc1!")
    reply = server.post("/v1/completions", prompt="a", structured_outputs={"regex": "[0-9]{3}"})
    assert reply.json()["choices"][0]["text"].isdigit()


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"response_format": {"type": "xml"}}, "response_format.type", "json_schema"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "'name'"),
        ({"response_format": {"type": "json_object", "schema": {}}}, "response_format.schema", ""),
        ({"response_format": json_schema(5)}, "response_format.json_schema.schema", "object"),
        ({"response_format": json_schema({"typ": 1})}, "response_format", "did you mean 'type'"),
        ({"response_format": json_schema({"not": {}})}, "response_format",
         "response_format.json_schema.schema cannot be enforced"),
        ({"response_format": json_schema({}), "structured_outputs": {"regex": "a"}},
         "response_format", "leave one of them out"),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs.regex", "unclosed group"),
        ({"structured_outputs": {"regex": "a", "json": {}}}, "structured_outputs", "exactly one"),
        ({"structured_outputs": {"regexp": "a"}}, "structured_outputs.regexp", "'regex'"),
        ({"structured_outputs": {}}, "structured_outputs", "exactly one"),
        ({"structured_outputs": {"choice": ["a"] * 10_000}}, "structured_outputs.choice", "4096"),
        ({"guided_json": {}}, "guided_json", "structured_outputs.json"),
        ({"guided_choice": ["a"]}, "guided_choice", "structured_outputs.choice"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(server, fields, param, words):
    for path in ("/v1/chat/completions", "/v1/completions"):
        named, message = refused(server, path, **fields)
        assert named == param
        assert words in message
        assert len(message) < 500


def test_hostile_schemas_slow_nobody_else(server):
    """Streams beside them go on, and each is refused in bounded time."""
    big = {"properties": {f"p{i}": {"type": "string"} for i in range(40_000)}}
    texts: list[str] = []
    other = threading.Thread(target=lambda: texts.append(chat(server)[0]["message"]["content"]))
    other.start()
    for schema in (big, {"$ref": "#"}, {"enum": ["x" * 9] * 40_000}):
        assert refused(server, response_format=json_schema(schema))[0].startswith("response_format")
    nested = '{"items":' * 5_000 + "{}" + "}" * 5_000
    raw = json.dumps({"messages": [USER], "response_format": json_schema("HERE")})
    reply = server.http.post(
        "/v1/chat/completions", content=raw.replace('"HERE"', nested),
        headers={"content-type": "application/json"},
    )  # fmt: skip
    assert reply.status_code == 400
    other.join(20)
    assert texts


def chain(count):
    defs = {str(i): {"properties": {"a": {"$ref": f"#/$defs/{i + 1}"}}} for i in range(count)}
    return {"$defs": {**defs, str(count): {}}, "$ref": "#/$defs/0"}


COSTLY = {
    "json": [
        chain(900),
        {"allOf": [{"type": "string", "pattern": f".*{i:04}.{{20}}"} for i in range(30)]},
        {"patternProperties": {f"^{i}.*{i}$": {} for i in range(500)}},
        {"type": "integer", "multipleOf": 10_000_003},
    ],
    "regex": ["(" * 20_000 + "a" + ")" * 20_000],
    "choice": [[str(i) for i in range(10_000)]],
    "grammar": [
        "start: r0\n" + "\n".join(f"r{i}: r{i + 1} r{i + 1}" for i in range(4000)) + '\nr4000: "a"',
        "start: T0\n" + "\n".join(f"T{i}: T{i + 1} T{i + 1}" for i in range(40)) + '\nT40: "a"',
        'root ::= "a"\n' + "\n" * 100_000 + "b",
    ],
}


def test_forms_that_would_cost_minutes_or_the_process_are_refused_beside_a_stream(server):
    """Any of them would hold up a thread for minutes, or end the server."""
    body = {"messages": [USER], "max_tokens": 450}
    stream = server.http.stream("POST", "/v1/chat/completions", json={**body, "stream": True})
    with stream as reply:
        lines = reply.iter_lines()
        assert next(lines).startswith("data: ")
        for kind, forms in COSTLY.items():
            for form in forms:
                param, message = refused(server, structured_outputs={kind: form})
                assert param == f"structured_outputs.{kind}", message
                assert len(message) < 500
        assert [line for line in lines if line][-1] == "data: [DONE]"
    assert server.http.get("/health").status_code == 200


def test_requests_that_wait_for_their_grammar_may_be_aborted(server):
    """The next ones of the engine are served."""
    for i in range(3):
        form = {"regex": f"[a-z]{{{i + 3}}}"}
        with server.http.stream("POST", "/v1/chat/completions", json={
            "messages": [USER], "stream": True, "structured_outputs": form,
        }):  # fmt: skip
            pass  # closed before its answer
    assert len(chat(server, structured_outputs={"regex": "[a-z]{3}"})[0]["message"]["content"]) == 3


def test_the_official_client_parses(server):
    import openai
    from pydantic import BaseModel

    class Answer(BaseModel):
        number: Literal[1, 2]
        word: Literal["yes", "no"] | None

    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
        done = client.chat.completions.parse(
            model=server.service.names[0], messages=[USER], response_format=Answer, max_tokens=300,
            extra_body={"structured_outputs": {"disable_any_whitespace": True}},
        )  # fmt: skip
    assert isinstance(done.choices[0].message.parsed, Answer)


def test_a_form_whose_limits_are_met_on_the_way_is_an_error_of_the_request(server):
    _, message = refused(server, structured_outputs={"regex": r"\p{L}*" * 200}, max_tokens=8)
    assert "too complex to be enforced" in message
    server.assert_alive()
