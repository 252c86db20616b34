"""The small routes: which models are served, and a prompt's tokens without an answer."""

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from octavo.errors import RequestError
from octavo.server.body import read_body
from octavo.server.conversation import Conversation, render
from octavo.server.protocol import DetokenizeBody, TokenizeBody, parse
from octavo.server.replies import Model, ModelList, Text, Tokens
from octavo.server.service import Service
from octavo.server.sse import to_json
from octavo.text.tool_request import read_choice, read_tools


def json_response(value: Any) -> Response:
    return Response(to_json(value), media_type="application/json")


def _card(service: Service, name: str) -> Model:
    window = service.limits.max_model_len if service.ready else None
    return Model(name, "model", service.created, "octavo", window)


async def list_models(service: Service, request: Request) -> Response:
    return json_response(ModelList("list", [_card(service, name) for name in service.names]))


async def get_model(service: Service, request: Request) -> Response:
    return json_response(_card(service, service.model_name(request.path_params["name"])))


async def tokenize(service: Service, request: Request) -> Response:
    """The ids that a completion's `prompt` or a chat's `messages` would have."""
    body = await read_body(service, request, lambda raw: parse(raw, TokenizeBody))
    service.model_name(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise RequestError("give either prompt or messages", "prompt")
    if body.messages is not None:
        if body.add_special_tokens:
            raise RequestError("add_special_tokens needs prompt", "add_special_tokens")
        tools = () if body.tools is None else read_tools(body.tools)
        conversation = Conversation(
            messages=body.messages,
            tools=tools,
            tool_choice=read_choice(None, tools),
            add_generation_prompt=body.add_generation_prompt,
            continue_final_message=bool(body.continue_final_message),
            chat_template_kwargs=body.chat_template_kwargs,
        )
        ids = (await render(service, conversation)).token_ids
    else:
        for name in (
            "add_generation_prompt", "continue_final_message", "chat_template_kwargs", "tools",
        ):  # fmt: skip
            if getattr(body, name):  # false and {} have no effect
                raise RequestError(f"{name} needs messages", name)
        ids = await service.prompts.encode(body.prompt or "", body.add_special_tokens is not False)
    reply = Tokens(len(ids), service.limits.max_model_len, ids)
    if body.return_token_strs:
        reply.token_strs = [service.prompts.tokenizer.token_text(i) for i in ids]
    return json_response(reply)


async def detokenize(service: Service, request: Request) -> Response:
    body = await read_body(service, request, lambda raw: parse(raw, DetokenizeBody))
    service.model_name(body.model)
    last = service.limits.vocab_size - 1
    if not all(0 <= token <= last for token in body.tokens):
        raise RequestError(f"tokens must be ids from 0 to {last}", "tokens")
    text = await service.prompts.in_thread(service.prompts.tokenizer.decode, body.tokens, False)
    return json_response(Text(text))
