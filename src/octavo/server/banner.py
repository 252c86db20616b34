"""What an operator reads at the start: model, memory, limits, address, and a command to try."""

import shlex

from octavo.config import EngineConfig
from octavo.core.plan import RunnerLimits
from octavo.server.options import ServerConfig
from octavo.server.service import Service
from octavo.version import __version__

_GIB = 1 << 30
_EVERYWHERE = {"//0.0.0.0:": "//127.0.0.1:", "//[::]:": "//[::1]:"}


def banner(service: Service, address: str) -> list[str]:
    """The start-up summary. `address` is that of `listener.address_of`."""
    limits, config, options = service.limits, service.config, service.options
    defaults = ", ".join(f"{name}={value}" for name, value in service.defaults.items())
    keys = len(options.api_key)
    key = "without API key" if not keys else "with an API key" if keys == 1 else f"{keys} API keys"
    return [
        f"Octavo {__version__}: {limits.model} ({limits.architecture}) as "
        f"{', '.join(service.names)}; {limits.dtype} on {limits.device}, "
        f"KV {limits.kv_cache_dtype}",
        f"memory{_first(config)}: {_memory(limits)}; KV cache of {limits.kv_tokens} tokens, "
        f"{limits.kv_tokens // limits.max_model_len} full-length requests",
        f"limits{_each(config)}: {limits.max_model_len} tokens a request, {config.max_num_seqs} at "
        f"once, {config.max_num_batched_tokens} tokens a step, {config.waiting_limit} waiting",
        f"sampling defaults from the model: {defaults or 'none'}",
        f"listening on {address} ({key}); try",
        curl_command(options, address),
    ]


def curl_command(options: ServerConfig, address: str) -> str:
    """A line for a shell on this machine that asks this server for a completion."""
    words = ["curl"]
    if address.startswith("unix:"):
        words += ["--unix-socket", shlex.quote(address.removeprefix("unix:"))]
        address = f"{options.scheme}://localhost"
    for everywhere, here in _EVERYWHERE.items():
        address = address.replace(everywhere, here)
    if options.ssl_certfile:
        words.append("-k")  # the certificate is for the name that clients use, not for this one
    if options.ssl_cert_reqs == 2:
        words.append("--cert CLIENT.pem")
    words += [f"{address}/v1/completions", "-H 'Content-Type: application/json'"]
    if options.api_key:
        words.append('-H "Authorization: Bearer $OCTAVO_API_KEY"')
    words.append('-d \'{"prompt": "Once upon a time", "max_tokens": 32}\'')
    return " ".join(words)


def _each(config: EngineConfig) -> str:
    """Where there are several engines, that limits are those of one."""
    count = config.data_parallel_size
    return f" of each of {count} engines" if count > 1 else ""


def _first(config: EngineConfig) -> str:
    """Where there are several engines, that what was measured is of one; the others differ."""
    return " of engine 0" if config.data_parallel_size > 1 else ""


def _memory(limits: RunnerLimits) -> str:
    """How the memory is divided: measured, or the KV alone where its size was given."""
    parts = [f"{name} {size / _GIB:.2f} GiB" for name, size in limits.memory.items()]
    return (
        ", ".join(parts) or f"KV {limits.num_blocks * limits.block_bytes / _GIB:.2f} GiB, as given"
    )
