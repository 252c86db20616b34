"""transformers' `generate` with static batching: what people write before they use an engine.

Batches of `batch` requests in arrival order, padded on the left to the longest prompt; a batch
runs until its longest output is done, and then its requests are done. The model is made from
the same GGUF file, its weights expanded to bf16.
"""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.protocol import Outcome, serve
from benchmarks.workloads import Job

os.environ.setdefault("HF_HUB_OFFLINE", "1")


class Static:
    """options: model (a .gguf file or a folder), batch, dtype, attention."""

    def __init__(self, options: dict[str, Any]) -> None:
        import torch
        import transformers

        self._torch = torch
        self._batch: int = options.get("batch", 16)
        dtype = getattr(torch, options.get("dtype", "bfloat16"))
        torch.set_num_threads(len(os.sched_getaffinity(0)))
        self._model = load(options["model"], dtype, options.get("attention", "sdpa"))
        self._model.generation_config.eos_token_id = None
        self._model.generation_config.pad_token_id = 0
        self.facts = {
            "build": f"transformers {transformers.__version__} static, batch {self._batch}",
            "torch": torch.__version__,
            "threads": torch.get_num_threads(),
            "dtype": str(dtype).removeprefix("torch."),
            "kv_cache_dtype": str(dtype).removeprefix("torch."),
        }

    def run(self, jobs: list[Job], done: Callable[[int], None]) -> Outcome:
        begin, latency = time.perf_counter(), []
        batches = [jobs[i : i + self._batch] for i in range(0, len(jobs), self._batch)]
        for batch in batches:
            self._generate(batch)
            latency += [time.perf_counter() - begin] * len(batch)
            done(len(latency))
        return Outcome(
            output_tokens=sum(job.max_tokens for job in jobs),
            latency_s=latency,
            **kv_account(batches),
        )

    def forget(self) -> None:
        """Nothing is kept between batches."""

    def _generate(self, batch: list[Job]) -> None:
        torch = self._torch
        longest = max(len(job.prompt) for job in batch)
        steps = max(job.max_tokens for job in batch)
        ids = torch.zeros((len(batch), longest), dtype=torch.long)
        mask = torch.zeros_like(ids)
        for i, job in enumerate(batch):
            ids[i, longest - len(job.prompt) :] = torch.tensor(job.prompt)
            mask[i, longest - len(job.prompt) :] = 1
        with torch.inference_mode():
            out = self._model.generate(
                ids,
                attention_mask=mask,
                max_new_tokens=steps,
                min_new_tokens=steps,
                do_sample=False,
                use_cache=True,
            )
        if out.shape[1] != longest + steps:
            raise RuntimeError(f"{out.shape[1] - longest} steps came, {steps} were asked for")


def load(model: str, dtype: Any, attention: str) -> Any:
    """A transformers model from a folder or from a .gguf file (expanded to `dtype`)."""
    import transformers

    path = Path(model)
    options: dict[str, Any] = {"dtype": dtype, "attn_implementation": attention}
    if path.suffix == ".gguf":
        path, file = path.parent, path.name
        options["gguf_file"] = file
        if hasattr(transformers, "GgufConfig"):
            options["quantization_config"] = transformers.GgufConfig(dequantize=True)
    loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(path, **options)
    return loaded.eval()


def kv_account(batches: list[list[Job]]) -> dict[str, Any]:
    """KV slots that static batching holds and uses, per step, by counting.

    A batch holds (rows x length so far) slots, padding included; of use are those of a row's
    own tokens while the row still needs them. In flight: rows whose answer is not complete.
    """
    held = written = steps = rows = 0
    most = 0
    for batch in batches:
        longest = max(len(job.prompt) for job in batch)
        for step in range(max(job.max_tokens for job in batch)):
            open_rows = [job for job in batch if step < job.max_tokens]
            now = len(batch) * (longest + step)
            held, most, steps = held + now, max(most, now), steps + 1
            written += sum(len(job.prompt) + step for job in open_rows)
            rows += len(open_rows)
    use = written / held
    kv = {"use": use, "fragmentation": 1 - use, "most_held_slots": most}
    return {"kv": kv, "in_flight": rows / steps}


if __name__ == "__main__":
    serve(Static)
