"""How large the KV pool and the swap pool are, and the refusals where memory is too small.

Two rounds. `check` needs a model's description only, so it runs before the weights are read: it
knows the weights' least size, and all of a pool whose size is given. `divide` has measured what is
in use and what a full step takes.

Without `gpu_memory_utilization`, a device that computes in host memory, which other programs use
too, gives a modest pool: what `max_num_seqs` requests of the whole window can use, at most
`DEFAULT_KV_BYTES` and a quarter of what is free, but one such request.

Tensor-parallel ranks on one machine share its memory: each takes its part of what is there and of
what the options allow for the whole, and promises that are made to other engines count once.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from octavo.config import EngineConfig
from octavo.core.plan import CacheSpec, blocks_needed, longest_sequence
from octavo.errors import ConfigError, NotEnoughMemoryError
from octavo.log import get_logger
from octavo.runner.memory import GIB, DeviceMemory, MemorySum, PartOfMemory, shown

logger = get_logger(__name__)

DEFAULT_SHARE = 0.9  # of a device's memory, vLLM's
DEFAULT_KV_BYTES = 4 * GIB
_FREE_SHARE = 4  # the default pool takes at most one in so many bytes of free memory
_SWAP_SHARE = 4  # the swap pool, where it takes host memory from the KV pool


@dataclass(frozen=True, slots=True)
class Needs:
    """What the KV of one model takes. window: tokens of the longest request, asked or its own."""

    groups: Sequence[CacheSpec]
    block_bytes: int
    window: int

    def blocks(self, config: EngineConfig, tokens: int) -> int:
        """Blocks that a request of `tokens` tokens holds at most, without prefill of others."""
        return blocks_needed(self.groups, tokens, config.block_size)

    def least_blocks(self, config: EngineConfig) -> int:
        """Blocks without which the engine cannot start: those of a window that was asked for."""
        if config.max_model_len is None:
            return len(self.groups)
        return max(len(self.groups), self.blocks(config, self.window))


@dataclass(frozen=True, slots=True)
class Division:
    """Bytes for the KV pool and, at most, for the swap pool. terms: how they were found."""

    kv: int
    swap: int
    terms: dict[str, int]


@dataclass(frozen=True, slots=True)
class Pools:
    """What a division gives. blocks: of the KV pool, without the null block; host_blocks: of the
    swap pool; window: the tokens of the longest request."""

    blocks: int
    host_blocks: int
    window: int


@dataclass(frozen=True, slots=True)
class Sizing:
    """The decisions for one model on one device. promised: to other engines, in bytes; of it,
    this rank's part.

    keeps_codes: the file holds codes of few bits, which int4 would not dequantize. ranks: how many
    of this engine share the memory; all sizes are then one rank's. engines: how many divide it
    (`data_parallel_size`); unsized: of them, those that have not taken their part, with this one.
    """

    config: EngineConfig
    needs: Needs
    shares_host_memory: bool
    promised: int = 0
    keeps_codes: bool = False
    ranks: int = 1
    engines: int = 1
    unsized: int = 1

    def _part_of(self, memory: DeviceMemory) -> DeviceMemory:
        return PartOfMemory.of(memory, self.ranks * self.engines, self.ranks * self._parts_left)

    @property
    def _parts_left(self) -> float:
        """Equal parts, for which there is as much as is free: those that were taken were each the
        share of a part."""
        return self.engines - self.share * (self.engines - self.unsized)

    @property
    def _promised(self) -> int:
        return int(self.promised / self._parts_left)

    @property
    def share(self) -> float:
        given = self.config.gpu_memory_utilization
        return DEFAULT_SHARE if given is None else given

    @property
    def given(self) -> int | None:
        """The KV pool's bytes where an option says them."""
        config = self.config
        if config.num_gpu_blocks_override is not None:
            return config.num_gpu_blocks_override * self.needs.block_bytes
        return config.kv_cache_memory_bytes

    def check(self, memory: DeviceMemory, weight_bytes: int) -> None:
        """Refuse what cannot work, before the weights are read.

        memory: as it is now. weight_bytes: the least that the weights will take. Raises
        NotEnoughMemoryError, or ConfigError for a window that a given pool does not hold.
        """
        if self.given is not None:
            self.window(self.given)
            return
        memory = self._part_of(memory)
        least = self.needs.least_blocks(self.config) * self.needs.block_bytes
        found = MemorySum.of(memory, self.share, 0, self._promised)
        if found.budget < weight_bytes + least:
            weights = f"at least {shown(weight_bytes)} for the weights"
            raise self._refusal(found, memory, weight_bytes + least, weights)

    def divide(self, memory: DeviceMemory, step_peak: int, captured: int = 0) -> Division:
        """Of measured memory; captured: for captured steps. Raises NotEnoughMemoryError."""
        memory = self._part_of(memory)
        found = MemorySum.of(memory, self.share, step_peak, self._promised, captured)
        least = self.needs.least_blocks(self.config) * self.needs.block_bytes
        if found.budget < least:
            raise self._refusal(found, memory, least)
        kv = found.budget
        if self._is_modest:
            kv = min(kv, self._modest(memory))
        swap = self._swap_space
        if self._swap_is_host_memory:
            swap = min(swap, kv // _SWAP_SHARE)
            kv = min(kv, max(least, found.budget - swap))
            swap = min(swap, found.budget - kv)
        logger.info(
            "KV memory: %s; KV %s%s, swap %s", found.explain(), shown(kv),
            self._how_to_get_more(found.budget, kv), shown(swap),
        )  # fmt: skip
        terms = {
            "total": found.total, "limit": found.limit, "used": found.used,
            "step_peak": found.step_peak, "swap": swap, "kv": kv,
        }  # fmt: skip
        return Division(kv, swap, {**terms, "captured": captured} if captured else terms)

    def take_given(self, memory: DeviceMemory, given: int) -> Division:
        """Of a pool whose size an option says; it is not refused where memory may be too small,
        since pages are taken as they are written."""
        memory = self._part_of(memory)
        swap = self._swap_space
        if self._swap_is_host_memory:
            swap = min(swap, given)
        free = max(0, memory.free - self._promised)
        if self.shares_host_memory and given > free:
            logger.warning(
                "the KV cache may take %s, as asked, but only %s are free%s: the system may end "
                "this process once it is full", shown(given), shown(free), self._beside()
            )  # fmt: skip
        return Division(given, swap, {})

    def window(self, kv: int) -> int:
        """The tokens of the longest request, for a pool of `kv` bytes.

        Raises NotEnoughMemoryError if no block fits, ConfigError for a window that was asked for
        and does not fit.
        """
        config, needs = self.config, self.needs
        size, blocks = config.block_size, kv // needs.block_bytes
        if blocks < len(needs.groups):
            least = len(needs.groups) * needs.block_bytes
            raise NotEnoughMemoryError(
                f"no KV block fits: {shown(kv)} are left for KV and {size} tokens take "
                f"{shown(least)}; set {self._knob(least)}"
            )
        most = longest_sequence(needs.groups, blocks, size)
        if needs.window <= most:
            return needs.window
        if config.max_model_len is not None:
            wanted = needs.blocks(config, needs.window) * needs.block_bytes
            raise ConfigError(
                f"max_model_len is {needs.window} but the KV cache holds {most} tokens "
                f"({blocks} blocks of {size}, {shown(kv)}); set max_model_len to at most {most}, "
                f"or {self._knob(wanted)}"
            )
        logger.warning("max_model_len is %d, not the model's %d: that is what the KV cache holds",
                       most, needs.window)  # fmt: skip
        return most

    def pools(self, division: Division, least: Callable[[int], int] = int) -> Pools:
        """The blocks that a division holds. least: of all ranks, of a number of this one's.

        Raises as `window`.
        """
        blocks = least(division.kv // self.needs.block_bytes)
        host = least(self.host_blocks(division))
        return Pools(blocks, host, self.window(blocks * self.needs.block_bytes))

    def host_blocks(self, division: Division) -> int:
        """Blocks of the swap pool, at most four times those of the KV pool: more preempted
        requests than that are better recomputed."""
        bytes_ = self.needs.block_bytes
        return min(division.swap // bytes_, 4 * (division.kv // bytes_))

    def for_weights(self) -> tuple[str, str]:
        """(what memory is for, what to change) where a device has too little for it."""
        return (
            f"the weights of {self.config.model}",
            "set quantization='int8' or 'int4', or choose a smaller model or a larger device",
        )

    def for_step(self) -> tuple[str, str]:
        """As `for_weights`."""
        tokens, seqs = self.config.max_num_batched_tokens, self.config.max_num_seqs
        return (
            f"a step of max_num_batched_tokens={tokens} and max_num_seqs={seqs} beside the weights",
            f"set max_num_batched_tokens to {max(1, tokens // 2)} or less",
        )

    def for_pool(self) -> tuple[str, str]:
        """As `for_weights`."""
        return (
            "the KV cache and captured steps",
            f"set gpu_memory_utilization below {self.share}, or enforce_eager=True",
        )

    @property
    def _is_modest(self) -> bool:
        return self.shares_host_memory and self.config.gpu_memory_utilization is None

    def _modest(self, memory: DeviceMemory) -> int:
        """The default pool where the device's memory is the host's."""
        request = self.needs.blocks(self.config, self.needs.window) * self.needs.block_bytes
        # As much for each engine, whichever comes first.
        part = max(0, memory.free - self._promised)
        free = int(part * self._parts_left) // self.engines
        bound = max(request, min(DEFAULT_KV_BYTES // self.ranks, free // _FREE_SHARE))
        return min(bound, self.config.max_num_seqs * request)

    def _how_to_get_more(self, budget: int, kv: int) -> str:
        if not self._is_modest or kv >= budget * (1 - 1 / _SWAP_SHARE) - self.needs.block_bytes:
            return ""
        return (
            f" by default (more: gpu_memory_utilization={DEFAULT_SHARE}, or "
            "kv_cache_memory_bytes, such as 8G)"
        )

    @property
    def _swap_space(self) -> int:
        return int(self.config.swap_space * GIB) // self.ranks

    @property
    def _swap_is_host_memory(self) -> bool:
        return self.shares_host_memory and not self.config.swap_path

    @property
    def _part(self) -> str:
        """Of what the sizes in a message are."""
        return "" if self.ranks == 1 else f", one rank's part of {self.ranks},"

    def _beside(self) -> str:
        if not self._promised:
            return ""
        return f" beside the {shown(self._promised)} promised to other engines"

    def _knob(self, kv: int) -> str:
        """The option, and its value, that gives a pool of `kv` bytes."""
        if self.config.num_gpu_blocks_override is not None:
            return f"num_gpu_blocks_override to at least {-(-kv // self.needs.block_bytes)}"
        if self.config.kv_cache_memory_bytes is not None:
            return f"kv_cache_memory_bytes to at least {kv} ({shown(kv)})"
        return f"kv_cache_memory_bytes to {kv} ({shown(kv)}), or raise gpu_memory_utilization"

    def _refusal(
        self, found: MemorySum, memory: DeviceMemory, missing: int, weights: str = ""
    ) -> NotEnoughMemoryError:
        """Memory is too small by its sum: which term, and the value that would work.

        missing: bytes that must fit in the budget.
        """
        needed = found.used + found.step_peak + found.captured + missing
        free = max(1, memory.free - self._promised)
        share = max(needed / memory.total, (needed - found.used) / free)
        terms = [f"{shown(found.used)} in use already"]
        if weights:
            terms.append(weights)
        if found.step_peak:
            terms.append(
                f"{shown(found.step_peak)} for a step of max_num_batched_tokens="
                f"{self.config.max_num_batched_tokens}"
            )
        if found.captured:
            terms.append(f"{shown(found.captured)} for captured steps")
        least = self.needs.least_blocks(self.config) * self.needs.block_bytes
        tokens = self.config.max_model_len or self.config.block_size
        terms.append(f"{shown(least)} for the KV of {tokens} tokens")
        # Before the load, what is needed is known from below.
        enough = f"{'more than' if weights else 'at least'} {math.ceil(share * 1000) / 1000}"
        remedy = self._remedy(enough if share <= 1 else "", least, found.step_peak > needed // 3)
        return NotEnoughMemoryError(
            f"too little memory: gpu_memory_utilization={self.share} allows {shown(found.limit)} "
            f"of {shown(found.total)}{self._part} ({shown(memory.free)} are free{self._beside()}), "
            f"and {shown(needed)} are needed: {', '.join(terms)}; {remedy}"
        )

    def _remedy(self, enough: str, least: int, large_step: bool) -> str:
        """enough: the share that works; "" where none does."""
        ways = []
        if enough:
            ways.append(f"set gpu_memory_utilization to {enough}")
        if self.config.max_model_len is not None and least > self.needs.block_bytes:
            ways.append("a smaller max_model_len")
        if large_step:
            ways.append("a smaller max_num_batched_tokens")
        if self.keeps_codes:
            ways.append("quantization='int4' (--quantization int4), which keeps the file's codes")
        elif self.config.quantization is None:
            ways.append("quantization='int8' or 'int4'")
        ways.append("a smaller model")
        return ("" if enough else "no share is enough: ") + ", or ".join(ways)
