"""Streams, cut anywhere, give exact times; an answer that is not whole is a failure of its kind."""

import json

import pytest

from octavo.bench.answer import Answer, EventReader, Outcome, error_message


def event(**body: object) -> bytes:
    return b"data: " + json.dumps(body).encode() + b"\n\n"


def text(piece: str, finish: str | None = None) -> bytes:
    return event(choices=[{"text": piece, "finish_reason": finish}])


def delta(finish: str | None = None, **fields: str) -> bytes:
    return event(choices=[{"delta": fields, "finish_reason": finish}])


USAGE = event(choices=[], usage={"prompt_tokens": 7, "completion_tokens": 3})
DONE = b"data: [DONE]\n\n"


def read(*pieces: tuple[float, bytes], asked: int = 3, ignore_eos: bool = True) -> Outcome:
    outcome = Outcome(5, asked)
    answer = Answer(outcome, 10.0)
    for now, piece in pieces:
        answer.feed(piece, now)
    answer.end(ignore_eos, 99.0)
    return outcome


def test_times_are_those_of_the_pieces_with_text() -> None:
    got = read(
        (10.5, delta(role="assistant", content="")),  # no token yet
        (11.0, delta(content="a")),
        (11.25, delta(content="b")),
        (12.0, delta(content="c", finish="length") + USAGE + DONE),
    )
    assert got.ok
    assert (got.ttft, got.itl, got.latency) == (1.0, [0.25, 0.75], 2.0)
    assert (got.prompt_len, got.output_len, got.text) == (7, 3, "abc")
    assert got.tpot == 0.5


def test_a_stream_may_be_cut_anywhere_and_have_comments() -> None:
    whole = b": wait\r\n\r\nid: 1\ndata: one\r\n\r\ndata:two\ndata: three\n\n"
    for cut in range(len(whole) + 1):
        reader = EventReader()
        assert reader.feed(whole[:cut]) + reader.feed(whole[cut:]) == [b"one", b"two\nthree"]


def test_thoughts_are_tokens_too() -> None:
    got = read(
        (11, delta(reasoning_content="x")), (13, delta(content="y", finish="stop") + USAGE + DONE)
    )
    assert (got.ttft, got.itl, got.text) == (1, [2], "xy")


@pytest.mark.parametrize(
    ("stream", "kind"),
    [
        (text("a", "length") + USAGE, "no [DONE]"),
        (text("a") + USAGE + DONE, "no finish reason"),
        (event(error={"message": "out of luck"}) + DONE, "error event"),
        (text("a") + event(error="out of luck") + text("b", "stop") + DONE, "error event"),
        (b"data: {\n\n" + DONE, "not JSON"),
        (b"data: 3\n\n" + DONE, "not JSON"),
        (text("a", "length") + DONE + text("b"), "data after [DONE]"),
        (b"", "no [DONE]"),
    ],
)
def test_an_answer_that_is_not_whole_has_failed(stream: bytes, kind: str) -> None:
    got = read((11, stream))
    assert got.failure == kind
    assert got.error


def test_fewer_tokens_than_asked_fail_only_where_end_of_text_is_ignored() -> None:
    stream = text("a", "stop") + USAGE + DONE
    assert read((11, stream), asked=4).failure == "too few tokens"
    assert read((11, stream), asked=4, ignore_eos=False).ok


def test_without_usage_the_pieces_are_counted() -> None:
    got = read((11, text("a")), (12, text("b", "length") + DONE), asked=8)
    assert (got.ok, got.output_len, got.prompt_len) == (True, 2, 5)


def test_tokens_without_text_end_with_the_stream() -> None:
    got = read((11, text("", "stop") + USAGE + DONE))
    assert (got.ok, got.ttft, got.latency, got.itl) == (True, 89.0, 89.0, [])


@pytest.mark.parametrize(
    "body", [{"error": {"message": "no"}}, {"error": "no"}, {"message": "no"}, "no"]
)
def test_errors_of_every_shape_are_read(body: object) -> None:
    assert error_message(body) == "no"
