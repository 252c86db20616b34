"""The configuration of the HTTP server: what `octavo serve` takes beside the engine's options."""

from dataclasses import dataclass, field, fields
from typing import Any

from octavo.config import check_type
from octavo.errors import ConfigError


def _option(default: Any, help: str, **metadata: Any) -> Any:
    return field(default=default, metadata={"help": help, **metadata})


@dataclass(frozen=True)
class ServerConfig:
    """The configuration of `octavo serve`. Raises ConfigError, naming field, value and remedy.

    `served_model_name` and `allowed_origins` may list several, separated by commas.
    """

    host: str = _option("127.0.0.1", "address to listen on; 0.0.0.0 is every interface")
    port: int = _option(8000, "port to listen on; 0 chooses a free one", low=0)
    api_key: str | None = _option(
        None, "key required by every path except /health; better set in OCTAVO_API_KEY"
    )
    served_model_name: str | None = _option(
        None, "names of the model in requests; answers have the first one"
    )
    root_path: str = _option("", "path prefix under which a proxy serves this server")
    allowed_origins: str | None = _option(None, "origins whose web pages may call (CORS)")
    max_body_mb: float = _option(32, "maximum size of a request body in MiB")
    drain_timeout: float = _option(30, "seconds for running requests to finish after SIGTERM")
    stall_timeout: float = _option(
        60, "seconds after which a stream that its client does not read is ended"
    )
    keep_alive_timeout: float = _option(
        75, "seconds that an idle connection stays open; above those of a proxy in front"
    )
    log_requests: bool = _option(False, "log prompts and answers too, not only their sizes")
    restart_engine: bool = _option(False, "restart the engine when it dies")

    def __post_init__(self) -> None:
        for item in fields(self):
            check_type(item, getattr(self, item.name))
        if self.port > 65535:
            raise ConfigError(f"port must be between 0 and 65535, not {self.port}")
        if self.root_path and not self.root_path.startswith("/"):
            raise ConfigError(f"root_path must start with '/', not {self.root_path!r}")
        if self.api_key == "":
            raise ConfigError("api_key must not be empty; leave it out for none")
        if not 0 <= self.drain_timeout < 1e6:
            raise ConfigError(f"drain_timeout must be seconds from 0, not {self.drain_timeout}")
        for name in ("max_body_mb", "stall_timeout", "keep_alive_timeout"):
            if not 0 < getattr(self, name) < 1e6:
                raise ConfigError(f"{name} must be above 0, not {getattr(self, name)}")
