"""Hashes of the answers to a fixed set of requests: tokens and log-probabilities, to the bit.

    python -m benchmarks.answers [--model smollm2] [--modes float32,bfloat16-kv-int8]

Greedy and seeded requests of 5 to 700 tokens run together, with chunked prefill, a prefix cache
and a pool small enough that some are preempted. Two versions of the engine that print the same
hashes give the same answers. Set ONEDNN_MAX_CPU_ISA=AVX2 to restrict the kernels to an older
instruction set. Uses the public interface alone, so that an older checkout can run it. The last
line is JSON.
"""

import argparse
import hashlib
import json
import random
import struct
import sys
from typing import Any

from octavo import LLM, SamplingParams

_INT4 = {"dtype": "bfloat16", "quantization": "int4"}
MODES: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "bfloat16-kv-int8": {"dtype": "bfloat16", "kv_cache_dtype": "int8"},
    "bfloat16-kv-fp8": {"dtype": "bfloat16", "kv_cache_dtype": "fp8"},
    "int8": {"dtype": "bfloat16", "quantization": "int8"},
    "int8-kv-int8": {"dtype": "bfloat16", "quantization": "int8", "kv_cache_dtype": "int8"},
    "int4": _INT4,
    "float32-int8": {"dtype": "float32", "quantization": "int8"},
    "bfloat16-recompute": {"dtype": "bfloat16", "preemption_mode": "recompute"},
    "bfloat16-eager": {"dtype": "bfloat16", "enforce_eager": True},
}
_POOL_BLOCKS = 150  # of 16 tokens: less than all requests need at once
_LENGTHS = (5, 16, 33, 64, 100, 130, 257, 300, 511, 700)


def main() -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n", 1)[0])
    parser.add_argument("--model", default="smollm2", help="embedded name or .gguf file")
    parser.add_argument("--modes", default=",".join(MODES), help="some of: " + ", ".join(MODES))
    args = parser.parse_args()
    found: dict[str, str] = {}
    for mode in args.modes.split(","):
        try:
            found[mode] = answers(args.model, **MODES[mode])
        except Exception as error:  # noqa: BLE001 - a mode that fails is a finding, not the end
            found[mode] = f"{type(error).__name__}: {error}".splitlines()[0]
        print(f"{mode}: {found[mode]}", flush=True)
    print(json.dumps(found))
    return 0


def answers(model: str, **options: Any) -> str:
    """The hash of every token and log-probability of the fixed requests under `options`."""
    llm = LLM(
        model, block_size=16, max_model_len=1024, max_num_seqs=16, max_num_batched_tokens=256,
        num_gpu_blocks_override=_POOL_BLOCKS, swap_space=0.05, load_progress=False, **options,
    )  # fmt: skip
    digest = hashlib.sha256()
    for prompts, params in _rounds():
        outputs = llm.generate(
            [{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False
        )
        for output in outputs:
            for choice in output.outputs:
                _add(digest, choice)
    return digest.hexdigest()[:16]


def _rounds() -> list[tuple[list[list[int]], list[SamplingParams]]]:
    """Two calls: the second repeats prompts of the first, so that it hits the prefix cache."""
    draw = random.Random(7)
    shared = [draw.randrange(300, 49_000) for _ in range(400)]
    prompts = [shared[:length] for length in _LENGTHS[:8]]
    prompts += [[draw.randrange(300, 49_000) for _ in range(length)] for length in _LENGTHS]
    params = [_params(index) for index in range(len(prompts))]
    return [(prompts, params), (prompts[::2], params[::2])]


def _params(index: int) -> SamplingParams:
    tokens = 24 + 8 * (index % 5)
    if index % 3 == 0:
        return SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, logprobs=3)
    if index % 3 == 1:
        return SamplingParams(
            temperature=0.8, top_p=0.9, seed=index, max_tokens=tokens, ignore_eos=True, logprobs=2
        )
    return SamplingParams(
        temperature=1.0, top_k=40, seed=index, max_tokens=tokens, n=2, logprobs=1,
        repetition_penalty=1.1, ignore_eos=True,
    )  # fmt: skip


def _add(digest: Any, choice: Any) -> None:
    digest.update(struct.pack(f"<{len(choice.token_ids)}q", *choice.token_ids))
    for entry in choice.logprobs or ():
        for token_id, found in sorted(entry.items()):
            digest.update(struct.pack("<qd", token_id, found.logprob))


if __name__ == "__main__":
    sys.exit(main())
