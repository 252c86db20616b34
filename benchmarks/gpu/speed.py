"""Decode and prefill of Llama shapes against what the card can do, as measured on it.

The limit of a decode step is the time to read the weights and the KV once at the rate of a large
copy; that of a prefill, the time of its products at the rate of a large bfloat16 product.
"""

from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.models import (
    decode_step,
    most_rows,
    prefill_step,
    size,
    start,
    step_ms,
    write,
)
from benchmarks.gpu.section import Rows, Scale, compilations, median_ms
from benchmarks.llama_shapes import Shape
from octavo.runner.model_runner import ModelRunner

_BATCHES, _CONTEXT, _PROMPT = (1, 16, 64, 256), 1024, 8192


def run(scale: Scale, rows: Rows, folder: Path) -> bool:
    """Whether all shapes were measured, and nothing was compiled meanwhile."""
    bandwidth, rate = _card(scale, rows)
    for name in ("8B", "1B", "13B")[: 1 if scale.dry else 3]:
        if scale.is_late:
            return False
        shape = size(scale, name)
        prompt = 40 if scale.dry else _PROMPT
        small: dict[str, Any] = {"num_gpu_blocks_override": 12, "cuda_graph_sizes": "2"}
        options = small if scale.dry else {"cuda_graph_sizes": "1,16,64,256"}
        runner = start(
            write(folder / name, shape), scale, max_model_len=2 * prompt,
            max_num_batched_tokens=prompt, max_num_seqs=256, swap_space=0, **options,
        )  # fmt: skip
        with compilations() as compiled:
            _decode(scale, rows, name, shape, runner, bandwidth)
            _prefill(scale, rows, name, shape, runner, rate, prompt)
        rows.add(model=name, compiled_after_ready=compiled, ok=not compiled)
        runner.close()
    return True


def _card(scale: Scale, rows: Rows) -> tuple[float, float]:
    """(bytes a second of a copy, read and written; operations a second of a product)"""
    count, side = (2**16, 64) if scale.dry else (2**31, 8192)
    source = torch.empty(count, dtype=torch.uint8, device=scale.torch_device)
    target = torch.empty_like(source)
    target.copy_(source)
    copy = median_ms(scale, lambda: target.copy_(source), 20)
    kind = torch.float32 if scale.dry else torch.bfloat16
    a = torch.randn(side, side, dtype=kind, device=scale.torch_device)
    a @ a
    product = median_ms(scale, lambda: a @ a, 20)
    bandwidth, rate = 2 * count / copy * 1000, 2 * side**3 / product * 1000
    name = "interpreter" if scale.dry else torch.cuda.get_device_name()
    rows.add(device=name, torch=torch.__version__, copy_bytes_per_s=bandwidth,
             bf16_operations_per_s=rate)  # fmt: skip
    return bandwidth, rate


def _decode(
    scale: Scale, rows: Rows, name: str, shape: Shape, runner: ModelRunner, bandwidth: float
) -> None:
    batches, context = ((1, 2), 20) if scale.dry else (_BATCHES, _CONTEXT)
    for batch in batches:
        batch = min(batch, most_rows(runner, context))
        plan = decode_step(runner, batch, context)
        ms = step_ms(scale, runner, plan, 20)
        read = 2 * shape.parameters_read + batch * context * shape.kv_bytes()
        limit = 1000 * read / bandwidth
        rows.add(model=name, decode=batch, context=context, ms=ms, tokens_per_s=1000 * batch / ms,
                 limit_ms=limit, share_of_limit=limit / ms)  # fmt: skip


def _prefill(
    scale: Scale, rows: Rows, name: str, shape: Shape, runner: ModelRunner, rate: float, tokens: int
) -> None:
    plan = prefill_step(runner, 1, tokens)
    ms = step_ms(scale, runner, plan, 5)
    head = shape.vocab * shape.hidden  # of one token only
    products = 2 * (shape.parameters_read - head) * tokens + 2 * head
    attention = 2 * shape.layers * shape.heads * shape.head_dim * tokens * tokens  # causal
    limit = 1000 * (products + attention) / rate
    rows.add(model=name, prefill=tokens, ms=ms, tokens_per_s=1000 * tokens / ms, limit_ms=limit,
             share_of_limit=limit / ms)  # fmt: skip
