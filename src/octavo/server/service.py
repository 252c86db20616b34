"""One served model: its engine's life, its names, and whether it can answer now.

Starts the engine, restarts it if asked to, and says why nothing can be answered while that is
so. Reading bodies, encoding prompts and generating are files of their own (`server.body`,
`server.prompts`, `server.generation`).
"""

import asyncio
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from octavo.config import EngineConfig
from octavo.core.plan import RunnerLimits
from octavo.engine.client import EXECUTOR, EngineClient
from octavo.errors import OctavoError
from octavo.log import get_logger
from octavo.params import SamplingParams
from octavo.server.config_info import config_labels
from octavo.server.dashboard_hub import Hub, Tap
from octavo.server.errors import HTTPError, unavailable
from octavo.server.metrics import Metrics
from octavo.server.options import ServerConfig
from octavo.server.prompts import PromptEncoder
from octavo.server.spans import Spans
from octavo.server.sse import Streams

logger = get_logger(__name__)

CUT_SECONDS = 0.5  # for dashboards to take their last event
DEATH_LINGER_SECONDS = 3.0  # after the engine's death, so that clients and probes get the reason


class Service:
    """One served model. `failure` says why the server must end; None while it need not."""

    client: EngineClient

    def __init__(
        self, config: EngineConfig, options: ServerConfig, executor: str = EXECUTOR
    ) -> None:
        self.config = config
        self.options = options
        self.names = _served_names(config, options)
        self.streams = Streams(options.stall_timeout)
        self.metrics = Metrics(self.names[0], config.data_parallel_size)
        self.metrics.config = config_labels(config)
        self.dashboard = self._hub() if options.dashboard else None
        endpoint = options.otlp_traces_endpoint
        self.spans = None if endpoint is None else Spans(endpoint)
        self.prompts = PromptEncoder(config)
        self.created = int(time.time())
        self.defaults: Mapping[str, Any] = {}  # the model's own sampling defaults
        self.failure: str | None = None
        self.draining = False
        self.ready = False
        self._executor = executor

    async def run_engine(self, announce: Callable[[], None]) -> None:
        """Start the engines and watch them; return, with `failure` set, when the server must end.

        With --restart-engine, it is the client that starts an engine again.
        """
        restart = self.options.restart_engine
        self.client = EngineClient(self.config, self._executor, restart=restart)
        self.client.observer = Tap(self.metrics, self.dashboard) if self.dashboard else self.metrics
        self.metrics.down = lambda: self.client.down
        try:
            await self.client.start(self.prompts.load)
            self._loaded()
        except OctavoError as error:
            logger.error("the engine cannot start: %s", error)
            self.failure = "the engine could not start; the server's log says why"
            return
        announce()
        await self.client.died.wait()
        self.ready = False
        logger.error("the engine died: %s", self.client.reason)
        self.failure = f"the engine died: {self.client.reason}"
        await asyncio.sleep(DEATH_LINGER_SECONDS)

    def _hub(self) -> Hub:
        return Hub(
            self.config,
            lambda: self.client if self.ready else None,
            self.unavailable_reason,
            lambda: self.metrics.last,
        )

    def _loaded(self) -> None:
        self.limits: RunnerLimits = self.client.capabilities.limits
        self.prompts.fit(self.limits.max_model_len)
        if self.config.generation_config == "auto":
            self.defaults = dict(self.limits.generation_defaults)
        SamplingParams(**self.defaults)
        self.ready = True

    def unavailable_reason(self) -> str | None:
        """Why nothing can be answered now; None when all is well."""
        if self.draining:
            return "the server is shutting down"
        if self.failure is not None:
            return self.failure
        return self.client.unhealthy_reason if self.ready else "the model is being loaded"

    def engines_down(self) -> dict[int, str]:
        """Of several engines, why some do not answer while others do, by number."""
        return self.client.down if self.ready and self.config.data_parallel_size > 1 else {}

    def model_name(self, name: str | None) -> str:
        """The name to answer with. Raises HTTPError 404 for a model that is not served."""
        if name is None:
            return self.names[0]
        if name not in self.names:
            raise HTTPError(
                404,
                f"the model {name[:100]!r} is not served here; this server has "
                f"{', '.join(self.names)}",
                code="model_not_found",
                param="model",
            )
        return name

    def drain(self) -> None:
        """Take nothing new from now on; what runs may finish, and dashboards end."""
        self.draining = True
        if self.dashboard:
            self.dashboard.close("the server is shutting down", CUT_SECONDS)

    def abort_all(self) -> None:
        """End the requests that still run: the time to drain is over."""
        if self.ready:
            self.client.fail_all(unavailable("the server is shutting down", "unavailable"))

    async def close(self) -> None:
        if hasattr(self, "client"):
            await self.client.close()
        if self.spans is not None:
            await asyncio.to_thread(self.spans.close)
        self.prompts.close()


def _served_names(config: EngineConfig, options: ServerConfig) -> tuple[str, ...]:
    """What requests may call the model. A path is not shown: its last part stands for it."""
    if options.served_model_name:
        return tuple(dict.fromkeys(options.served_model_name))
    model = config.model.rstrip("/")
    is_path = model.endswith(".gguf") or model.startswith((".", "/"))
    if is_path or os.path.exists(os.path.expanduser(model)):
        return (Path(model).name.removesuffix(".gguf"),)
    return (model,)
