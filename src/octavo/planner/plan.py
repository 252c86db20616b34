"""The plan of one engine: weights, KV, what fits, and what would change it."""

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from octavo.attention import registry as attention_registry
from octavo.attention.base import CacheLayout
from octavo.attention.registry import dtype_name
from octavo.config import EngineConfig
from octavo.core.plan import RunnerLimits, blocks_needed
from octavo.dist.base import Single
from octavo.errors import ConfigError, NotEnoughMemoryError
from octavo.models.description import describe_alone
from octavo.models.folder import CONFIG
from octavo.models.known import CONFIGS
from octavo.models.loader import Description, Outline, kv_dtype, outline
from octavo.planner.estimates import Estimates, estimate
from octavo.planner.target import Target
from octavo.runner.kv_cache import KVLayout, kv_layout
from octavo.runner.memory import shown
from octavo.runner.model_runner import resolve_dtype
from octavo.runner.sizing import Division, Needs, Pools, Sizing

DEFAULT_LENGTHS = ((128, 128), (1024, 256), (4096, 512))
_LAYER = re.compile(r"(?:model\.)?layers\.\d+\.(.*)")
_MOST_RANKS = 16


@dataclass(frozen=True, slots=True)
class Lengths:
    """Requests of one length. at_their_end: how many fit while all have their last token;
    on_average: while they are spread over their lives. Both without regard to max_num_seqs."""

    prompt: int
    output: int
    blocks: int
    kv_bytes: int
    at_their_end: int
    on_average: int


@dataclass(frozen=True, slots=True)
class Group:
    """A KV group. window: tokens that it keeps at most; None: all."""

    window: int | None
    layers: int
    bytes_per_token: int


@dataclass(frozen=True, slots=True)
class Change:
    """What another choice of flags gives."""

    flags: str
    weight_bytes: int
    kv_tokens: int
    max_model_len: int


@dataclass(frozen=True, slots=True)
class Plan:
    """One engine on one device, or one rank's part on each of several; sizes in bytes, of a rank.

    weights: by part, the least that they take, as the engine checks before it loads them. loaded:
    an estimate of all that is in memory after the load, by part; step, captured: estimates.
    memory: the terms of the KV budget. num_blocks: without the null block. is_exact: the pools do
    not depend on the estimates. window: of the model, before the pool limits it.
    """

    model: str
    architecture: str
    parameters: int
    dtype: str
    kv_cache_dtype: str
    quantization: str
    has_weights: bool
    device: str
    ranks: int
    weights: Mapping[str, int]
    weight_bytes: int
    loaded: Mapping[str, int]
    step: int
    captured: int
    memory: Mapping[str, int]
    block_size: int
    block_bytes: int
    groups: Sequence[Group]
    num_blocks: int
    num_host_blocks: int
    kv_bytes: int
    kv_tokens: int
    max_model_len: int
    window: int
    max_num_seqs: int
    is_exact: bool
    lengths: Sequence[Lengths] = ()
    changes: Sequence[Change] = ()
    command: str = ""

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class _Sized:
    """The sums of one configuration."""

    config: EngineConfig
    outline: Outline
    layout: KVLayout
    sizing: Sizing
    estimates: Estimates
    division: Division
    pools: Pools


def make_plan(
    config: EngineConfig,
    target: Target,
    lengths: Sequence[tuple[int, int]] = (),
    given: Mapping[str, Any] | None = None,
    measured: Estimates | None = None,
) -> Plan:
    """The plan of `config` on `target`. given: the options of the command line, for the command
    that starts such an engine. measured: what an engine has measured, instead of estimates.

    Raises ConfigError; NotEnoughMemoryError says what would fit.
    """
    target.check(config)
    description = describe_alone(config)
    try:
        sized = _size(config, target, description, measured=measured)
    except NotEnoughMemoryError as error:
        raise _refusal(config, target, description) from error
    plan = _plan(sized, target)
    served = _lengths(sized, lengths)
    changes = tuple(_changes(sized, target, description, _alternatives(config, target)))
    flags = {**(given or {}), **_advised(sized, served if lengths else ())}
    command = _command(_served_as(sized, plan), flags)
    return replace(plan, lengths=served, changes=changes, command=command)


def _served_as(sized: _Sized, plan: Plan) -> str:
    """What an engine takes for the model."""
    model = sized.config.model
    if model in CONFIGS and not plan.has_weights:
        return "MODEL"
    return str(Path(model).parent) if Path(model).name == CONFIG else model


def _size(
    config: EngineConfig,
    target: Target,
    description: Description,
    scale: float = 1.0,
    measured: Estimates | None = None,
) -> _Sized:
    """As `runner.model_runner` sizes its pools. scale: of the estimates, to see what they move."""
    device = target.device
    dtype = resolve_dtype(config.dtype, device)
    group = Single(0, config.tensor_parallel_size)
    found = outline(description, config, device, dtype, group)
    backend: CacheLayout = attention_registry.create_layout(
        config.attention_impl, device.torch_device, dtype, found.attention_specs,
        config.block_size, kv_dtype(config, dtype), device.attention_order,
    )  # fmt: skip
    layout = kv_layout(backend, found.attention_specs, config.block_size, kv_dtype(config, dtype))
    needs = Needs(
        layout.groups, layout.block_bytes, config.max_model_len or found.spec.max_position
    )
    shares = device.shares_host_memory
    engines = config.data_parallel_size if shares else 1
    sizing = Sizing(
        config, needs, shares, target.promised, found.can_keep_codes,
        config.tensor_parallel_size if shares else 1, engines, engines,
    )  # fmt: skip
    sizing.check(target.before, found.weight_bytes)
    guess = measured or estimate(found, config, device, layout, backend)
    if sizing.given is not None:
        division = sizing.take_given(target.before, sizing.given)
    else:
        memory = target.after(int(scale * sum(guess.loaded.values())))
        division = sizing.divide(memory, int(scale * guess.step), int(scale * guess.captured))
    return _Sized(config, found, layout, sizing, guess, division, sizing.pools(division))


def _plan(sized: _Sized, target: Target) -> Plan:
    config, found, pools = sized.config, sized.outline, sized.pools
    spec, stored = found.spec, found.spec.quantization
    shapes = found.architecture.parameter_shapes(spec)
    return Plan(
        model=config.model,
        architecture=spec.architecture,
        parameters=sum(math.prod(shape) for shape in shapes.values()),
        dtype=dtype_name(found.dtype),
        kv_cache_dtype=dtype_name(kv_dtype(config, found.dtype)),
        quantization=stored.METHOD if stored is not None else found.quantization.default,
        has_weights=bool(found.checkpoint.tensors),
        device=target.label,
        ranks=config.tensor_parallel_size,
        weights=_by_part(found),
        weight_bytes=found.weight_bytes,
        loaded=sized.estimates.loaded,
        step=sized.estimates.step,
        captured=sized.estimates.captured,
        memory=sized.division.terms,
        block_size=config.block_size,
        block_bytes=sized.layout.block_bytes,
        groups=_groups(sized),
        num_blocks=pools.blocks,
        num_host_blocks=pools.host_blocks,
        kv_bytes=pools.blocks * sized.layout.block_bytes,
        kv_tokens=_limits(sized).kv_tokens,
        max_model_len=pools.window,
        window=found.window,
        max_num_seqs=config.max_num_seqs,
        is_exact=_is_exact(sized, target),
    )


def _limits(sized: _Sized) -> RunnerLimits:
    """Of the engine, as far as they tell how much the pool holds."""
    return RunnerLimits(
        sized.pools.blocks + 1, sized.config.block_size, sized.layout.block_bytes,
        sized.pools.window, sized.outline.spec.num_ids, kv_groups=sized.layout.groups,
    )  # fmt: skip


def _is_exact(sized: _Sized, target: Target) -> bool:
    """Whether the pools are the same with estimates of half and twice the size."""
    description = (sized.outline.checkpoint, sized.outline.spec, sized.outline.window)
    try:
        found = [_size(sized.config, target, description, scale).pools for scale in (0.5, 2.0)]
    except ConfigError:
        return False
    return found == [sized.pools] * 2


def _by_part(found: Outline) -> dict[str, int]:
    """The bytes of weights by what they are for."""
    parts: dict[str, int] = {}
    architecture = found.architecture
    names = {architecture.EMBEDDING: "embedding", architecture.HEAD: "output head"}
    for name, size in found.parameter_bytes().items():
        inner = _LAYER.fullmatch(architecture.parameter_name(found.spec, name) or name)
        part = names.get(name, "norms")
        if inner is not None:
            part = "experts" if ".experts." in name else _part_of_layer(inner[1])
        parts[part] = parts.get(part, 0) + size
    return parts


def _part_of_layer(name: str) -> str:
    if "norm" in name:
        return "norms"
    return "attention" if name.startswith("self_attn") else "MLP"


def _groups(sized: _Sized) -> tuple[Group, ...]:
    counts = [0] * len(sized.layout.groups)
    for group, _ in sized.layout.places:
        counts[group] += 1
    each = sized.layout.block_bytes // sized.config.block_size
    return tuple(
        Group(cache.window, count, each)
        for cache, count in zip(sized.layout.groups, counts, strict=True)
    )


def _lengths(sized: _Sized, asked: Sequence[tuple[int, int]]) -> tuple[Lengths, ...]:
    """Raises ConfigError for lengths that were asked for and do not fit in the window."""
    window = sized.pools.window
    for prompt, output in asked:
        if prompt + output > window:
            raise ConfigError(
                f"lengths {prompt},{output} are {prompt + output} tokens, and max_model_len is "
                f"{window} here"
            )
    wanted = asked or [pair for pair in DEFAULT_LENGTHS if sum(pair) <= window]
    return tuple(_requests(sized, prompt, output) for prompt, output in wanted)


def _requests(sized: _Sized, prompt: int, output: int) -> Lengths:
    groups, size = sized.layout.groups, sized.config.block_size
    last = blocks_needed(groups, prompt + output, size)
    lives = range(prompt + 1, prompt + output + 1, size)
    mean = sum(blocks_needed(groups, tokens, size) for tokens in lives) / len(lives)
    blocks = sized.pools.blocks
    return Lengths(
        prompt, output, last, last * sized.layout.block_bytes, blocks // last,
        int(blocks / mean),
    )  # fmt: skip


def _alternatives(config: EngineConfig, target: Target) -> Iterator[dict[str, Any]]:
    """Other choices than the configuration's, one at a time."""
    if config.kv_cache_dtype in ("auto", "bfloat16", "float16", "float32"):
        yield {"kv_cache_dtype": "fp8"}
        yield {"kv_cache_dtype": "int8"}
    if config.quantization is None:
        for method in ("fp8", "int8", "int4"):
            if method in target.device.quantization:
                yield {"quantization": method}
    if not target.device.shares_host_memory:
        ranks = 2 * config.tensor_parallel_size
        while ranks <= _MOST_RANKS:
            yield {"tensor_parallel_size": ranks}
            ranks *= 2
    elif config.gpu_memory_utilization is None and config.kv_cache_memory_bytes is None:
        yield {"gpu_memory_utilization": 0.9}


def _changes(
    sized: _Sized, target: Target, description: Description, wanted: Iterable[dict[str, Any]]
) -> Iterator[Change]:
    """What each choice gives that works and gives more."""
    for options in wanted:
        found = _tried(sized.config, target, description, options)
        if found is None:
            continue
        tokens = _limits(found).kv_tokens
        yield Change(flags_of(options), found.outline.weight_bytes, tokens, found.pools.window)


def _tried(
    config: EngineConfig, target: Target, description: Description, options: Mapping[str, Any]
) -> _Sized | None:
    """The sums of a changed configuration; None where it does not work."""
    try:
        changed = config.with_(**options)
        target.check(changed)
        return _size(changed, target, description)
    except ConfigError:
        return None


def _refusal(
    config: EngineConfig, target: Target, description: Description
) -> NotEnoughMemoryError:
    """What does not fit, by how much, and what would."""
    ways = _ways(config, target, description)
    dtype = resolve_dtype(config.dtype, target.device)
    found = outline(description, config, target.device, dtype,
                    Single(0, config.tensor_parallel_size))  # fmt: skip
    per = "" if config.tensor_parallel_size == 1 else (
        f" on each of {config.tensor_parallel_size} devices"
    )  # fmt: skip
    remedy = (
        f"what fits: {', or '.join(map(flags_of, ways))}" if ways
        else "nothing that flags change makes it fit; choose a smaller model or a larger device"
    )  # fmt: skip
    return NotEnoughMemoryError(
        f"{config.model} does not fit on {target.label} ({shown(target.before.total)}): its "
        f"weights take at least {shown(found.weight_bytes)}{per} in {dtype_name(dtype)}"
        f"{_reason(config)}; {remedy}"
    )


def _ways(config: EngineConfig, target: Target, description: Description) -> list[dict[str, Any]]:
    """The choices that make it fit; none that changes more than one of the others needs."""
    ways: list[dict[str, Any]] = []
    if config.max_model_len is not None:
        shorter = _tried(config, target, description, {"max_model_len": None})
        if shorter is not None:
            ways.append({"max_model_len": shorter.pools.window})
    single = list(_alternatives(config, target))
    pairs = [
        {**one, **other}
        for one in single for other in single
        if "tensor_parallel_size" in one and "quantization" in other
    ]  # fmt: skip
    for options in (*single, *pairs):
        if not any(_is_more(options, way) for way in ways) and _tried(
            config, target, description, options
        ):
            ways.append(options)
    return ways


def _is_more(options: Mapping[str, Any], way: Mapping[str, Any]) -> bool:
    """Whether `way` is a part of `options`, or the same with fewer ranks."""
    rest = {name: value for name, value in way.items() if name != "tensor_parallel_size"}
    ranks = way.get("tensor_parallel_size", 1)
    return rest.items() <= options.items() and ranks <= options.get("tensor_parallel_size", 1)


def _reason(config: EngineConfig) -> str:
    if config.max_model_len is None:
        return ", beside a step and one block of KV"
    return f", beside a step and the KV of max_model_len={config.max_model_len} tokens"


def _advised(sized: _Sized, lengths: Sequence[Lengths]) -> dict[str, Any]:
    """Flags that fit the plan: the window that the pool holds, and as many requests as fit."""
    found: dict[str, Any] = {}
    config = sized.config
    if sized.pools.window < sized.outline.window and config.max_model_len is None:
        found["max_model_len"] = sized.pools.window
    if lengths:
        most = max(1, min(lengths[0].on_average, config.max_num_batched_tokens))
        if most != config.max_num_seqs:
            found["max_num_seqs"] = most
    return found


def flags_of(options: Mapping[str, Any]) -> str:
    """Options as they are written on a command line."""
    return " ".join(f"--{name.replace('_', '-')} {value}" for name, value in options.items())


def _command(model: str, options: Mapping[str, Any]) -> str:
    flags = [_flag(name, value) for name, value in options.items() if name != "model"]
    return " ".join(["octavo serve", model, *flags])


def _flag(name: str, value: object) -> str:
    flag = name.replace("_", "-")
    if isinstance(value, bool):
        return f"--{flag}" if value else f"--no-{flag}"
    return f"--{flag} {value}"
