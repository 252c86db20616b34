"""A plan as text. "~" stands before what an engine would measure and a plan estimates."""

from collections import Counter
from collections.abc import Iterator, Mapping

from octavo.planner.plan import Plan
from octavo.quant.base import STORED
from octavo.runner.memory import shown


def table(plan: Plan) -> str:
    """The whole plan, for a terminal."""
    return "\n".join([*_head(plan), "", *_weights(plan), "", *_kv(plan), "", *_fits(plan)])


def _head(plan: Plan) -> Iterator[str]:
    kind = {"none": plan.dtype, STORED: f"weights as stored, {plan.dtype}"}.get(
        plan.quantization, f"{plan.quantization} and {plan.dtype}"
    )
    yield f"{plan.model}: {plan.architecture}, {_short(plan.parameters)} parameters, {kind}"
    ranks = "" if plan.ranks == 1 else f", on each of {plan.ranks}"
    yield f"on {plan.device}{ranks}"


def _weights(plan: Plan) -> Iterator[str]:
    yield f"weights{_rank(plan)}"
    yield from _rows(plan.weights)
    yield _row("in all, at least", f"{shown(plan.weight_bytes)}  ({plan.weight_bytes:,} bytes)")


def _kv(plan: Plan) -> Iterator[str]:
    yield f"KV cache{_rank(plan)}, {plan.kv_cache_dtype}, blocks of {plan.block_size} tokens"
    for group, count in Counter(plan.groups).items():
        what = "all tokens" if group.window is None else f"the last {group.window:,} tokens"
        layers = "1 layer" if group.layers == 1 else f"{group.layers} layers"
        times = "" if count == 1 else f"{count} x "
        yield _row(f"{times}{layers}, {what}", f"{group.bytes_per_token:,} bytes a token")
    each = [group.bytes_per_token for group in plan.groups]
    if len(each) > 1:
        kept = [group.bytes_per_token for group in plan.groups if group.window is None]
        yield _row("in all", f"{sum(each):,} bytes a token, behind the windows {sum(kept):,}")
    yield _row("a block", f"{plan.block_bytes:,} bytes")


def _fits(plan: Plan) -> Iterator[str]:
    yield from _memory(plan)
    yield ""
    exact = "" if plan.is_exact else "  (depends on the estimates)"
    yield f"what fits{exact}"
    yield _row("KV", f"{plan.num_blocks:,} blocks, {shown(plan.kv_bytes)}  "
                     f"({plan.kv_bytes:,} bytes)")  # fmt: skip
    yield _row("tokens", f"{plan.kv_tokens:,}")
    less = "" if plan.max_model_len == plan.window else f" (the model has {plan.window:,})"
    yield _row("longest request", f"{plan.max_model_len:,} tokens{less}")
    if plan.num_host_blocks:
        yield _row("swapped, at most", f"{plan.num_host_blocks:,} blocks")
    if plan.lengths:
        yield ""
        yield f"{'requests at once':<28}{'all at their end':>16}{'spread over their lives':>26}"
        for one in plan.lengths:
            name = f"{one.prompt:,} + {one.output:,} tokens"
            yield f"  {name:<26}{one.at_their_end:>16,}{one.on_average:>26,}"
    if plan.changes:
        yield ""
        yield f"{'with':<34}{'weights':>12}{'KV tokens':>14}{'longest request':>18}"
        for change in plan.changes:
            yield (
                f"  {change.flags:<32}{shown(change.weight_bytes):>12}{change.kv_tokens:>14,}"
                f"{change.max_model_len:>18,}"
            )
    yield ""
    yield f"start it with: {plan.command}"
    if not plan.has_weights:
        yield "(planned from sizes alone; an engine needs the model's files)"


def _memory(plan: Plan) -> Iterator[str]:
    memory = plan.memory
    if not memory:
        yield "memory: the size of the KV cache is given"
        return
    yield f"memory{_rank(plan)}"
    yield _row("there is", shown(memory["total"]))
    yield _row("may be used", shown(memory["limit"]))
    yield _row("in use after the load", f"~{shown(memory['used'])}")
    yield from ((f"  {line}") for line in _rows(plan.loaded, "~"))
    yield _row("a full step", f"~{shown(plan.step)}")
    if plan.captured:
        yield _row("captured steps", f"~{shown(plan.captured)}")


def _rank(plan: Plan) -> str:
    return "" if plan.ranks == 1 else " of each rank"


def _rows(sizes: Mapping[str, int], sign: str = "") -> Iterator[str]:
    for name, size in sizes.items():
        yield _row(name, sign + shown(size))


def _row(name: str, value: str) -> str:
    return f"  {name:<38}{value}"


def _short(count: int) -> str:
    for size, unit in ((10**9, "billion"), (10**6, "million")):
        if count >= size:
            return f"{count / size:.2f} {unit}"
    return f"{count:,}"
