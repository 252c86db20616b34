"""What a view says of requests, of changes and of what keeps requests waiting."""

import itertools
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest

from octavo.config import EngineConfig
from octavo.core.plan import RunnerLimits
from octavo.core.policy import FIFOScheduler, Policy, PriorityScheduler, StepLatencies
from octavo.core.scheduler import Update
from octavo.core.slo import SLOScheduler
from octavo.core.submission import Submission
from octavo.engine import watcher as watcher_module
from octavo.engine.engine import Engine
from octavo.engine.fake import FakeRunner
from octavo.engine.watch import MOST_ENDED, MOST_MARKS, Mark, RequestRow, Snapshot
from octavo.engine.watcher import Watcher
from octavo.params import SamplingParams


def make(
    policy: Policy | None = None, blocks: int = 65, host: int = 0, **config: Any
) -> tuple[Engine, Watcher]:
    clock = itertools.count(1.0, 1.0)
    limits = RunnerLimits(blocks, 4, 1024, 4 * (blocks - 1), 256, num_host_blocks=host)
    settings = EngineConfig(model="m", **{"max_num_seqs": 4, **config})
    engine = Engine(settings, FakeRunner(limits), policy or FIFOScheduler(), lambda: next(clock))
    return engine, Watcher(engine)


def add(engine: Engine, name: str, length: int = 8, tokens: int = 20, **fields: Any) -> None:
    params = {name: fields.pop(name) for name in ("n",) if name in fields}
    sampling = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, **params)
    prompt = tuple(hash((name, i)) % 250 for i in range(length))
    engine.add_request(Submission(name, prompt, sampling, **fields))


def row(snapshot: Snapshot, name: str, choice: int = 0) -> RequestRow:
    (found,) = [one for one in snapshot.requests if (one.id, one.choice) == (name, choice)]
    return found


def names(found: RequestRow) -> list[str]:
    assert [mark.at for mark in found.marks] == sorted(mark.at for mark in found.marks)
    return [mark.name for mark in found.marks]


def test_a_life_from_arrival_to_end() -> None:
    engine, watcher = make(max_num_batched_tokens=8)
    add(engine, "a", 20, 3)
    found = watcher.view().snapshot
    assert (row(found, "a").state, names(row(found, "a"))) == ("waiting", ["arrived"])
    engine.step()
    found = watcher.view(("a", "nobody")).snapshot
    assert (row(found, "a").computed, row(found, "a").blocks) == (8, 2)
    assert row(found, "a").marks[-1] == Mark("prefill", found.now, 8)
    assert len(watcher.view().snapshot.requests[0].marks) == 3  # not the same twice
    while engine.has_work():
        engine.step()
    view = watcher.view(("a", "nobody"))
    (ended,) = view.snapshot.requests
    assert names(ended) == ["arrived", "planned", "prefill", "first_token", "finished"]
    assert (ended.state, ended.reason, ended.output_tokens) == ("finished", "length", 3)
    assert [(one.id, one.tables) for one in view.followed] == [("a", ())]
    assert (view.snapshot.queue.running, view.snapshot.unlisted) == (0, 0)


def test_what_ended_before_the_first_view_is_there_and_is_bounded() -> None:
    engine, watcher = make()
    for number in range(MOST_ENDED + 9):
        add(engine, f"r{number}", 4, 1)
        engine.step()
    add(engine, "gone")
    engine.abort("gone")
    rows = watcher.view().snapshot.requests
    assert len(rows) == MOST_ENDED
    assert (rows[-1].id, rows[-1].reason) == ("gone", "abort")
    assert names(rows[0]) == ["arrived", "planned", "first_token", "finished"]
    assert watcher.view().snapshot.requests == rows


def test_choices_are_rows_of_their_own_and_a_followed_request_has_all_their_tables() -> None:
    engine, watcher = make()
    add(engine, "a", 6, 5, n=3)
    engine.step()
    view = watcher.view(("a",))
    assert [(r.id, r.choice) for r in view.snapshot.requests] == [("a", i) for i in range(3)]
    (followed,) = view.followed
    assert [table.choice for table in followed.tables] == [0, 1, 2]
    shared = {np.frombuffer(table.groups[0], "<u4")[0] for table in followed.tables}
    assert len(shared) == 1
    engine.finish_choice("a", 1)
    assert [r.choice for r in watcher.view().snapshot.requests] == [0, 2]


def test_a_preemption_says_for_whom_and_the_life_goes_on() -> None:
    engine, watcher = make(blocks=11, host=20, preemption_mode="swap")
    add(engine, "a", 8, 30)
    add(engine, "b", 8, 30)
    swapped = None
    while engine.has_work():
        engine.step()
        found = watcher.view(("b",))
        if found.snapshot.queue.swapped:
            swapped = found
    assert swapped is not None
    changes = [change for change in found.snapshot.changes if change.name != "admission"]
    assert (changes[0].name, changes[0].request, changes[0].other) == ("preempted", "b", "a")
    assert "a needed a block and none was free; its blocks were copied to the host" in (
        changes[0].text
    )
    assert changes[1].text == "b runs again"
    assert [change.number for change in found.snapshot.changes] == sorted(
        change.number for change in found.snapshot.changes
    )
    life = names(row(found.snapshot, "b"))
    assert life[:3] == ["arrived", "planned", "first_token"]
    assert life[3:5] == ["swapped", "resumed"]
    assert row(swapped.snapshot, "b").state == "swapped"
    assert row(swapped.snapshot, "b").blocks > 0
    assert swapped.followed[0].tables[0].on_host
    assert swapped.snapshot.host is not None
    assert any(swapped.snapshot.host.fill)


def test_a_preemption_before_the_first_view_is_in_the_life() -> None:
    engine, _ = make(blocks=11)
    add(engine, "a", 8, 30)
    add(engine, "b", 8, 30)
    while not engine.scheduler.num_preemptions:
        engine.step()
    engine.scheduler.queues.transitions.clear()  # longer ago than is remembered
    found = Watcher(engine).view().snapshot
    assert "preempted" in names(row(found, "b"))
    assert found.queue.preempted == 1


def test_a_displacement_names_the_more_urgent_request() -> None:
    engine, watcher = make(PriorityScheduler(), max_num_seqs=1)
    add(engine, "slow", priority=5)
    engine.step()
    add(engine, "urgent", priority=0)
    engine.step()
    (change,) = [c for c in watcher.view().snapshot.changes if c.name == "displaced"]
    assert (change.request, change.other) == ("slow", "urgent")
    assert "more urgent" in change.text


class Narrow(FIFOScheduler):
    """Lets one request run."""

    def budget(self, load: Any) -> tuple[int, int]:
        return load.max_tokens, 1


def crowd(engine: Engine) -> None:
    for number in range(3):
        add(engine, f"r{number}", 12, 10)


@pytest.mark.parametrize(
    ("hold", "words", "policy", "config"),
    [
        ("max_num_seqs", "2 requests wait: 1 run, as many as max_num_seqs", FIFOScheduler,
         {"max_num_seqs": 1}),
        ("policy", "2 requests wait: 1 run, as many as the policy", Narrow, {}),
        ("memory", "more free blocks than", FIFOScheduler, {"blocks": 8}),
        ("tokens", "the 12 tokens of a step are used up", lambda: FIFOScheduler(None),
         {"max_num_batched_tokens": 12}),
        (None, "", FIFOScheduler, {}),
    ],
)  # fmt: skip
def test_what_keeps_requests_waiting(
    hold: str | None, words: str, policy: Callable[[], Policy], config: dict[str, Any]
) -> None:
    engine, watcher = make(policy(), **config)
    crowd(engine)
    engine.step()
    found = watcher.view().snapshot
    assert found.queue.hold == hold
    assert words in found.queue.hold_text
    said = [change.text for change in found.changes if change.name == "admission"]
    assert said == ([found.queue.hold_text] if hold else [])
    assert len(watcher.view().snapshot.changes) == len(found.changes)  # said once


def test_a_policy_that_changes_its_budget_says_why() -> None:
    policy = SLOScheduler(p99_itl_ms=10)
    engine, watcher = make(policy)
    add(engine, "a")
    engine.step()
    assert watcher.view().snapshot.changes == ()
    for step in range(60):
        policy.observe(StepLatencies(float(step), 1, [1.0], [], 0.5, 1, 0))
    found = watcher.view().snapshot
    (change,) = found.changes
    assert change.name == "policy"
    assert change.text.startswith("slo: a step may take")
    assert "P99 between tokens is 1.0000 s, over 0.0100 s" in change.text
    assert found.queue.reason in change.text
    assert found.queue.gauges["p99_itl_seconds"] == 1.0


def test_more_requests_than_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watcher_module, "MOST_LIVE", 3)
    engine, watcher = make()
    for number in range(6):
        add(engine, f"r{number}")
    engine.step()
    found = watcher.view().snapshot
    assert (len(found.requests), found.unlisted) == (3, 3)
    owners = set(np.frombuffer(found.pool.owner, "<u2").tolist())
    assert owners == {0, 1, 2, 3, 65534}  # 4 run


def test_the_marks_of_one_request_are_bounded() -> None:
    engine, watcher = make(max_num_batched_tokens=4, blocks=257)
    add(engine, "long", 600, 5)
    while engine.has_work():
        engine.step()
        marks = watcher.view().snapshot.requests[0].marks
        assert len(marks) <= MOST_MARKS
    life = [mark.name for mark in marks]
    assert (life[:2], life[-2:]) == (["arrived", "planned"], ["first_token", "finished"])
    assert watcher._marks == {}
    assert watcher._lives == {}


def work(engine: Engine, look: Callable[[], object]) -> list[list[Update]]:
    """All updates of a history with preemptions and aborts."""
    found = []
    for number in range(12):
        add(engine, f"r{number}", 5 + number, 20, n=1 + number % 3 // 2)
        found.append(engine.step())
        look()
        if number == 7:
            engine.abort("r5")
    while engine.has_work():
        found.append(engine.step())
        look()
        engine.scheduler.check()
    return found


def test_looking_changes_nothing() -> None:
    engine, watcher = make(blocks=20, host=20)
    plain, _ = make(blocks=20, host=20)

    def words(updates: list[list[Update]]) -> list[Any]:
        return [[(u.request_id, u.index, u.token_ids, u.finish_reason) for u in one]
                for one in updates]  # fmt: skip

    looked = words(work(engine, lambda: watcher.view(("r3",))))
    assert looked == words(work(plain, lambda: None))
    assert engine.stats.preemptions == plain.stats.preemptions > 0


def test_a_view_crosses_to_another_process() -> None:
    engine, watcher = make(host=20)
    add(engine, "a")
    engine.step()
    view = watcher.view(("a",))
    raw = msgspec.msgpack.encode(view)
    assert msgspec.msgpack.decode(raw, type=type(view)) == view
