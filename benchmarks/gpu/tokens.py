"""The engine on the device against the engine on the CPU: the same greedy and drawn tokens.

In float32, with the same weights, in every mode in which steps are computed. In half precision
random weights draw other tokens sooner or later, so there the share of equal ones is only shown.
"""

from pathlib import Path
from typing import Any

from benchmarks.gpu.models import size, start, write
from benchmarks.gpu.section import Rows, Scale, compilations
from octavo.core.policy_registry import create_policy
from octavo.core.submission import Submission
from octavo.engine.engine import Engine
from octavo.params import SamplingParams

_LENGTHS, _TOKENS = (14, 31, 100, 257, 300, 40), 24
_DRY_LENGTHS, _DRY_TOKENS = (14, 31), 4
_SMALL_POOL = {"num_gpu_blocks_override": 24, "max_model_len": 340}
_MODES: dict[str, dict[str, Any]] = {
    "captured": {},
    "eager": {"enforce_eager": True},
    "chunked": {"max_num_batched_tokens": 64},
    "swapped": {**_SMALL_POOL, "preemption_mode": "swap"},
    "recomputed": {**_SMALL_POOL, "preemption_mode": "recompute"},
    "int8 KV": {"kv_cache_dtype": "int8"},
}
_LARGE = ("captured", "eager", "swapped")  # modes of the larger model


def run(scale: Scale, rows: Rows, folder: Path) -> bool:
    """Whether all float32 tokens are the CPU's."""
    good = True
    for name in ("toy", "1B of 4 layers")[: 1 if scale.dry else 2]:
        model = write(folder / name.replace(" ", "-"), size(scale, name))
        expected: dict[str, list[tuple[int, ...]]] = {}
        for mode, options in _modes(scale).items():
            if scale.is_late:
                return False
            if name != "toy" and mode not in _LARGE:
                continue
            kind = options.get("kv_cache_dtype", "auto")
            if kind not in expected:
                expected[kind] = _answers(scale, model, "cpu", {"kv_cache_dtype": kind}, [])
            compiled: list[str] = []
            found = _answers(scale, model, scale.device, options, compiled)
            equal = sum(a == b for a, b in zip(found, expected[kind], strict=True))
            ok = equal == len(found) and not compiled
            good = good and ok
            rows.add(model=name, mode=mode, dtype="float32", equal=equal, of=len(found), ok=ok,
                     compiled_after_ready=compiled)  # fmt: skip
    return good


def _modes(scale: Scale) -> dict[str, dict[str, Any]]:
    if not scale.dry:
        return _MODES
    small = {"num_gpu_blocks_override": 5, "max_model_len": 48}
    return {"captured": {}, "swapped": {**small, "preemption_mode": "swap"}}


def _answers(
    scale: Scale, model: Path, device: str, options: dict[str, Any], compiled: list[str]
) -> list[tuple[int, ...]]:
    """The tokens of each prompt, half of them greedy; compiled: what was, after the start."""
    lengths, count = (_DRY_LENGTHS, _DRY_TOKENS) if scale.dry else (_LENGTHS, _TOKENS)
    fixed = {"dtype": "float32", "max_model_len": 512, "num_gpu_blocks_override": 200,
             "swap_space": 0.5, "max_num_seqs": 8, "cuda_graph_sizes": "1,2,4,8"}  # fmt: skip
    if scale.dry:
        fixed |= {"max_model_len": 64, "num_gpu_blocks_override": 12, "cuda_graph_sizes": "2"}
    if device == "cpu":
        fixed["cuda_graph_sizes"] = None
    runner = start(model, scale, same_everywhere=True, **(fixed | options | {"device": device}))
    vocab = runner.limits.vocab_size
    engine = Engine(runner.config, runner, create_policy("fifo"))
    answers: dict[str, list[int]] = {}
    for n, length in enumerate(lengths):
        params = SamplingParams(temperature=n % 2 * 0.8, seed=n, max_tokens=count, ignore_eos=True)
        ids = tuple((37 * i + 11 * n) % vocab for i in range(length))
        engine.add_request(Submission(str(n), ids, params))
        answers[str(n)] = []
    with compilations() as names:
        while engine.has_work():
            for update in engine.step():
                answers[update.request_id].extend(update.token_ids)
    compiled += names
    engine.close()
    return [tuple(tokens) for tokens in answers.values()]
