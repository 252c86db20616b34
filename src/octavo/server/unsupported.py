"""Paths that clients of other servers ask for: what is not served here, and what to use.

They are 404 as any unknown path is; the message is what makes the difference.
"""

from types import MappingProxyType

_CHAT = "use POST /v1/chat/completions"
_OPENAI = "connect to this server as to an OpenAI-compatible one, with a base URL that ends in /v1"

# What is not served -> the paths that mean it. A path that ends in `/` stands for all below it.
_PATHS = {
    "responses are not kept: a response is in the answer to its POST /v1/responses alone":
    "/v1/responses/",
    f"Cohere's API is not supported; {_CHAT}": "/cohere/ /v2/chat",
    f"Ollama's API is not supported; {_OPENAI}": "/api/",
    f"llama.cpp's own API is not supported; {_OPENAI}": "/completion /props /slots /slots/ /infill "
    "/apply-template /lora-adapters",
    f"the API of text-generation-inference is not supported; {_OPENAI}": "/generate "
    "/generate_stream /info",
    f"SageMaker's /invocations is not supported; {_CHAT}": "/invocations",
    f"Assistants are not supported; {_CHAT}": "/v1/assistants /v1/assistants/ /v1/threads "
    "/v1/threads/ /v1/conversations /v1/conversations/",
    "embedding, reranking and classifying are not supported: this server generates text": "/embed "
    "/v1/embeddings /embeddings /embedding /v2/embed /v1/rerank /v2/rerank /rerank /reranking "
    "/v1/score /score /classify /pooling /v1/moderations",
    "images, audio and video are not supported": "/v1/audio/ /v1/images/ /v1/videos /v1/videos/ "
    "/v1/realtime",
    "batches are not run by the server; use the command `octavo run-batch`, or send the requests "
    "at once": "/v1/batches /v1/batches/ /v1/files /v1/files/ /v1/uploads "
    "/v1/chat/completions/batch /v1/messages/batches /v1/messages/batches/",
    "models cannot be trained here": "/v1/fine_tuning/",
    "LoRA adapters are not supported; merge the adapter into the weights": "/v1/load_lora_adapter "
    "/v1/unload_lora_adapter",
    "an engine cannot sleep; stop the server to free its memory": "/sleep /wake_up /is_sleeping "
    "/release_kv_cache_memory",
    "vLLM's development interface is not supported; see /metrics, /version and /openapi.json":
    "/server_info /collective_rpc /start_profile /stop_profile /reset_mm_cache "
    "/reset_encoder_cache /pause /resume /is_paused /update_weights /abort_requests /inference/ "
    "/scale_elastic_ep /fault_tolerance/ /kv_event_sources",
    "the tokenizer's settings are not served; use POST /tokenize and POST /detokenize":
    "/tokenizer_info",
    "use GET /health": "/healthz /readyz /livez /ready /live /health_generate /v1/health /status",
    "the paths of OpenAI's API begin with /v1: is it missing at the end of the client's base URL?":
    "/chat/completions /completions /models",
    "the path has /v1 twice: the client adds it to a base URL that has it": "/v1/v1/",
}  # fmt: skip
_REASONS = MappingProxyType(
    {path: reason for reason, paths in _PATHS.items() for path in paths.split()}
)


def reason(path: str) -> str | None:
    """What a 404 says of `path`; None for a path that no known server has."""
    if path in _REASONS:
        return _REASONS[path]
    parents = [path[: i + 1] for i, letter in enumerate(path[:200]) if letter == "/"][1:]
    return next((_REASONS[parent] for parent in reversed(parents) if parent in _REASONS), None)
