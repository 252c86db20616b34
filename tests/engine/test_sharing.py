"""The lock that is handed over in order, and the thread that steps for all."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from octavo.engine.sharing import FairLock, SharedSteps


def test_threads_get_the_lock_in_their_order():
    lock, got = FairLock(), []

    def wait(name):
        lock.acquire()
        got.append(name)
        lock.release()

    lock.acquire()
    threads = []
    for name in range(5):
        threads.append(threading.Thread(target=wait, args=(name,)))
        threads[-1].start()
        while len(lock._queue) <= name:
            time.sleep(0.001)
    assert not lock.try_acquire()
    lock.release()
    for thread in threads:
        thread.join(10)
    assert got == [0, 1, 2, 3, 4]
    assert lock.try_acquire()
    assert not lock.try_acquire()


def test_the_lock_is_not_taken_twice_by_one_thread_while_another_waits():
    """A thread that steps in a loop must let another one in."""
    lock, rounds, entered = FairLock(), 0, threading.Event()

    def other():
        with_lock = lock.acquire()
        entered.set()
        lock.release()
        return with_lock

    lock.acquire()
    thread = threading.Thread(target=other)
    thread.start()
    while not lock._queue:
        time.sleep(0.001)
    while not entered.is_set() and rounds < 1000:
        rounds += 1
        lock.release()
        lock.acquire()
    lock.release()
    thread.join(10)
    assert rounds <= 2


def test_who_is_interrupted_leaves_the_queue():
    lock = FairLock()
    gate = threading.Lock()
    lock.acquire()
    lock._queue.append(gate)
    lock._leave(gate)
    assert not lock._queue
    lock._leave(threading.Lock())  # had been handed over
    assert lock.try_acquire()


def test_one_thread_steps_for_all():
    count, steppers, lock = 0, set(), threading.Lock()

    def step():
        nonlocal count
        assert lock.acquire(blocking=False)
        steppers.add(threading.get_ident())
        count += 1
        time.sleep(0.0005)
        shared.notify()
        lock.release()

    shared = SharedSteps(step)
    with ThreadPoolExecutor(8) as pool:
        for goal in range(20, 100, 10):
            pool.submit(shared.advance, lambda goal=goal: count >= goal)
    assert 90 <= count <= 100


def test_another_thread_steps_on_when_one_fails():
    count = 0

    def step():
        nonlocal count
        count += 1
        if count == 3:
            raise KeyboardInterrupt
        shared.notify()

    shared = SharedSteps(step)
    done = threading.Event()

    def other():
        with shared._stepper:
            pass
        shared.advance(lambda: count >= 6)
        done.set()

    with shared.exclusive():
        thread = threading.Thread(target=other)
    with pytest.raises(KeyboardInterrupt):
        shared.advance(lambda: count >= 10)
    thread.start()
    assert done.wait(10)


def test_what_comes_during_a_step_is_done_after_it():
    done = []

    def step():
        shared.later(lambda: done.append("during"))
        assert done == ["before"]

    shared = SharedSteps(step)
    shared.later(lambda: done.append("before"))
    assert done == ["before"]
    shared.advance(lambda: len(done) == 2)
    assert done == ["before", "during"]
