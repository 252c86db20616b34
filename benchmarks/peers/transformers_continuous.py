"""transformers' own continuous batching, with its defaults."""

import os
from collections.abc import Callable
from typing import Any

from benchmarks.peers.transformers_static import load
from benchmarks.protocol import Outcome, serve
from benchmarks.workloads import Job

os.environ.setdefault("HF_HUB_OFFLINE", "1")


class Continuous:
    """options: model (a folder or a .gguf file), dtype, attention."""

    def __init__(self, options: dict[str, Any]) -> None:
        import torch
        import transformers

        torch.set_num_threads(len(os.sched_getaffinity(0)))
        dtype = options.get("dtype", "bfloat16")
        attention = options.get("attention", "sdpa")
        self._model = load(options["model"], getattr(torch, dtype), attention)
        settings: Any = transformers.GenerationConfig
        config = settings(do_sample=False, eos_token_id=-1, pad_token_id=0, use_cuda_graph=False)
        # Entered once and left with the process: the manager owns a thread, and a context that
        # nobody holds is left at once.
        self._context = self._model.continuous_batching_context_manager(generation_config=config)
        self._manager = self._context.__enter__()
        self.facts = {
            "build": f"transformers {transformers.__version__} continuous batching",
            "torch": torch.__version__,
            "threads": torch.get_num_threads(),
            "dtype": dtype,
        }

    def run(self, jobs: list[Job], done: Callable[[int], None]) -> Outcome:
        for job in jobs:
            self._manager.add_request(job.prompt, max_new_tokens=job.max_tokens, eos_token_id=-1)
        finished = tokens = 0
        while finished < len(jobs):
            result = self._manager.get_result(timeout=1)
            if result is None:
                if not self._manager.is_running():
                    raise RuntimeError("the manager's thread ended")
            elif result.is_finished():
                if result.error:
                    raise RuntimeError(result.error)
                finished, tokens = finished + 1, tokens + len(result.generated_tokens)
                done(finished)
        return Outcome(tokens, [])

    def forget(self) -> None:
        """Its prefix cache has no switch here; the workloads draw fresh tokens but for W1."""


if __name__ == "__main__":
    serve(Continuous)
