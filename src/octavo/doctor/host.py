"""Rules on what is around the engine: processors, threads, the web process, clients, memory.

Memory bandwidth that other programs take is not judged: no metric has the time that a step would
take alone.
"""

from octavo.doctor.rule import Evidence, Rule, percent, settings
from octavo.doctor.snapshot import Snapshot

_RUNNING = "vllm:num_requests_running"
_USED = "octavo:device_utilization"
_UNREAD, _STALLED = "octavo:connections_unread", "octavo:connections_stalled_total"

# Of one core. Python runs on one at a time, so little is left above it.
WEB_BUSY = 0.8
# Steps take nearly all of the time of a busy engine; below this, what lies between them counts.
# Of one request alone it is not judged: it may have come within the window.
DEVICE_BUSY, DEVICE_LEAST = 0.6, 2
# Periods of the quota (0.1 s each) that were cut short; all threads of a step wait for the next.
THROTTLED = 0.1
# Percent of 10 s in which a task that could run had no processor. A lone server stays far below.
CPU_PRESSURE = 30.0
# Of the limit: what is left is less than one allocation of a large step.
MEMORY_FULL = 0.95
# Percent of 10 s in which a task waited for memory; steps touch all weights, so any is too much.
MEMORY_PRESSURE = 10.0


def _web_busy(snapshot: Snapshot) -> Evidence | None:
    cores = snapshot.rate("process_cpu_seconds_total")
    if cores < WEB_BUSY:
        return None
    tokens = snapshot.rate("vllm:generation_tokens_total")
    prompt = snapshot.rate("vllm:prompt_tokens_total")
    return (
        f"the web process used {cores:.2f} cores {snapshot.recent.words}",
        f"{prompt:.3g} prompt and {tokens:.3g} generated tokens/s of answered requests",
    )


def _between_steps(snapshot: Snapshot) -> Evidence | None:
    engines = snapshot.engines
    running = snapshot.both(_RUNNING)
    used = max(total / engines for total in snapshot.both(_USED))
    steps = snapshot.rate("octavo:steps_total")
    if min(running) < DEVICE_LEAST * engines or used >= DEVICE_BUSY or not steps:
        return None
    return (
        f"{running[0]:.0f} requests ran, now {running[1]:.0f}; steps take {percent(used)} of the "
        "time of the last 10 s",
        f"{steps / engines:.3g} steps/s; {_threads_told(snapshot)}",
    )


def _threads_told(snapshot: Snapshot) -> str:
    return settings(snapshot, "threads", "processors", "cpu_quota")


def _slow_clients(snapshot: Snapshot) -> Evidence | None:
    unread, stalled = snapshot.both(_UNREAD), snapshot.recent.count(_STALLED)
    if min(unread) < 1 and not stalled:
        return None
    return (
        f"{unread[0]:.0f} answers were not read, now {unread[1]:.0f}; {stalled:.0f} were ended "
        f"for it {snapshot.recent.words}, {snapshot.last.total(_STALLED):.0f} since the start",
    )


def _too_many_threads(snapshot: Snapshot) -> Evidence | None:
    last = snapshot.last
    # OMP_NUM_THREADS may be a list, one number for each level of nesting.
    asked = last.setting("threads").partition(",")[0]
    limits = [last.number(name) for name in ("processors", "cpu_quota")]
    known = [limit for limit in limits if limit is not None]
    if not asked.isdigit() or not known or last.setting("device").startswith("cuda"):
        return None
    threads = int(asked) * (last.number("data_parallel_size") or 1)
    # A quota below one processor cannot be met with whole threads.
    if threads <= max(1, min(known)):
        return None
    return (f"{threads:.0f} compute threads; {_threads_told(snapshot)}",)


def _throttled(snapshot: Snapshot) -> Evidence | None:
    before, now = snapshot.before.machine, snapshot.now.machine
    if before is None or now is None or now.throttled is None or before.throttled is None:
        return None
    periods = (now.periods or 0) - (before.periods or 0)
    cut = now.throttled - before.throttled
    if periods <= 0 or cut < THROTTLED * periods:
        return None
    quota = f"{now.quota:.3g} processors" if now.quota else "unknown"
    return (
        f"{cut} of {periods} periods were cut short {snapshot.recent.words}; the quota is {quota}",
        _threads_told(snapshot),
    )


def _neighbours(snapshot: Snapshot) -> Evidence | None:
    machines = (snapshot.before.machine, snapshot.now.machine)
    pressure = [machine.cpu_pressure or 0.0 for machine in machines if machine]
    if len(pressure) < 2 or min(pressure) < CPU_PRESSURE:
        return None
    return (
        f"in {pressure[1]:.0f}% of the last 10 s a task of this machine waited for a processor",
        _threads_told(snapshot),
    )


def _memory_short(snapshot: Snapshot) -> Evidence | None:
    before, now = snapshot.before.machine, snapshot.now.machine
    if before is None or now is None:
        return None
    found = []
    if now.memory_limit and (now.memory_used or 0) >= MEMORY_FULL * now.memory_limit:
        share = percent((now.memory_used or 0) / now.memory_limit)
        found.append(f"{share} of the control group's {now.memory_limit / 2**30:.3g} GiB are used")
    if now.memory_total and now.memory_available is not None:
        free = now.memory_available / now.memory_total
        if free <= 1 - MEMORY_FULL:
            found.append(f"{percent(free)} of the machine's memory is available")
    pressure = min(before.memory_pressure or 0.0, now.memory_pressure or 0.0)
    if pressure >= MEMORY_PRESSURE:
        found.append(f"in {pressure:.0f}% of the last 10 s a task waited for memory")
    return tuple(found) or None


RULES = (
    Rule(
        "threads", "warning", "there are more compute threads than processors",
        "`--threads` or OMP_NUM_THREADS is above what the affinity or the quota of the control "
        "group allows: threads wait for each other at every step",
        "leave out `--threads`, or set it to the processors; with `--data-parallel-size` each "
        "engine has as many",
        _too_many_threads,
    ),
    Rule(
        "throttled", "warning", "the quota of the control group stops the processes",
        "threads use up the group's time before its period ends, and all wait for the next",
        "raise the container's CPU limit, or lower `--threads` to the whole processors in it, "
        "less one for the web process",
        _throttled, local=True,
    ),
    Rule(
        "neighbours", "warning", "tasks wait for processors",
        "other programs, or clients on the same machine, take the cores that steps need",
        "give Octavo cores of its own (`taskset`, cpusets), or fewer `--threads`",
        _neighbours, local=True,
    ),
    Rule(
        "memory-short", "warning", "the machine is short of memory",
        "weights, KV cache and swap space, or other programs, take nearly all",
        "lower `--kv-cache-memory-bytes` and `--swap-space`, or quantize (`--quantization int8`)",
        _memory_short, local=True,
    ),
    Rule(
        "web-process", "warning", "the web process is busy",
        "tokenizing, chat templates, JSON and streams are Python's, which runs on one core",
        "leave it a core (`--threads` one less than the cores); if one is not enough, run several "
        "servers behind a proxy: `--data-parallel-size` adds engines, not web processes",
        _web_busy,
    ),
    Rule(
        "between-steps", "warning", "the device is idle between steps while requests run",
        "planning and results of steps take longer than computing them, or the engine's process "
        "has to wait for a processor",
        "`--async-scheduling` plans ahead; leave a core free (`--threads`); larger steps "
        "(`--max-num-seqs`); see also the rules on threads and quotas",
        _between_steps,
    ),
    Rule(
        "slow-clients", "warning", "clients do not read their answers",
        "slow networks, proxies that hold answers back, or clients that forgot them; their "
        "requests run on, and hold memory",
        "turn off response buffering in the proxy; a lower `--stall-timeout` ends them sooner",
        _slow_clients,
    ),
)  # fmt: skip
