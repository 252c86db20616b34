"""What the host does in a step, and how much of its time the device does not hide.

Sequences that each gain a token in every step, by an engine that plans a step while the one before
is computed, and by one that does not. The device's own time is that of steps launched one behind
the other, without a wait for the host. In a dry run nothing runs beside the host, which hides
nothing: the device's time is then that of the calls that compute.
"""

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from benchmarks.gpu.models import decode_step, size, start, write
from benchmarks.gpu.section import Rows, Scale, compilations, synchronize
from octavo.core.policy_registry import create_policy
from octavo.core.submission import Submission
from octavo.engine.engine import Engine
from octavo.params import SamplingParams
from octavo.runner.model_runner import ModelRunner

BATCHES = (1, 16, 64, 256)
_CONTEXT, _STEPS = 128, 60
# Longer than it takes to launch some steps, in cycles of the device.
_ASLEEP = 10**8


def run(scale: Scale, rows: Rows, folder: Path) -> bool:
    """Whether there was a row for each batch size."""
    batches = (1, 2) if scale.dry else BATCHES
    context, steps = (20, 2) if scale.dry else (_CONTEXT, _STEPS)
    window = context + steps + 8
    runner = start(
        write(folder / "1B", size(scale, "1B")), scale, max_model_len=window,
        num_gpu_blocks_override=batches[-1] * (window // 16 + 2), swap_space=0,
        cuda_graph_sizes=",".join(map(str, batches)), max_num_seqs=batches[-1],
        max_num_batched_tokens=64 if scale.dry else 2048,
    )  # fmt: skip
    with compilations() as compiled:
        for batch in batches:
            if scale.is_late:
                return False
            device_ms = None if scale.dry else _device_ms(runner, batch, context)
            for ahead in (False, True):
                figures = _figures(scale, runner, batch, context, steps, ahead, device_ms)
                rows.add(model="1B", rows=batch, ahead=ahead, **figures)
    rows.add(compiled_after_ready=compiled, ok=not compiled)
    runner.close()
    return True


def _figures(
    scale: Scale,
    runner: ModelRunner,
    batch: int,
    context: int,
    steps: int,
    ahead: bool,
    device_ms: float | None,
) -> dict[str, Any]:
    """Medians over steps, in ms: the whole, what the device needs, what the host does, and how
    much longer the whole takes than the device."""
    config = runner.config.with_(async_scheduling=ahead)
    engine = Engine(config, runner, create_policy("fifo"))
    vocab = runner.limits.vocab_size
    for n in range(batch):
        params = SamplingParams(temperature=0, max_tokens=steps + 4, ignore_eos=True)
        ids = tuple((7 * i + n) % vocab for i in range(context))
        engine.add_request(Submission(str(n), ids, params))
    while any(request.lag > 1 for request in engine.scheduler.queues.running) or (
        engine.scheduler.num_waiting
    ):
        engine.step()
    whole: list[float] = []
    waited: list[float] = []
    for _ in range(steps):
        with _timed(scale, runner) as away:
            begin = time.perf_counter()
            engine.step()
            whole.append(time.perf_counter() - begin)
        waited.append(sum(away))
    synchronize(scale)
    step, host = statistics.median(whole), statistics.median(map(float.__sub__, whole, waited))
    if device_ms is None:
        device, exposed = statistics.median(waited), host
    else:
        device = device_ms / 1000
        exposed = max(0.0, step - device)
    for n in range(batch):
        engine.abort(str(n))
    engine.scheduler.close()
    return {"step_ms": 1000 * step, "device_ms": 1000 * device, "host_ms": 1000 * host,
            "not_hidden_ms": 1000 * exposed}  # fmt: skip


@contextlib.contextmanager
def _timed(scale: Scale, runner: ModelRunner) -> Iterator[list[float]]:
    """Seconds in which the host does nothing of its own: it waits for results; in a dry run, it
    is the device."""
    spent: list[float] = []

    def timed(call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **options: Any) -> Any:
            begin = time.perf_counter()
            try:
                return call(*args, **options)
            finally:
                spent.append(time.perf_counter() - begin)

        return run

    device: Any = runner.device
    with contextlib.ExitStack() as stack:
        if scale.dry:
            for owner, name in ((runner.captured, "forward"), (runner.model, "forward"),
                                (runner.model, "logits"), (device, "launch_draws")):  # fmt: skip
                stack.enter_context(patch.object(owner, name, timed(getattr(owner, name))))
        else:
            fetch = device.fetch
            stack.enter_context(patch.object(device, "fetch", lambda tensor: timed(fetch(tensor))))
        yield spent


def _device_ms(runner: ModelRunner, batch: int, context: int) -> float:
    """Of a step: some are launched while the device sleeps."""
    plan, count = decode_step(runner, batch, context), 8
    runner.execute(plan)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    torch.cuda._sleep(_ASLEEP)  # type: ignore[no-untyped-call]
    begin.record()
    for _ in range(count):
        runner.submit(plan)
    end.record()
    torch.cuda.synchronize()
    return float(begin.elapsed_time(end)) / count
