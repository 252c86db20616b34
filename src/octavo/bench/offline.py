"""`octavo bench latency` and `throughput`: the engine in this process, without a server.

The engine is given: anything with `LLM.generate`.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from octavo.bench.arrivals import generator
from octavo.bench.datasets import Sample
from octavo.errors import ConfigError, OctavoError
from octavo.outputs import RequestOutput
from octavo.params import SamplingParams

PERCENTAGES = (10, 25, 50, 75, 90, 99)


class Generator(Protocol):
    """What is needed of an `LLM`."""

    def generate(
        self,
        prompts: Any,
        sampling_params: Any = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]: ...


@dataclass(frozen=True)
class Batch:
    """A batch of equal shape, again and again. Raises ConfigError."""

    input_len: int = 32
    output_len: int = 128
    batch_size: int = 8
    n: int = 1
    num_iters_warmup: int = 10
    num_iters: int = 30

    def __post_init__(self) -> None:
        for name in ("input_len", "output_len", "batch_size", "n", "num_iters"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.num_iters_warmup < 0:
            raise ConfigError(f"num_iters_warmup must be at least 0, not {self.num_iters_warmup}")


def latency(
    llm: Generator,
    vocab_size: int,
    batch: Batch,
    seed: int = 0,
    detokenize: bool = True,
    clock: Callable[[], float] = time.perf_counter,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, Any]:
    """Seconds per batch: vLLM's keys `avg_latency`, `latencies`, `percentiles`."""
    rng = generator(seed)
    params = SamplingParams(
        n=batch.n,
        temperature=1.0,
        ignore_eos=True,
        max_tokens=batch.output_len,
        detokenize=detokenize,
    )
    total = batch.num_iters_warmup + batch.num_iters
    seconds = []
    for done in range(total):
        # New ids each time, so that no prefix cache shortens the work.
        ids = rng.integers(0, vocab_size, (batch.batch_size, batch.input_len)).tolist()
        prompts = [{"prompt_token_ids": row} for row in ids]
        begun = clock()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        seconds.append(clock() - begun)
        _check(outputs, [batch.output_len] * batch.batch_size)
        progress(done + 1, total)
    counted = seconds[batch.num_iters_warmup :]
    return {
        "avg_latency": float(np.mean(counted)),
        "latencies": counted,
        "percentiles": {str(p): float(np.percentile(counted, p)) for p in PERCENTAGES},
    }


def latency_text(figures: Mapping[str, Any]) -> str:
    lines = [f"Avg latency: {figures['avg_latency']} seconds"]
    lines += [f"{p}% percentile latency: {s} seconds" for p, s in figures["percentiles"].items()]
    return "\n".join(lines)


def throughput(
    llm: Generator,
    samples: Sequence[Sample],
    n: int = 1,
    detokenize: bool = True,
    clock: Callable[[], float] = time.perf_counter,
    progress: bool = True,
) -> dict[str, Any]:
    """All samples at once: vLLM's keys, and output tokens on their own."""
    params = [
        SamplingParams(
            n=n,
            temperature=1.0,
            ignore_eos=True,
            max_tokens=sample.output_len,
            detokenize=detokenize,
        )
        for sample in samples
    ]
    begun = clock()
    outputs = llm.generate([sample.prompt for sample in samples], params, use_tqdm=progress)
    elapsed = clock() - begun
    _check(outputs, [sample.output_len for sample in samples])
    tokens_in = sum(len(output.prompt_token_ids or ()) for output in outputs)
    tokens_out = sum(len(choice.token_ids) for output in outputs for choice in output.outputs)
    return {
        "elapsed_time": elapsed,
        "num_requests": len(samples),
        "total_num_tokens": tokens_in + tokens_out,
        "requests_per_second": len(samples) / elapsed,
        "tokens_per_second": (tokens_in + tokens_out) / elapsed,
        "total_prompt_tokens": tokens_in,
        "total_output_tokens": tokens_out,
        "output_tokens_per_second": tokens_out / elapsed,
    }


def throughput_text(figures: Mapping[str, Any]) -> str:
    return (
        f"Throughput: {figures['requests_per_second']:.2f} requests/s, "
        f"{figures['tokens_per_second']:.2f} total tokens/s, "
        f"{figures['output_tokens_per_second']:.2f} output tokens/s\n"
        f"Total num prompt tokens:  {figures['total_prompt_tokens']}\n"
        f"Total num output tokens:  {figures['total_output_tokens']}"
    )


def _check(outputs: Sequence[RequestOutput], wanted: Sequence[int]) -> None:
    """A rate of answers that are not whole is no rate. Raises OctavoError."""
    for output, count in zip(outputs, wanted, strict=True):
        if output.error:
            raise OctavoError(f"request {output.request_id} failed: {output.error}")
        for choice in output.outputs:
            if len(choice.token_ids) != count:
                raise OctavoError(
                    f"request {output.request_id}: {len(choice.token_ids)} tokens came, "
                    f"{count} were asked for"
                )
