"""`AsyncLLM` over a real engine process whose executor does what its prompts say."""

import asyncio
import contextlib
import gc
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time

import pytest

from octavo import AsyncLLM, AsyncLLMEngine, SamplingParams
from octavo.async_llm import _Reader
from octavo.config import EngineConfig
from octavo.errors import ConfigError, EngineDeadError, EngineError, RequestError, RequestTypeError
from octavo.outputs import CompletionOutput, RequestOutput
from octavo.params import RequestOutputKind
from octavo.schedulers import FIFOScheduler
from serving import PYTHONPATH, wait_until, write_model

PARAMS = SamplingParams(max_tokens=8, ignore_eos=True)
LONG = PARAMS.with_(max_tokens=400, output_kind=RequestOutputKind.DELTA)
SLOW = "!slow"
EXECUTOR = "fake_engine:create"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("models") / "scripted")


@pytest.fixture(scope="module", autouse=True)
def _engine_path():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", PYTHONPATH)
        yield


def make(folder, **options):
    return AsyncLLM.over(EngineConfig(model=str(folder), swap_space=0, **options), EXECUTOR)


@pytest.fixture(scope="module")
def engine(folder):
    made = make(folder)
    yield made
    made.shutdown()


@pytest.fixture
def short_lived(folder):
    made = make(folder)
    yield made
    made.shutdown()


def run(body):
    return asyncio.run(asyncio.wait_for(body, 20))


async def outputs(generator):
    return [output async for output in generator]


async def idle(engine):
    """Wait until nothing runs and no block is held."""
    while engine.stats.running or engine.stats.kv_blocks_usage:
        await asyncio.sleep(0.01)
    return engine.stats


@pytest.mark.parametrize(
    "prompt", ["hi", [104, 105], {"prompt": "hi"}, {"prompt_token_ids": [104, 105]}]
)
def test_prompts_of_every_form_and_outputs_of_every_kind(engine, prompt):
    async def body():
        kinds = {}
        for kind in RequestOutputKind:
            params = PARAMS.with_(output_kind=kind)
            kinds[kind] = await outputs(engine.generate(prompt, params, f"r{kind}"))
        deltas = kinds[RequestOutputKind.DELTA]
        assert "".join(o.outputs[0].text for o in deltas) == "abcdefgh"
        assert [o.finished for o in deltas] == [False] * (len(deltas) - 1) + [True]
        growing = [o.outputs[0].text for o in kinds[RequestOutputKind.CUMULATIVE]]
        assert all("abcdefgh".startswith(text) for text in growing)
        assert growing == sorted(set(growing))
        (final,) = kinds[RequestOutputKind.FINAL_ONLY]
        for last in (final, kinds[RequestOutputKind.CUMULATIVE][-1]):
            assert last.outputs[0].text == "abcdefgh"
            assert last.outputs[0].token_ids == list(range(97, 105))
            assert last.outputs[0].finish_reason == "length"
            assert last.prompt_token_ids == [104, 105]
            assert last.prompt == ("hi" if prompt in ("hi", {"prompt": "hi"}) else None)

    run(body())


def test_many_tasks_at_once_each_get_their_own(engine):
    async def body():
        asked = [f"say [[{65 + i}, {66 + i}]]" for i in range(20)]
        params = SamplingParams(n=2, max_tokens=8)
        found = await asyncio.gather(*[outputs(engine.generate(text, params)) for text in asked])
        for i, answers in enumerate(found):
            texts = [choice.text for choice in answers[-1].outputs]
            assert texts == [chr(65 + i) + chr(66 + i)] * 2
        chat = [{"role": "user", "content": "[[72, 105]]"}]
        assert (await outputs(engine.chat(chat)))[-1].outputs[0].text == "Hi"

    run(body())


def test_several_loops_and_threads_use_one_engine(engine):
    found = []

    def work(number):
        (*_, last) = run(
            outputs(engine.generate(f"[[{65 + number}]]", PARAMS.with_(ignore_eos=False)))
        )
        found.append((number, last.outputs[0].text))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert sorted(found) == [(i, chr(65 + i)) for i in range(4)]


@pytest.mark.parametrize("how", ["break", "cancel", "abort"])
def test_leaving_a_request_frees_its_blocks(engine, how):
    async def body():
        before = (await idle(engine)).finished.get("abort", 0)
        if how == "break":
            async for _ in engine.generate(SLOW, LONG, "leaves"):
                break
            while engine._readers:
                await asyncio.sleep(0.01)
        generator = engine.generate(SLOW, LONG, "leaves")
        await anext(generator)
        if how == "break":
            await generator.aclose()
        elif how == "cancel":
            task = asyncio.create_task(outputs(generator))
            await asyncio.sleep(0.05)
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
        else:
            await engine.abort("leaves")
            rest = await outputs(generator)
            assert rest[-1].finished
            assert rest[-1].outputs[0].finish_reason == "abort"
            await engine.abort(["leaves", "unknown"])
        while (await idle(engine)).finished.get("abort", 0) == before:
            await asyncio.sleep(0.01)
        assert await outputs(engine.generate("again", PARAMS, "leaves"))

    run(body())


def test_what_was_missed_comes_as_one():
    async def body():
        reader = _Reader(asyncio.get_running_loop())

        def produce():
            for number, reason in enumerate((None, None, "length")):
                choice = CompletionOutput(0, str(number), [number], finish_reason=reason)
                reader.put(RequestOutput("r", None, [1], [choice], reason is not None))
            reader.end()

        await asyncio.to_thread(produce)
        output = await reader.next()
        assert (output.outputs[0].text, output.outputs[0].token_ids) == ("012", [0, 1, 2])
        assert output.finished
        assert await reader.next() is None

    run(body())


def test_the_last_output_is_not_lost_where_the_end_comes_while_a_reader_looks():
    class Between:
        """The reader's lock; right after its first release another thread does its work."""

        def __init__(self, reader):
            self.lock, self.reader, self.first = reader._lock, reader, True

        def __enter__(self):
            self.lock.acquire()

        def __exit__(self, *error):
            self.lock.release()
            if self.first:
                self.first = False
                self.reader.put(RequestOutput("r", None, [1], [], True))
                self.reader.end()

    async def body():
        reader = _Reader(asyncio.get_running_loop())
        reader._lock = Between(reader)
        output = await reader.next()
        assert output is not None
        assert output.finished
        assert await reader.next() is None

    run(body())


def test_bad_requests_are_refused_and_name_the_field(engine):
    cases = [
        (("x", PARAMS, 7), {}, RequestTypeError, "request_id"),
        ((3.5, PARAMS), {}, RequestTypeError, "prompt"),
        (("", PARAMS), {}, RequestError, "prompt"),
        (([1] * 600, PARAMS), {}, RequestError, "prompt"),
        (("x", {"temperature": 0}), {}, RequestTypeError, "sampling_params"),
        (("x", PARAMS), {"priority": 1}, RequestError, "priority"),
    ]

    async def body():
        for args, options, kind, param in cases:
            with pytest.raises(kind) as caught:
                await outputs(engine.generate(*args, **options))
            assert caught.value.param == param
        first = engine.generate(SLOW, LONG, "same")
        await anext(first)
        with pytest.raises(RequestError, match="'same' is in flight"):
            await outputs(engine.generate("x", PARAMS, "same"))
        await first.aclose()
        await idle(engine)
        assert not engine._readers

    run(body())


def test_the_rest_of_its_methods(engine, caplog, monkeypatch):
    monkeypatch.setattr(__import__("logging").getLogger("octavo"), "propagate", True)

    async def body():
        assert (await engine.get_tokenizer()).encode("hi") == [104, 105]
        assert engine.get_default_sampling_params() == SamplingParams()
        assert await engine.reset_prefix_cache() is True
        running = engine.generate("y" * 40, LONG)
        await anext(running)
        await running.aclose()
        await engine.check_health()
        with caplog.at_level("INFO", logger="octavo"):
            await engine.do_log_stats()
        assert "tokens/s" in caplog.text
        assert (engine.is_running, engine.is_stopped, engine.errored) == (True, False, False)

    run(body())


@pytest.mark.parametrize("order", ["!kill", "!raise"])
def test_death_reaches_every_generator_and_every_later_call(short_lived, order):
    engine = short_lived

    async def body():
        slow = [engine.generate(SLOW, LONG) for _ in range(3)]
        for generator in slow:
            await anext(generator)
        running = [outputs(generator) for generator in (*slow, engine.generate(order, PARAMS))]
        errors = await asyncio.gather(*running, return_exceptions=True)
        with pytest.raises(EngineDeadError) as caught:
            await outputs(engine.generate("later", PARAMS))
        for error in (*errors, caught.value):
            assert isinstance(error, EngineDeadError)
            assert ("SIGKILL" if order == "!kill" else "MemoryError") in error.reason
        with pytest.raises(EngineDeadError, match=r"SIGKILL|MemoryError"):
            await engine.check_health()
        with pytest.raises(EngineDeadError):
            await engine.reset_prefix_cache()
        assert engine.errored
        assert str(engine.dead_error) == str(caught.value)

    run(body())


def test_after_shutdown_it_says_so_and_the_process_is_gone(folder):
    engine = make(folder)
    process = engine._host.client.links[0].process

    async def body():
        pending = engine.generate(SLOW, LONG)
        await anext(pending)
        async with engine as entered:
            assert entered is engine
        assert process.exit_code == 0
        with pytest.raises(EngineDeadError, match="shutdown"):
            await outputs(pending)
        for use in (
            lambda: outputs(engine.generate("x")),
            lambda: outputs(engine.chat([{"role": "user", "content": "x"}])),
            lambda: engine.abort("x"),
            engine.check_health,
            engine.reset_prefix_cache,
            engine.__aenter__,
        ):
            with pytest.raises(EngineError, match="this AsyncLLM was shut down; make a new one"):
                await use()

    run(body())
    engine.shutdown()
    assert engine.errored
    # A call that looked before the shutdown, and starts after it.
    engine._host.closed = False
    with pytest.raises(EngineError, match="was shut down"):
        run(outputs(engine.generate("x", PARAMS)))
    engine._host.closed = True


def test_the_collector_ends_a_forgotten_engine(folder):
    engine = make(folder)
    process = engine._host.client.links[0].process
    del engine
    gc.collect()
    wait_until(lambda: process.exit_code == 0)


def test_two_engines_in_one_process(engine, short_lived):
    async def body():
        both = [outputs(e.generate(SLOW, PARAMS, "same")) for e in (engine, short_lived)]
        found = await asyncio.gather(*both)
        assert [o[-1].outputs[0].text for o in found] == ["abcdefgh"] * 2
        await short_lived.abort("same")

    run(body())


def test_a_fork_is_refused_at_once(engine):
    async def body():
        for use in (outputs(engine.generate("x")), engine.check_health(), engine.abort("x")):
            try:
                await use
            except EngineError as error:
                os.write(writer, f"{error}\n".encode())
        os.write(writer, b"end")

    reader, writer = os.pipe()
    if (child := os.fork()) == 0:
        try:
            asyncio.new_event_loop().run_until_complete(body())
            engine.shutdown()
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    *said, end = os.read(reader, 10000).decode().splitlines()
    os.close(reader)
    os.close(writer)
    assert end == "end"
    assert len(said) == 3
    for line in said:
        assert f"this AsyncLLM was made in process {os.getpid()} and is used in its fork" in line
    assert run(outputs(engine.generate("x", PARAMS)))


def test_engine_args_of_every_form(folder, monkeypatch):
    made = []
    monkeypatch.setattr(AsyncLLM, "_start", lambda self, config, executor: made.append(config))
    config = EngineConfig(model=str(folder), max_num_seqs=3)
    for form in (config, {"model": str(folder), "max_num_seqs": 3}):
        AsyncLLMEngine.from_engine_args(form)
    AsyncLLM(str(folder), max_num_seqs=3)
    assert made == [config] * 3
    with pytest.raises(ConfigError, match=r"EngineArgs.*not a str"):
        AsyncLLM.from_engine_args("model")
    with pytest.raises(ConfigError, match="'module:Class'"):
        AsyncLLM(str(folder), scheduler=FIFOScheduler())


def test_a_start_that_fails_leaves_nothing(folder, tmp_path):
    broken = write_model(tmp_path / "broken")
    (broken / "broken").touch()
    threads = threading.active_count()
    with pytest.raises(ConfigError, match="told to be broken"):
        make(broken)
    assert not [t for t in threading.enumerate() if t.name == "octavo-async-llm"][threads:]


SCRIPT = """
import asyncio
from octavo import AsyncLLM, SamplingParams
from octavo.config import EngineConfig
engine = AsyncLLM.over(EngineConfig(model={folder!r}, swap_space=0), "fake_engine:create")
print(engine._host.client.links[0].process.pid, flush=True)
async def main():
    async for output in engine.generate("hi", SamplingParams(max_tokens=4), "a"):
        pass
    print(output.outputs[0].text, flush=True)
    {last}
asyncio.run(main())
"""


def test_a_script_without_a_main_guard_that_forgets_shutdown_ends(folder):
    last = "await anext(engine.generate('!slow')); raise SystemExit(3)"
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(folder=str(folder), last=last)],
        capture_output=True, text=True, timeout=30, check=False,
    )  # fmt: skip
    pid, text = done.stdout.split()
    assert (text, done.returncode) == ("abcd", 3)
    assert done.stderr == ""
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid), 0)


def test_ctrl_c_while_the_model_loads_ends_at_once(tmp_path):
    folder = write_model(tmp_path / "slow", load_seconds=60)
    code = textwrap.dedent(f"""
        from octavo import AsyncLLM
        from octavo.config import EngineConfig
        print("begin", flush=True)
        AsyncLLM.over(EngineConfig(model={str(folder)!r}, swap_space=0), "fake_engine:create")
    """)
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout.readline() == b"begin\n"
    time.sleep(0.3)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=20)
    assert said.endswith(b"KeyboardInterrupt\n")
    assert b"killing it" not in said


@pytest.mark.slow
def test_a_loop_goes_on_when_its_engine_dies(folder):
    params = LONG.with_(max_tokens=60, n=2, temperature=1)
    engine = make(folder, data_parallel_size=2)
    try:

        async def read(name):
            found = await outputs(engine.generate(SLOW, params, name))
            return ["".join(choice.text for output in found for choice in output.outputs
                            if choice.index == index) for index in range(2)]  # fmt: skip

        async def body():
            tasks = [asyncio.create_task(read(str(number))) for number in range(4)]
            client = engine._host.client
            while not all(load.running for load in client._loads):
                await asyncio.sleep(0.01)
            os.kill(client.links[0].process.pid, signal.SIGKILL)
            return await asyncio.gather(*tasks)

        letters = "".join(chr(97 + i % 26) for i in range(60))
        assert run(body()) == [[letters, letters]] * 4
        assert not engine.errored
    finally:
        engine.shutdown()
