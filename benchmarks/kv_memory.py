"""KV memory per token of a model with sliding windows, with and without KV groups.

    python -m benchmarks.kv_memory [--save]

The shape is Gemma 3 270M's: 18 layers, of which 15 see 512 tokens, one KV head of 256, bfloat16.
No weights are needed: one request of each length goes through the KV manager in chunks of a
default step, and the blocks that it holds are counted, at the end and at most, in the layout that
the CPU backend asks for. Without groups every layer caches all keys. With --save the result becomes
a row in benchmarks/results/kv_memory.jsonl. The last line is JSON.
"""

import argparse
import json
from collections.abc import Sequence
from typing import Any

import torch

from benchmarks.rows import row, save, table
from octavo.attention.base import AttentionSpec
from octavo.attention.cpu import CpuAttention
from octavo.config import EngineConfig
from octavo.core.kv_manager import KVManager
from octavo.core.request import Request
from octavo.core.submission import Submission
from octavo.params import SamplingParams
from octavo.runner.kv_cache import KVLayout, kv_layout

_LENGTHS = (512, 1024, 4096, 16384, 32768)
_BLOCK = 16
_CHUNK = EngineConfig().max_num_batched_tokens


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--save", action="store_true", help="append the row to the results")
    args = parser.parse_args()
    found = measure(_LENGTHS)
    print(table(tuple(found[0]), [tuple(line.values()) for line in found]))
    result = row("kv_memory", model="gemma-3-270m shape", lengths=found)
    if args.save:
        save(result)
    print(json.dumps(result))
    return 0


def measure(lengths: Sequence[int]) -> list[dict[str, Any]]:
    """Of each length, bytes per token: without groups, with them, and at most on the way."""
    windows = [None if layer % 6 == 5 else 512 for layer in range(18)]
    full, grouped = _layout([None] * 18), _layout(windows)
    lines = []
    for length in lengths:
        (whole, _), (held, most) = _held(full, length), _held(grouped, length)
        lines.append(
            {
                "tokens": length,
                "full": round(whole / length),
                "groups": round(held / length),
                "groups_at_most": round(most / length),
            }
        )
    return lines


def _layout(windows: Sequence[int | None]) -> KVLayout:
    specs = [AttentionSpec(4, 1, 256, 256**-0.5, window) for window in windows]
    return kv_layout(CpuAttention(), specs, _BLOCK, torch.bfloat16)


def _held(layout: KVLayout, length: int) -> tuple[int, int]:
    """Bytes that a request of `length` tokens holds when all are computed, and at most before."""
    num_blocks = len(layout.groups) * (length // _BLOCK + 1) + 1
    kv = KVManager(num_blocks, _BLOCK, True, 0, layout.groups, _CHUNK)
    submission = Submission("r", (0,) * length, SamplingParams(max_tokens=1))
    request = Request(submission, seed=0, max_tokens=1)
    kv.match(request)
    while request.lag:
        chunk = min(request.lag, _CHUNK)
        if not kv.grow(request, chunk):
            raise AssertionError("the pool holds the request in all groups")
        request.num_computed += chunk
        kv.publish(request, request.num_computed)
    held, most = kv.pool.num_used, kv.pool.peak_used
    return held * layout.block_bytes, most * layout.block_bytes


if __name__ == "__main__":
    raise SystemExit(main())
