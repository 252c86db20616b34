"""The kernels against their references, on the device itself."""

from collections.abc import Callable, Iterator
from itertools import islice

import numpy as np
import torch
from tests.paging import Sequences

from benchmarks.gpu.section import Rows, Scale, distance
from octavo.attention.base import AttentionSpec
from octavo.attention.triton import TritonAttention
from octavo.config import EngineConfig
from octavo.kernels import reference
from octavo.kernels.codes import Codes
from octavo.kernels.gpu import experts_call
from octavo.kernels.gpu.experts_call import GroupedExperts
from octavo.kernels.gpu.linear import GpuProducts, as_codes
from octavo.kernels.sampling import ITEM, ReferenceSampling
from octavo.runner.device import Device, create_device

# Of the root mean square: products and sums in float32, results rounded to the type.
LIMITS = {torch.float32: 2e-6, torch.bfloat16: 5e-3, torch.float16: 7e-4}
# A group of a checkpoint's codes; rows that take each tile.
_GROUP, _ROWS = 128, (1, 16, 17, 64, 65, 300)

Case = tuple[str, torch.dtype, Callable[[], tuple[torch.Tensor, torch.Tensor]]]


def run(scale: Scale, rows: Rows, part: int, parts: int) -> bool:
    """Whether every kernel gives what its reference gives; of the cases, every `parts`-th."""
    device = create_device(EngineConfig(device=scale.device))
    with torch.device(scale.torch_device):
        cases = islice(_cases(scale, device), part, None, parts)
        good = [_is_right(rows, *case) for case in cases if not scale.is_late]
    if part == 0:
        good.append(_sampling(scale, rows, device))
    return all(good) and not scale.is_late


def _is_right(
    rows: Rows,
    name: str,
    dtype: torch.dtype,
    computed: Callable[[], tuple[torch.Tensor, torch.Tensor]],
) -> bool:
    """Adds the row of a case."""
    at = {"case": name, "dtype": _short(dtype)}
    try:
        error = distance(*computed())
    except Exception as problem:  # noqa: BLE001 (the other kernels are of interest, too)
        rows.add(**at, ok=False, raised=repr(problem)[:500])
        return False
    rows.add(**at, error=error, limit=LIMITS[dtype], ok=error <= LIMITS[dtype])
    return error <= LIMITS[dtype]


def _cases(scale: Scale, device: Device) -> Iterator[Case]:
    halves = (torch.float16,) if scale.dry else (torch.bfloat16, torch.float16)
    for dtype in (*halves, torch.float32):
        yield from _attention(scale, dtype)
        yield from _products(scale, device, dtype)
        yield from _experts(scale, dtype)
        yield from _ops(scale, device, dtype)


def _attention(scale: Scale, dtype: torch.dtype) -> Iterator[Case]:
    specs = {
        "8B": AttentionSpec(32, 8, 128, 128**-0.5),
        "13B": AttentionSpec(40, 40, 128, 128**-0.5),
        "1B": AttentionSpec(32, 8, 64, 0.125),
        "window": AttentionSpec(4, 1, 256, 0.0625, window=300),
        "soft cap": AttentionSpec(8, 4, 256, 0.0625, window=400, soft_cap=50.0),
        "sinks": AttentionSpec(64, 8, 64, 0.125, window=128, sinks=True),
    }
    lengths, queries = [1, 15, 257, 700, 1025, 130], [1, 15, 1, 1, 3, 130]
    if scale.dry:
        specs = {"toy": AttentionSpec(4, 2, 16, 0.25, window=20)}
        lengths, queries = [5, 40], [1, 40]
    for name, spec in specs.items():
        for kv in (None, torch.int8, torch.float8_e4m3fn):
            stored = "" if kv is None else f", KV {_short(kv)}"

            def computed(
                spec: AttentionSpec = spec, kv: torch.dtype | None = kv
            ) -> tuple[torch.Tensor, torch.Tensor]:
                at = Sequences(TritonAttention(), spec, lengths, 16, dtype, kv_dtype=kv)
                got = torch.cat(at.attend(queries))
                expected = [at.expected(i)[-count:] for i, count in enumerate(queries)]
                return got, torch.cat(expected)

            yield f"attention {name}{stored}", dtype, computed
    spec = next(iter(specs.values()))

    def alone() -> tuple[torch.Tensor, torch.Tensor]:
        """Bits: a distance of 0 from what the row is in company."""
        at = Sequences(TritonAttention(), spec, lengths, 16, dtype)
        together = at.attend(queries)
        only = at.attend([0] * (len(queries) - 1) + [queries[-1]])
        same = torch.equal(together[-1], only[-1])
        return only[-1] if same else only[-1] * torch.nan, together[-1]

    yield "attention: a row alone has the bits that it has in company", dtype, alone


def _codes(n: int, k: int, method: str) -> Codes:
    torch.manual_seed(n)
    if method == "fp8":
        return as_codes(torch.randn(n, k), method)
    step = torch.rand(n, k // _GROUP) * 0.02 + 0.002
    if method == "fp8 in blocks":
        codes = torch.randn(n, k).mul_(40).to(torch.float8_e4m3fn)
        return Codes(codes, step, torch.zeros_like(step), _GROUP, 8)
    bits = int(method.removeprefix("int"))
    codes, step = torch.randint(0, 2**bits, (n, k), dtype=torch.uint8), step * 16 / 2**bits
    return Codes(codes, step, -step * 2 ** (bits - 1), _GROUP, bits)


def _experts(scale: Scale, dtype: torch.dtype) -> Iterator[Case]:
    """A layer of Qwen3-30B-A3B's shape."""
    count, choices, hidden, inner = (5, 2, 48, 32) if scale.dry else (128, 8, 2048, 768)
    torch.manual_seed(0)
    gate_up = (torch.randn(count, 2 * inner, hidden) / hidden**0.5).to(dtype)
    down = (torch.randn(count, hidden, inner) / inner**0.5).to(dtype)
    grouped = GroupedExperts(gate_up.flatten(0, 1), down.flatten(0, 1), count, "silu")
    for rows in (1, 7) if scale.dry else (1, 64, 700):

        def computed(rows: int = rows) -> tuple[torch.Tensor, torch.Tensor]:
            x, logits = torch.randn(rows, hidden).to(dtype), torch.randn(rows, count)
            chosen, weights = experts_call.route(logits, choices, True)
            got = grouped(x, chosen, weights)
            expected = [
                reference.experts(x[i : i + 4], chosen[i : i + 4], weights[i : i + 4], gate_up,
                                  down, "silu")
                for i in range(0, rows, 4)
            ]  # fmt: skip
            return got, torch.cat(expected)

        yield f"{count} experts, {rows} rows", dtype, computed


def _products(scale: Scale, device: Device, dtype: torch.dtype) -> Iterator[Case]:
    n, k = (48, 256) if scale.dry else (4096, 4096)
    made = device.products(dtype, max(_ROWS), False)
    for method in ("int4", "int8", "fp8", "fp8 in blocks"):
        coded = _codes(n, k, method)
        product = made.make(coded, method=method.split()[0])
        weight = coded.values()
        if not coded.are_floats:
            weight = weight.to(dtype).float()
        for rows in _ROWS[:2] if scale.dry else _ROWS:

            def computed(
                rows: int = rows,
                product: Callable[[torch.Tensor], torch.Tensor] = product,
                weight: torch.Tensor = weight,
            ) -> tuple[torch.Tensor, torch.Tensor]:
                x = torch.randn(rows, k).to(dtype)
                return product(x), (x.double() @ weight.double().T).float()

            yield f"{method} product of {rows} rows", dtype, computed
    weight = torch.randn(n, k).to(dtype)
    fixed = GpuProducts(dtype, deterministic=True).make(weight)

    def invariant() -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.randn(40, k).to(dtype)
        together = fixed(x)
        same = all(torch.equal(fixed(x[i : i + 1])[0], together[i]) for i in (0, 17, 39))
        return together if same else together * torch.nan, x.double() @ weight.double().T

    yield "deterministic product, the same bits in any batch", dtype, invariant


def _ops(scale: Scale, device: Device, dtype: torch.dtype) -> Iterator[Case]:
    ops = device.ops(dtype)
    rows, size = (3, 64) if scale.dry else (37, 4096)

    def norm() -> tuple[torch.Tensor, torch.Tensor]:
        x, residual, weight = (torch.randn(rows, size).to(dtype) for _ in range(3))
        wide = residual.clone()
        got = ops.rms_norm(x, weight[0], 1e-5, residual, False)[0]
        return got, reference.rms_norm(x, weight[0], 1e-5, wide, False)[0]

    yield "norm with residual", dtype, norm
    for name in ("silu_and_mul", "gelu_and_mul"):

        def gated(name: str = name) -> tuple[torch.Tensor, torch.Tensor]:
            x = torch.randn(rows, 2 * size).to(dtype)
            return getattr(ops, name)(x), getattr(reference, name)(x)

        yield name, dtype, gated

    def rope() -> tuple[torch.Tensor, torch.Tensor]:
        q, k = torch.randn(rows, 8, 64).to(dtype), torch.randn(rows, 2, 64).to(dtype)
        angles = torch.rand(100, 32) * 6
        table = torch.cat((angles.cos(), angles.sin()), 1)
        positions = torch.arange(rows) + 5
        expected_q, expected_k = q.clone(), k.clone()
        reference.rope(expected_q, expected_k, table, positions)
        ops.rope(q, k, table, positions)
        return torch.cat((q, k), 1), torch.cat((expected_q, expected_k), 1)

    yield "rotary embedding", dtype, rope


def _sampling(scale: Scale, rows: Rows, device: Device) -> bool:
    """The device's draws against the reference's, from the same logits."""
    vocab, count = (300, 6) if scale.dry else (128256, 64)
    torch.manual_seed(1)
    logits = torch.randn(count, vocab, device=scale.torch_device) * 3
    items = np.zeros(count, ITEM)
    items["row"], items["seed"] = np.arange(count), 7 + np.arange(count)
    items["temperature"] = np.arange(count) % 3 * 0.5
    items["top_p"] = 1.0 - np.arange(count) % 2 * 0.1
    items["top_k"] = np.where(np.arange(count) % 5 == 4, 20, 0)
    items["min_p"] = np.where(np.arange(count) % 7 == 6, 0.02, 0)
    expected = items.copy()
    device.draw(logits, items)
    ReferenceSampling().draw(logits, expected)
    same = int((items["token"] == expected["token"]).sum())
    rows.add(case="draws", dtype="float32", equal=same, of=count, ok=same == count)
    return same == count


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
