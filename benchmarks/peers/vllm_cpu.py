"""vLLM's CPU build through its offline face, on all cores."""

import os
from collections.abc import Callable
from typing import Any

from benchmarks.protocol import Outcome, serve
from benchmarks.workloads import Job

os.environ.setdefault("HF_HUB_OFFLINE", "1")


class VllmCpu:
    """options: keywords of vLLM's LLM, and kv_gib: the size of its KV cache."""

    def __init__(self, options: dict[str, Any]) -> None:
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", str(options.pop("kv_gib", 4)))
        import vllm  # type: ignore[import-not-found, unused-ignore]

        self._vllm = vllm
        given = {"dtype": "bfloat16", "max_num_seqs": 64, "max_model_len": 4096, **options}
        self._llm = vllm.LLM(disable_log_stats=True, **given)
        bound = {k: v for k, v in os.environ.items() if k.startswith(("VLLM_", "OMP_"))}
        self.facts = {
            "build": f"vllm {vllm.__version__} cpu",
            "threads": len(os.sched_getaffinity(0)),
            "dtype": given["dtype"],
            "settings": bound,
        }

    def run(self, jobs: list[Job], done: Callable[[int], None]) -> Outcome:
        outputs = self._llm.generate(
            [{"prompt_token_ids": job.prompt} for job in jobs],
            [
                self._vllm.SamplingParams(
                    temperature=0.0, max_tokens=job.max_tokens, ignore_eos=True, detokenize=False
                )
                for job in jobs
            ],
            use_tqdm=False,
        )
        return Outcome(sum(len(out.outputs[0].token_ids) for out in outputs), [])

    def forget(self) -> None:
        self._llm.reset_prefix_cache()


if __name__ == "__main__":
    serve(VllmCpu)
