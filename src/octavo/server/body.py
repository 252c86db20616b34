"""A request's body, read and parsed: on a thread where it is long."""

from collections.abc import Callable
from typing import TypeVar

from starlette.requests import Request

from octavo.params import SamplingParams
from octavo.server.errors import HTTPError, unavailable
from octavo.server.protocol import ChatBody, CompletionBody, parse, sampling_params
from octavo.server.service import Service

_INLINE_BYTES = 1 << 14  # a shorter body is parsed in less time than a thread costs
T = TypeVar("T")
GenerationT = TypeVar("GenerationT", CompletionBody, ChatBody)


async def read_body(service: Service, request: Request, work: Callable[[bytes], T]) -> T:
    """What `work` makes of the body. Raises HTTPError while the server answers nothing."""
    if reason := service.unavailable_reason():
        raise unavailable(reason, "unavailable")
    media = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media != "application/json" and not media.endswith("+json"):
        raise HTTPError(
            400, "the body must have Content-Type: application/json", code="invalid_media_type"
        )
    raw = await request.body()
    return work(raw) if len(raw) < _INLINE_BYTES else await service.prompts.in_thread(work, raw)


async def parse_request(
    service: Service, request: Request, kind: type[GenerationT]
) -> tuple[GenerationT, SamplingParams]:
    """The body of a generation request, and its sampling parameters.

    Raises RequestError naming a field at fault, HTTPError 404 for a model that is not served.
    """

    def work(raw: bytes) -> tuple[GenerationT, SamplingParams]:
        body = parse(raw, kind)
        return body, sampling_params(body, service.defaults)

    body, params = await read_body(service, request, work)
    service.model_name(body.model)
    return body, params
