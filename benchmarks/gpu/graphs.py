"""CUDA graphs: the latency of a decode step with and without, by batch size."""

from pathlib import Path

from benchmarks.gpu.models import decode_step, size, start, step_ms, write
from benchmarks.gpu.section import Rows, Scale, compilations

BATCHES = (1, 2, 4, 8, 16, 32, 64)
_CONTEXT, _REPEATS = 512, 40


def run(scale: Scale, rows: Rows, folder: Path) -> bool:
    """Whether there was a row for each batch size."""
    batches = (1, 2) if scale.dry else BATCHES
    context = 20 if scale.dry else _CONTEXT
    for name in ("1B", "8B")[: 1 if scale.dry else 2]:
        if scale.is_late:
            return False
        runner = start(
            write(folder / name, size(scale, name)), scale, max_model_len=2 * context,
            num_gpu_blocks_override=batches[-1] * (context // 16 + 1),
            swap_space=0,
            cuda_graph_sizes=",".join(map(str, batches)), max_num_batched_tokens=2048,
        )  # fmt: skip
        captured = runner.captured
        if captured is None:
            rows.add(model=name, ok=False, raised="the steps were not captured")
            return False
        with compilations() as compiled:
            for batch in batches:
                plan = decode_step(runner, batch, context)
                runner.captured = None
                eager = step_ms(scale, runner, plan, _REPEATS)
                runner.captured = captured
                replayed = step_ms(scale, runner, plan, _REPEATS)
                rows.add(model=name, batch=batch, context=context, eager_ms=eager,
                         captured_ms=replayed, gain=eager / replayed - 1)  # fmt: skip
        rows.add(model=name, compiled_after_ready=compiled, ok=not compiled)
        runner.close()
    return True
