"""Engines in threads of this process in place of processes: started at once, and held at will.

Everything but the process is real: sockets, messages, the engine's loop, scheduler and KV manager.
"""

import asyncio
import contextlib
import os
import sys
import threading
from dataclasses import replace

import zmq

from octavo.core.policy_registry import create_policy
from octavo.engine.engine import Engine
from octavo.engine.fake import FakeRunner
from octavo.engine.launcher import LocalLauncher
from octavo.engine.messages import Dead, Fault, Ready
from octavo.engine.process import LocalEnds, Loop, Outbox, _beat


class Place(LocalLauncher):
    """One engine. loads, steps: events without which it does not load, or step. limits: of its
    runner that differ. fails: raised in place of the load."""

    def __init__(self, fails=None, **limits):
        super().__init__()
        self.loads, self.steps = threading.Event(), threading.Event()
        self.loads.set()
        self.steps.set()
        self.fails, self.limits = fails, limits
        self.engine, self.exit_code = None, None
        self.thread = None
        self.pid = os.getpid()

    async def start(self, launch, exited):
        self.loop, self.exited, self.launch = asyncio.get_running_loop(), exited, launch
        self.parent, self.held = os.pipe()
        self.thread = threading.Thread(target=self._run)
        self.thread.start()
        return self

    async def kill(self):
        self.die()
        await asyncio.to_thread(self.thread.join)

    def die(self, how="its process ended with signal SIGKILL"):
        """End without a word, as by SIGKILL."""
        if self.exit_code is None:
            self.how = how
            self.exit_code = -9
            with contextlib.suppress(OSError):
                os.close(self.held)
            self.loads.set()
            self.steps.set()

    def _run(self):
        context = zmq.Context()
        ends, done = LocalEnds(context), threading.Event()
        sockets = [ends.outbox(self.launch.outbox) for _ in range(2)]
        outbox, inbox = Outbox(sockets[0]), ends.inbox(self.launch.inbox)
        beat = threading.Thread(target=_beat, args=(Outbox(sockets[1]), done))
        try:
            self.loads.wait()
            if self.exit_code is None:
                if self.fails:
                    raise self.fails
                self.engine = self._engine()
                outbox.send(Ready(self.engine.capabilities))
                beat.start()
                with open(self.parent, "rb", closefd=False) as parent:
                    Loop(self.engine, inbox, outbox, parent).run()
                self.engine.close()
        except BaseException as error:  # noqa: BLE001 - SystemExit, from `wait`, too
            if self.exit_code is None:
                outbox.send(Dead(Fault.of(error)))
        done.set()
        if beat.is_alive():
            beat.join()
        os.close(self.parent)
        inbox.close(0)
        for socket in sockets:
            socket.close(1000 if self.exit_code is None else 0)
        context.term()
        if self.exit_code is None:
            os.close(self.held)
            self.exit_code, self.how = 0, "its process ended with exit code 0"
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self.loop.call_soon_threadsafe(self.exited, self.how)

    def _engine(self):
        def wait(plan):
            self.steps.wait()
            if self.exit_code is not None:
                raise SystemExit

        runner = FakeRunner(before_step=wait)
        runner.limits = replace(runner.limits, **self.limits)
        config = self.launch.config.with_(max_waiting=sys.maxsize)
        return Engine(config, runner, create_policy(config.scheduler))
