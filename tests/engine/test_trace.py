"""A traced engine: the file is a trace by the format's rules, and tells what happened."""

import json
from itertools import pairwise

import pytest

import trace_rules
from octavo.config import EngineConfig
from octavo.core.plan import RunnerLimits
from octavo.core.policy_registry import create_policy
from octavo.core.submission import Continuation, Submission
from octavo.engine.admission import admit
from octavo.engine.engine import Engine
from octavo.engine.fake import FakeRunner
from octavo.engine.trace import TracedEngine, create_engine
from octavo.errors import ConfigError, EngineDeadError
from octavo.params import SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


def traced(tmp_path, num_blocks=257, runner=None, hosts=256, **options):
    runner = runner or FakeRunner()
    runner.limits = RunnerLimits(
        num_blocks=num_blocks, block_size=16, block_bytes=1, max_model_len=256, vocab_size=256,
        eos_token_ids=(2,), num_host_blocks=hosts,
    )  # fmt: skip
    config = EngineConfig(**{"trace": str(tmp_path / "trace.json"), "model": "m", **options})
    return create_engine(config, runner, create_policy(config.scheduler))


def add(engine, name, count=20, params=GREEDY, **fields):
    prompt = tuple((sum(name.encode()) + i) % 250 + 3 for i in range(count))
    engine.add_request(admit(Submission(name, prompt, params, **fields), engine.capabilities))


def run(engine):
    while engine.has_work():
        engine.step()


def finished(engine, tmp_path, name="trace.json"):
    engine.close()
    events = trace_rules.read(tmp_path / name)
    trace_rules.check(events)
    return events


def ends(events):
    """The arguments with which each choice ended."""
    return {e["id"]: e["args"] for e in events if e["ph"] == "e" and e["name"] == "request"}


def test_without_a_trace_the_engine_is_the_ordinary_one(tmp_path):
    config = EngineConfig()
    engine = create_engine(config, FakeRunner(), create_policy(config.scheduler))
    assert type(engine) is Engine


@pytest.mark.parametrize("ahead", [False, True])
def test_steps_and_requests(tmp_path, ahead):
    engine = traced(tmp_path, max_num_batched_tokens=32, max_num_seqs=4, async_scheduling=ahead)
    for name in ("a", "b", "c"):
        add(engine, name, 50)
    run(engine)
    steps = engine.stats.steps
    events = finished(engine, tmp_path)
    for name in ("a", "b", "c"):
        story = trace_rules.story(events, name)
        assert story == ["request", "queued", "prefill", "decode", "first token"]
        chunks = [e for e in events if e.get("id") == name and e["name"] == "chunk"]
        begun = [e["args"] for e in chunks if e["ph"] == "b"]
        assert sum(args["tokens"] for args in begun) == 50
        assert [args["from"] for args in begun] == sorted(args["from"] for args in begun)
        assert len(begun) > 1  # 32 tokens a step
        assert ends(events)[name] == {"finish_reason": "length", "output_tokens": 8}
    runs = [e for e in events if e["name"] == "run"]
    assert len(runs) == steps
    assert sum(e["args"]["tokens"] for e in runs) >= 3 * 57
    for event in runs:
        args = event["args"]
        assert args["prefill"] + args["decode"] == args["tokens"]
    commits = [e["args"]["generated"] for e in events if e["name"] == "commit"]
    assert sum(commits) == 24
    numbers = [e["args"]["step"] for e in runs]
    assert all(one < other for one, other in pairwise(numbers))
    held = [e["args"]["held"] for e in events if e["name"] == "KV blocks"]
    assert max(held) >= 4
    assert held[-1] == 0


@pytest.mark.parametrize(("mode", "word", "after"), [
    ("swap", "swapped", "swap in"), ("recompute", "preempted", "recompute"),
])  # fmt: skip
def test_preempted_and_swapped(tmp_path, mode, word, after):
    engine = traced(tmp_path, num_blocks=17, preemption_mode=mode, enable_prefix_caching=False)
    params = GREEDY.with_(max_tokens=100)
    for name in ("a", "b", "c", "d"):
        add(engine, name, 20, params)
    run(engine)
    count = engine.stats.preemptions
    assert count > 0
    events = finished(engine, tmp_path)
    stories = [trace_rules.story(events, name) for name in "abcd"]
    told = [word for story in stories for word in story]
    assert told.count(word) == count
    assert told.count(after) == count
    preempted = next(story for story in stories if word in story)
    at = preempted.index(word)
    assert preempted[at - 1 : at + 3] == [preempted[at - 1], word, after, "decode"]
    assert sum(args.get("preemptions", 0) for args in ends(events).values()) == count
    if mode == "swap":
        assert any("swapped_out_blocks" in e["args"] for e in events if e["name"] == "run")


def test_several_choices_aborts_stops_and_what_continues(tmp_path):
    engine = traced(tmp_path)
    add(engine, "n", 20, GREEDY.with_(n=3, temperature=1, seed=1))
    add(engine, "gone", 20, GREEDY.with_(max_tokens=100))
    add(engine, "stopped", 20, GREEDY.with_(max_tokens=100))
    two = GREEDY.with_(n=2, temperature=1)
    add(engine, "late", 20, two, continuation=Continuation(((1, 2), None)))
    for _ in range(3):
        engine.step()
    engine.abort("gone")
    engine.finish_choice("stopped", 0)
    run(engine)
    events = finished(engine, tmp_path)
    found = {name: args["finish_reason"] for name, args in ends(events).items()}
    assert found == {"n": "length", "n#1": "length", "n#2": "length", "gone": "abort",
                     "stopped": "stop", "late": "length"}  # fmt: skip
    assert trace_rules.story(events, "n#2") == ["request", "decode", "first token"]
    assert trace_rules.story(events, "late") == ["request", "preempted", "recompute", "decode"]


def test_an_engine_that_dies_says_so_and_is_closed_by_the_end_of_its_process(tmp_path):
    def fail(plan):
        if plan.step == 3:
            raise RuntimeError("cable pulled")

    engine = traced(tmp_path, runner=FakeRunner(before_step=fail))
    assert isinstance(engine, TracedEngine)
    add(engine, "a")
    with pytest.raises(EngineDeadError):
        run(engine)
    engine._finalizer()  # what the end of the process calls
    events = trace_rules.read(tmp_path / "trace.json")
    trace_rules.check(events)
    died = [e["args"]["reason"] for e in events if e["name"] == "the engine died"]
    assert died == ["RuntimeError: cable pulled"]
    assert ends(events)["a"]["unfinished"] is True


def test_several_engines_write_a_file_each_and_the_files_can_be_joined(tmp_path):
    joined = []
    for number in range(2):
        config = EngineConfig(trace=str(tmp_path / "t.json"), model="m")
        policy = create_policy(config.scheduler)
        engine = create_engine(config, FakeRunner(), policy, engine=number, engines=2)
        add(engine, f"r{number}")
        run(engine)
        engine.close()
        joined += trace_rules.read(tmp_path / f"t.engine{number}.json")
    names = [e["args"]["name"] for e in joined if e["name"] == "process_name"]
    assert names == ["octavo engine 0: m", "octavo engine 1: m"]


def test_the_file_is_bounded_and_each_part_is_whole(tmp_path):
    engine = traced(tmp_path, trace_size=1 << 16)
    for i in range(12):
        add(engine, f"long{i}", 20, GREEDY.with_(max_tokens=200))
    run(engine)
    engine.close()
    last, earlier = tmp_path / "trace.json", tmp_path / "trace.earlier.json"
    assert last.stat().st_size + earlier.stat().st_size < 1.3 * (1 << 16)
    parts = [trace_rules.read(path) for path in (earlier, last)]
    for events in parts:
        trace_rules.check(events)
    assert parts[1][0]["ph"] == "M"
    notes = [[e["name"] for e in events if e["ph"] == "i"] for events in parts]
    assert notes[0][-1] == "the trace goes on in its next part"
    assert notes[1] == ["the trace goes on from its earlier part", "the trace ends"]
    number = [e["args"]["part"] for events in parts for e in events if e["ph"] == "i"]
    assert number[-1] == number[0] + 1 > 2  # older ones were dropped
    # A request that crosses the border is in both.
    assert {e["id"] for e in parts[0] if e["ph"] == "e" and e["name"] == "request"} & {
        e["id"] for e in parts[1] if e["ph"] == "b" and e["name"] == "request"
    }


def test_answers_are_the_same_with_a_trace(tmp_path):
    def answers(engine):
        add(engine, "a", 40, GREEDY.with_(max_tokens=30))
        add(engine, "b", 25, GREEDY.with_(max_tokens=30))
        found = []
        while engine.has_work():
            found += [(u.request_id, u.token_ids) for u in engine.step()]
        engine.close()
        return found

    plain = EngineConfig(model="m")
    config = EngineConfig(model="m", trace=str(tmp_path / "t.json"))
    assert answers(create_engine(plain, FakeRunner(), create_policy("fifo"))) == answers(
        create_engine(config, FakeRunner(), create_policy("fifo"))
    )


def test_options_that_have_no_effect_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="trace_size has no effect without trace"):
        EngineConfig(trace_size=1 << 20)
    with pytest.raises(ConfigError, match="trace_size must be at least 65536"):
        EngineConfig(trace="t.json", trace_size=10)


def test_the_first_event_has_the_wall_clock(tmp_path):
    engine = traced(tmp_path)
    events = finished(engine, tmp_path)
    begin = next(e for e in events if e["ph"] == "i")
    assert begin["args"]["unix_time"] > 1.6e9
    assert begin["args"]["scheduler"] == "fifo"
    assert json.loads((tmp_path / "trace.json").read_text()) == events
