"""Octavo through its offline face, `LLM.generate`, with the use of the KV cache sampled."""

import time
from collections.abc import Callable
from typing import Any

from benchmarks.protocol import Outcome, serve
from benchmarks.workloads import Job
from octavo import LLM, SamplingParams
from octavo.version import __version__


class KVProbe:
    """Samples the KV cache after engine steps, at most every `period` seconds."""

    def __init__(self, llm: LLM, period: float = 0.05) -> None:
        self._engine, self._step, self._period = llm.engine, llm.engine.step, period
        self._engine.step = self._probed  # type: ignore[method-assign]
        self.clear(lambda count: None)

    def clear(self, done: Callable[[int], None]) -> None:
        """Begin a run; `done` is told at each sample how many of its requests are complete."""
        self._done, self._before = done, self._finished()
        self._next = 0.0
        self._samples: list[tuple[int, int, int]] = []

    def summary(self) -> dict[str, float]:
        """Written and held slots over all samples, and their ratio through the run."""
        held = sum(sample[1] for sample in self._samples)
        written = sum(sample[0] for sample in self._samples)
        most = max((sample[1] for sample in self._samples), default=0)
        use = written / held if held else 0.0
        return {"use": use, "fragmentation": 1 - use, "most_held_slots": most}

    def in_flight(self) -> float:
        counts = [sample[2] for sample in self._samples]
        return sum(counts) / len(counts) if counts else 0.0

    def _probed(self) -> Any:
        updates = self._step()
        now = time.perf_counter()
        if now >= self._next:
            self._next = now + self._period
            usage, running = self._engine.scheduler.kv.usage(), self._engine.scheduler.num_running
            if running:
                self._samples.append((usage.written_slots, usage.held_slots, running))
            self._done(self._finished() - self._before)
        return updates

    def _finished(self) -> int:
        return sum(self._engine.recorder.finished.values())


class Octavo:
    """One LLM; requests come in as token ids, answers are not turned into text."""

    def __init__(self, options: dict[str, Any]) -> None:
        import torch

        self._llm = LLM(**{"max_num_seqs": 64, "max_model_len": 4096, **options})
        self._probe = KVProbe(self._llm)
        limits = self._llm.engine.limits
        self.facts = {
            "build": f"octavo {__version__}",
            "torch": torch.__version__,
            "threads": torch.get_num_threads(),
            "dtype": limits.dtype,
            "kv_cache_dtype": limits.kv_cache_dtype,
            "block_size": limits.block_size,
            "kv_pool_mb": round(limits.num_blocks * limits.block_bytes / 2**20),
        }

    def run(self, jobs: list[Job], done: Callable[[int], None]) -> Outcome:
        self._probe.clear(done)
        begin = time.time()  # as the times of outputs
        outputs = self._llm.generate(
            [{"prompt_token_ids": job.prompt} for job in jobs],
            [
                SamplingParams(
                    temperature=0.0, max_tokens=job.max_tokens, ignore_eos=True, detokenize=False
                )
                for job in jobs
            ],
            use_tqdm=False,
        )
        ends = [out.metrics.finished_time if out.metrics else None for out in outputs]
        return Outcome(
            output_tokens=sum(len(out.outputs[0].token_ids) for out in outputs),
            latency_s=[end - begin for end in ends if end is not None],
            in_flight=self._probe.in_flight(),
            kv=self._probe.summary(),
        )

    def forget(self) -> None:
        self._llm.reset_prefix_cache()


if __name__ == "__main__":
    serve(Octavo)
