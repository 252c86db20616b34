"""The engine processes of one client: started together, watched, started again.

Which process computes a request, and what becomes of the requests of one that has died, is
`engine.client`; how one process is started and talked to, `engine.launcher` and `engine.link`.

All start at once, and none serves before all do. One that dies later is started again if that is
asked for; if it cannot start, or is another model then, it stays down and the others go on.
"""

import asyncio
from collections.abc import Callable
from typing import Protocol

from octavo.config import EngineConfig
from octavo.engine.capabilities import EngineCapabilities
from octavo.engine.launcher import Launcher
from octavo.engine.link import EngineLink, LinkOwner, RequestReport
from octavo.errors import ConfigError, EngineDeadError, OctavoError
from octavo.log import get_logger

logger = get_logger(__name__)

_RETURNING = "the engine has died and is being started again"
RESTART_SECONDS = 1.0  # so that an engine that dies at once does not keep the machine busy
# What requests depend on; the rest (blocks, memory) may differ between engines.
_SAME = ("model", "architecture", "device", "dtype", "kv_cache_dtype", "block_size",
         "max_model_len", "vocab_size", "eos_token_ids", "kv_groups",
         "generation_defaults")  # fmt: skip

# Of an engine, by its number: where it runs.
Launchers = Callable[[int], Launcher]


class PoolOwner(LinkOwner, Protocol):
    """Who has the requests."""

    def link_ready(self, link: EngineLink) -> None:
        """An engine that was started again takes requests from now on."""
        ...


class EnginePool:
    """`data_parallel_size` engines. links: one for each, the latest."""

    def __init__(
        self,
        config: EngineConfig,
        executor: str,
        launchers: Launchers,
        owner: PoolOwner,
        restart: bool = False,
    ) -> None:
        self._config, self._executor, self._launchers = config, executor, launchers
        self._owner = owner
        self._restart = restart
        self._restarts: dict[int, asyncio.Task[None]] = {}
        self._started = self._closing = False
        self._failure: OctavoError | None = None  # of the first engine that dies before the start
        self.links = [self._link(index) for index in range(config.data_parallel_size)]

    def _link(self, index: int) -> EngineLink:
        return EngineLink(self._config, self._executor, self._launchers(index), self, index)

    async def open(self) -> None:
        """Start all processes. Raises what one could not be started with."""
        done = await asyncio.gather(*(link.open() for link in self.links), return_exceptions=True)
        for error in done:
            if error is not None:
                raise error

    async def loaded(self) -> EngineCapabilities:
        """Wait until all models are loaded. Raises what the first that fails failed with."""
        try:
            first, *others = await asyncio.gather(*(link.loaded() for link in self.links))
        except OctavoError as error:
            if self._failure in (None, error):
                raise
            raise self._failure from error
        if self._failure is not None:  # one died just after the load of the last
            raise self._failure
        for link, found in zip(self.links[1:], others, strict=True):
            _check_same(first, found, link)
        self._started = True
        return first

    @property
    def serving(self) -> list[EngineLink]:
        """Those that answer now; none before all are loaded, and compared."""
        if not self._started:
            return []
        down = self.down
        return [link for link in self.links if link.index not in down]

    @property
    def down(self) -> dict[int, str]:
        """Why the others do not, by number. One that is started again does not yet when it has
        loaded, but when it was compared."""
        reasons = {
            link.index: _RETURNING if link.index in self._restarts else link.unhealthy_reason
            for link in self.links
        }
        return {index: reason for index, reason in reasons.items() if reason is not None}

    @property
    def is_lost(self) -> bool:
        """Whether no engine is alive, and none will be."""
        return not self._restarts and all(link.reason is not None for link in self.links)

    async def close(self) -> None:
        """Stop all processes and wait for their ends."""
        self._closing = True
        for task in self._restarts.values():
            task.cancel()
        await asyncio.gather(*self._restarts.values(), return_exceptions=True)
        results = await asyncio.gather(
            *(link.close() for link in self.links), return_exceptions=True
        )
        for error in results:
            if error is not None:
                raise error

    # Of a link.

    def received(self, link: EngineLink, report: RequestReport) -> None:
        self._owner.received(link, report)

    def link_silent(self, link: EngineLink, reason: str) -> None:
        self._owner.link_silent(link, reason)

    def link_died(self, link: EngineLink, error: OctavoError) -> None:
        if not self._started:
            self._fail_start(link, error)
        elif link.index not in self._restarts:  # else `_start_again` says so
            if self._restart and not self._closing and link.capabilities is not None:
                self._restarts[link.index] = asyncio.create_task(self._start_again(link))
            self._owner.link_died(link, error)
            self._say_how_many_serve()

    def _say_how_many_serve(self) -> None:
        if self.serving and not self._closing:
            logger.warning("%d of %d engines serve", len(self.serving), len(self.links))

    def _fail_start(self, link: EngineLink, error: OctavoError) -> None:
        """One does not start: none will serve, and those that still load need not go on."""
        if self._failure is None:
            self._failure = error
            if len(self.links) > 1 and isinstance(error, EngineDeadError):
                self._failure = EngineDeadError(f"{link.name}: {error.reason}")
            for other in self.links:
                if other.capabilities is None:
                    other.fail(self._failure)

    async def _start_again(self, dead: EngineLink) -> None:
        wanted = dead.capabilities
        assert wanted is not None
        logger.warning("starting %s again (--restart-engine)", dead.name)
        await dead.close()
        await asyncio.sleep(RESTART_SECONDS)
        link = self.links[dead.index] = self._link(dead.index)
        try:
            await link.open()
            _check_same(wanted, await link.loaded(), link)
            if link.reason is not None:  # it died just after its load
                raise EngineDeadError(link.reason)
        except Exception as error:  # noqa: BLE001 - the engine stays down, and the log says why
            logger.error("%s cannot be started again: %s", link.name, error)
            reason = error if isinstance(error, OctavoError) else EngineDeadError(str(error))
            await link.close(reason)
            del self._restarts[link.index]
            self._owner.link_died(link, reason)
            self._say_how_many_serve()
            return
        del self._restarts[link.index]
        logger.info("%s serves again", link.name)
        self._owner.link_ready(link)


def _check_same(wanted: EngineCapabilities, found: EngineCapabilities, link: EngineLink) -> None:
    """Raise ConfigError unless any request may be computed by either engine."""
    pairs = [(name, getattr(wanted.limits, name), getattr(found.limits, name)) for name in _SAME]
    pairs.append(("scheduler", wanted.scheduler, found.scheduler))
    different = [f"{name} {here!r}, not {other!r}" for name, other, here in pairs if here != other]
    if not different:
        return
    remedy = "; all engines of one endpoint must serve the same model on devices of one kind"
    if found.limits.max_model_len != wanted.limits.max_model_len:
        most = min(found.limits.max_model_len, wanted.limits.max_model_len)
        remedy = f"; set max_model_len to {most}, which fits all engines"
    raise ConfigError(f"{link.name} has {', '.join(different)} as the others have{remedy}")
