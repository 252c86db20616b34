"""Ctrl-C acts between two steps, so that no plan is left in flight."""

import os
import signal
import threading

import pytest

from octavo.engine.fake import FakeRunner
from octavo.engine.interrupts import interrupts_deferred
from octavo.llm import LLM
from octavo.params import SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=8)


def press_ctrl_c() -> None:
    os.kill(os.getpid(), signal.SIGINT)


@pytest.fixture(autouse=True)
def _pythons_own_handler():
    former = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, former)


def test_ctrl_c_within_a_step_leaves_the_engine_usable(tiny_folder):
    from octavo.config import EngineConfig
    from octavo.text.tokenizer import load_tokenizer

    runner = FakeRunner()
    llm = LLM.over(runner, load_tokenizer(tiny_folder), EngineConfig(model=str(tiny_folder)))
    (want,) = llm.generate([[1, 2, 3]], GREEDY, use_tqdm=False)
    runner.before_step = lambda plan: press_ctrl_c() if runner.steps == 12 else None
    with pytest.raises(KeyboardInterrupt):
        llm.generate([[4, 5, 6]], GREEDY, use_tqdm=False)
    assert runner.steps == 12, "it stops after the step in which it came"
    (again,) = llm.generate([[1, 2, 3]], GREEDY, use_tqdm=False)
    assert again.outputs[0].token_ids == want.outputs[0].token_ids
    assert llm.engine.stats.running == 0


def test_it_is_raised_where_asked_and_at_the_end():
    with interrupts_deferred() as check:
        check()
        press_ctrl_c()
        with pytest.raises(KeyboardInterrupt):
            check()
        check()
    reached = []

    def block():
        with interrupts_deferred():
            press_ctrl_c()
            reached.append("the end of the block")

    with pytest.raises(KeyboardInterrupt):
        block()
    assert reached
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_the_second_one_acts_at_once():
    reached = []

    def step_that_hangs():
        with interrupts_deferred():
            press_ctrl_c()
            press_ctrl_c()
            reached.append("the end")

    with pytest.raises(KeyboardInterrupt):
        step_that_hangs()
    assert not reached


def test_a_handler_of_the_program_s_own_stays():
    seen = []
    signal.signal(signal.SIGINT, lambda *_: seen.append(1))
    with interrupts_deferred():
        press_ctrl_c()
        assert seen == [1]


def test_other_threads_are_left_alone():
    def run():
        with interrupts_deferred():
            assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        done.set()

    done = threading.Event()
    thread = threading.Thread(target=run)
    thread.start()
    thread.join(10)
    assert done.is_set()
