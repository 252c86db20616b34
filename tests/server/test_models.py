"""The small routes."""

import pytest


def test_models_are_those_that_are_served(make_server):
    server = make_server({"served_model_name": ("one", "two")})
    listed = server.http.get("/v1/models").json()
    assert [m["id"] for m in listed["data"]] == ["one", "two"]
    assert listed["data"][0]["max_model_len"] == 512
    assert server.http.get("/v1/models/two").json()["id"] == "two"
    assert server.complete(server.say("AB"), model="two")["model"] == "two"
    assert server.complete(server.say("AB"))["model"] == "one"


@pytest.mark.parametrize(
    "name", ["../../etc/passwd", "/etc/passwd", "C:\\x", "a\0b", "x" * 10_000, "%2e%2e/", ""]
)
def test_sec_03_other_names_are_not_found(server, name):
    reply = server.post("/v1/completions", prompt="x", model=name)
    error = reply.json()["error"]
    assert (reply.status_code, error["code"], error["param"]) == (404, "model_not_found", "model")
    assert "/tmp" not in error["message"].replace(name[:50], "")
    assert len(reply.content) < 1000


def test_sec_03_no_path_of_this_machine_in_any_answer(server, folder):
    for path in ("/v1/models", "/metrics", "/version", "/docs", "/openapi.json", "/nowhere"):
        assert str(folder.parent) not in server.http.get(path).text
    assert server.http.get("/v1/models").json()["data"][0]["id"] == folder.name


def test_tokenize_and_back(server):
    found = server.post("/tokenize", prompt="a🌶", return_token_strs=True).json()
    assert found["tokens"] == list("a🌶".encode())
    assert found["count"] == 5
    assert found["token_strs"][0] == "a"
    assert found["max_model_len"] == 512
    assert server.post("/detokenize", tokens=found["tokens"]).json() == {"prompt": "a🌶"}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": []}, "prompt"),
        ("/tokenize", {"prompt": "a", "add_generation_prompt": True}, "add_generation_prompt"),
        ("/tokenize", {"messages": [{"role": "user", "content": "x"}], "add_special_tokens": True},
         "add_special_tokens"),
        ("/tokenize", {"promt": "a"}, "promt"),
        ("/detokenize", {"tokens": [10**6]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": [2**70]}, "tokens"),
        ("/detokenize", {}, "tokens"),
    ],
)  # fmt: skip
def test_mistakes_name_their_field(server, path, body, param):
    reply = server.post(path, **body)
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == param
