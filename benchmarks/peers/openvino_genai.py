"""OpenVINO GenAI's continuous batching, on a model exported to its own form."""

import os
from collections.abc import Callable
from typing import Any

from benchmarks.protocol import Outcome, serve
from benchmarks.workloads import Job


class OpenVino:
    """options: model (the exported folder); hint: the type to compute in; kv: the cache's;
    kv_gib: its size."""

    def __init__(self, options: dict[str, Any]) -> None:
        import numpy as np
        import openvino  # type: ignore[import-not-found, unused-ignore]
        import openvino_genai  # type: ignore[import-not-found, unused-ignore]

        self._np, self._ov, self._genai = np, openvino, openvino_genai
        self._model, self._kv_gib = options["model"], options.get("kv_gib", 4)
        self._properties = {"INFERENCE_PRECISION_HINT": options.get("hint", "bf16")}
        if "kv" in options:
            self._properties["KV_CACHE_PRECISION"] = options["kv"]
        self._pipe = self._pipeline(prefix_caching=False)
        self.facts = {
            "build": f"openvino-genai {openvino_genai.__version__}",
            "threads": len(os.sched_getaffinity(0)),
            "dtype": self._properties["INFERENCE_PRECISION_HINT"],
            "kv_cache_dtype": options.get("kv", "u8"),
        }

    def run(self, jobs: list[Job], done: Callable[[int], None]) -> Outcome:
        prompts = [self._ov.Tensor(self._np.array([job.prompt], dtype="int64")) for job in jobs]
        results = self._pipe.generate(prompts, [self._config(job.max_tokens) for job in jobs])
        return Outcome(sum(len(result.m_generation_ids[0]) for result in results), [])

    def forget(self) -> None:
        """Prefix caching is off: with it on, a repetition of the same work would be free."""

    def _pipeline(self, prefix_caching: bool) -> Any:
        scheduler = self._genai.SchedulerConfig()
        scheduler.max_num_seqs = 64
        scheduler.max_num_batched_tokens = 2048
        scheduler.cache_size = self._kv_gib
        scheduler.dynamic_split_fuse = True
        scheduler.enable_prefix_caching = prefix_caching
        return self._genai.ContinuousBatchingPipeline(
            self._model, scheduler, "CPU", self._properties
        )

    def _config(self, tokens: int) -> Any:
        config = self._genai.GenerationConfig()
        config.max_new_tokens = tokens
        config.do_sample = False
        config.ignore_eos = True
        config.apply_chat_template = False
        return config


if __name__ == "__main__":
    serve(OpenVino)
