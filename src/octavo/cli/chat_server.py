"""A running server behind `octavo chat --url URL`: OpenAI's chat interface, a connection a call.

Tokens are counted by `/tokenize`, which Octavo and vLLM have; for other servers the conversation
finds the room by trying.
"""

import contextlib
import http.client
import json
from collections.abc import Generator, Iterator, Mapping, Sequence
from typing import Any

from octavo.bench.answer import EventReader
from octavo.cli.chat_backend import Message, Piece, Prompt
from octavo.cli.server_connection import ServerConnection
from octavo.errors import (
    ConfigError,
    ContextLengthError,
    OctavoError,
    RequestError,
    brief,
    shown,
)
from octavo.params import SamplingParams

_FORM = "structured_outputs"  # which OpenAI's interface has as `response_format`
_Fields = Mapping[str, Any]


class ServerBackend:
    """A server's model. model: its name there; None takes the first. Raises ConfigError."""

    knows_defaults = False

    def __init__(self, url: str, model: str | None, key: str | None) -> None:
        self._server = ServerConnection(url, key, "octavo-chat")
        self._url = self._server.url
        self._counts = True  # until /tokenize says otherwise
        try:
            card = _choose(self._models(), model, self._url)
        except RequestError as error:
            raise ConfigError(str(error)) from None
        self.name = str(card["id"])
        window = card.get("max_model_len")
        self.window = window if isinstance(window, int) else None

    def default_params(self, given: _Fields) -> tuple[SamplingParams, str]:
        params = SamplingParams(**{"max_tokens": None, **given})
        return params, f"the server's defaults for {'the rest' if given else 'all settings'}"

    def load(self) -> None:
        """It is loaded."""

    def check(self, prompt: Prompt, params: SamplingParams) -> None:
        """The server checks each request."""

    def prepare(self, messages: Sequence[Message]) -> Prompt:
        count: int | None = None
        if self._counts:
            try:
                reply = self._read("POST", "/tokenize", {"model": self.name, "messages": messages})
                count = reply["count"]
            except (_NotFoundError, KeyError, TypeError):
                self._counts = False
        return Prompt(count, messages)

    def stream(
        self, prompt: Prompt, params: SamplingParams, given: frozenset[str]
    ) -> Generator[Piece, None, None]:
        body = {
            "model": self.name,
            "messages": prompt.content,
            "stream": True,
            "stream_options": {"include_usage": True},
            **{name: _json_value(getattr(params, name)) for name in given - {_FORM}},
        }
        if params.structured_outputs is not None:
            schema = json.loads(str(params.structured_outputs.json))
            described = {"name": "answer", "schema": schema}
            body["response_format"] = {"type": "json_schema", "json_schema": described}
        body = {name: value for name, value in body.items() if value is not None}
        counted, finished = 0, False
        with self._request("POST", "/v1/chat/completions", body) as response:
            for chunk in _chunks(response):
                piece = _piece(chunk, counted)
                counted += piece.num_tokens
                finished = finished or piece.finish_reason is not None
                yield piece
        if not finished:
            raise RequestError("the server ended the answer without a finish reason")

    def _models(self) -> list[dict[str, Any]]:
        reply = self._read("GET", "/v1/models")
        try:
            return [dict(card) for card in reply["data"]]
        except (KeyError, TypeError, ValueError):
            raise RequestError(f"{self._url}/v1/models lists no models: {shown(reply)}") from None

    def _read(self, method: str, path: str, body: _Fields | None = None) -> Any:
        with self._request(method, path, body) as response:
            try:
                return json.loads(response.read())
            except ValueError:
                raise RequestError(f"{self._url}{path} does not answer in JSON") from None

    @contextlib.contextmanager
    def _request(
        self, method: str, path: str, body: _Fields | None
    ) -> Iterator[http.client.HTTPResponse]:
        """One call that succeeds. Leaving the block closes the connection, which aborts an
        answer."""
        with self._server.request(method, path, body) as response:
            if response.status != 200:
                raise _error(response.status, response.read(), f"{self._url}{path}")
            yield response


class _NotFoundError(RequestError):
    """The server has no such endpoint."""


def _choose(cards: list[dict[str, Any]], wanted: str | None, url: str) -> dict[str, Any]:
    names = [str(card.get("id")) for card in cards]
    if not names:
        raise ConfigError(f"the server at {url} has no model")
    if wanted is None:
        return cards[0]
    if wanted not in names:
        raise ConfigError(f"the server at {url} has no model {wanted!r}; it has {', '.join(names)}")
    return cards[names.index(wanted)]


def _chunks(response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    """The events of a stream, up to [DONE]. Raises RequestError for an error event."""
    reader = EventReader()
    while piece := response.read1(65536):
        for event in reader.feed(piece):
            if event == b"[DONE]":
                return
            try:
                chunk = json.loads(event)
            except ValueError:
                raise RequestError(f"the server sent no JSON: {shown(event)}") from None
            if not isinstance(chunk, dict):
                raise RequestError(f"the server sent no object: {shown(chunk)}")
            if "error" in chunk:
                raise _error(200, event, "the server")
            yield chunk


def _piece(chunk: _Fields, counted: int) -> Piece:
    """counted: tokens of the pieces before. The usage at the end corrects what chunks hide."""
    text, thought, reason = "", "", None
    for choice in chunk.get("choices") or ():
        delta = choice.get("delta") or {}
        text += delta.get("content") or ""
        thought += delta.get("reasoning") or delta.get("reasoning_content") or ""
        reason = choice.get("finish_reason") or reason
    usage = chunk.get("usage")
    if not usage:
        return Piece(text, 1 if text or thought else 0, finish_reason=reason, reasoning=thought)
    details = usage.get("prompt_tokens_details") or {}
    tokens = usage.get("completion_tokens", counted) - counted
    prompt, cached = usage.get("prompt_tokens"), details.get("cached_tokens")
    return Piece(text, tokens, prompt, cached, reason, thought)


def _json_value(value: Any) -> Any:
    if isinstance(value, tuple):
        return list(value)
    return {str(k): v for k, v in value.items()} if isinstance(value, Mapping) else value


def _error(status: int, body: bytes, where: str) -> OctavoError:
    """The exception for what a server says is wrong."""
    try:
        found = json.loads(body)
        found = found.get("error", found)
        message, code = str(found["message"]), found.get("code")
    except (ValueError, KeyError, TypeError, AttributeError):
        message, code = shown(body.decode(errors="replace")), None
    if code == "context_length_exceeded":
        return ContextLengthError(message)
    if status in (401, 403):
        return RequestError(f"{where} wants another key; set OCTAVO_API_KEY to the server's")
    said = brief(Exception(message))
    kind = _NotFoundError if status in (404, 405, 501) else RequestError
    return kind(said if status == 200 else f"{where} says HTTP {status}: {said}")
