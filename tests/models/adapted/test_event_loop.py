"""The event loop of the process: work on it, its end, and forks."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import anyio
import anyio.to_thread
import pytest

from perdure.clock import SystemClock
from perdure.errors import DeadlineExceeded
from perdure.models.adapted import event_loop
from perdure.models.adapted.event_loop import WaitingThread, run
from perdure.models.protocol import CallAborted, ModelCall


@pytest.fixture(autouse=True)
def own_loop() -> Iterator[None]:
    yield
    event_loop.close()


def call(timeout_s: float = 30.0) -> ModelCall:
    return ModelCall(SystemClock(), timeout_s)


async def where(_: WaitingThread) -> int:
    return threading.get_ident()


def test_all_threads_share_one_loop() -> None:
    """A model's connections belong to one loop, so there is one in the process, in a thread of its own."""
    with ThreadPoolExecutor(8) as pool:
        threads = set(pool.map(lambda _: run(where, call()), range(32)))
    assert len(threads) == 1
    assert threading.get_ident() not in threads


def test_posted_jobs_run_in_order_in_the_waiting_thread() -> None:
    """Streamed text is published by the turn's thread, because publishing may block."""
    seen: list[tuple[int, int]] = []

    async def work(waiting: WaitingThread) -> str:
        for number in range(50):
            waiting.post(lambda number=number: seen.append((number, threading.get_ident())))  # type: ignore[misc]
        return "done"

    assert run(work, call()) == "done"
    assert seen == [(number, threading.get_ident()) for number in range(50)]


def test_a_failed_job_cancels_the_work() -> None:
    """A failure in the thread, such as of a publication, ends the work, whose result nobody would take."""
    cancelled = threading.Event()

    async def work(waiting: WaitingThread) -> None:
        waiting.post(lambda: int("x"))
        try:
            await asyncio.sleep(60)
        finally:
            cancelled.set()

    with pytest.raises(ValueError, match="invalid literal"):
        run(work, call())
    assert cancelled.wait(5)


def test_the_error_of_the_work_is_raised() -> None:
    async def work(_: WaitingThread) -> None:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        run(work, call())


def test_an_abort_cancels_the_work_and_frees_the_thread_at_once() -> None:
    """Cleaning up may take time, for which the thread does not wait."""
    begun, cancelled = threading.Event(), threading.Event()

    async def work(_: WaitingThread) -> None:
        begun.set()
        try:
            await asyncio.sleep(60)
        finally:
            cancelled.set()
            await asyncio.sleep(0.5)

    ended = call()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(run, work, ended)
        assert begun.wait(5)
        began = time.monotonic()
        ended.abort()
        assert isinstance(waiting.exception(5), CallAborted)
        assert time.monotonic() - began < 0.4
    assert cancelled.wait(5)


def test_the_deadline_ends_work_that_does_not_answer() -> None:
    """The waiting thread itself watches the deadline, even if the work blocks the loop."""

    async def work(_: WaitingThread) -> None:
        time.sleep(0.5)  # noqa: ASYNC251 (the fault under test)

    with pytest.raises(DeadlineExceeded):
        run(work, call(0.1))


def test_an_ended_call_starts_no_work() -> None:
    ended = call()
    ended.abort()

    async def work(_: WaitingThread) -> None:
        raise AssertionError("it ran")

    with pytest.raises(CallAborted):
        run(work, ended)


FORK = """
import os, threading
from perdure.clock import SystemClock
from perdure.models.adapted.event_loop import run
from perdure.models.protocol import ModelCall

async def where(_):
    return threading.get_native_id()

def ask():
    return run(where, ModelCall(SystemClock(), 10))

first = ask()
child = os.fork()
if child == 0:
    os._exit(0 if ask() not in (first, threading.get_native_id()) else 1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
assert ask() == first
"""


@pytest.mark.long
def test_a_forked_child_has_a_loop_of_its_own() -> None:
    """The parent's loop has no thread in the child, and closing it there would break the parent's."""
    program = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", FORK]
    assert subprocess.run(program, timeout=60, check=False).returncode == 0


def test_more_than_forty_synchronous_calls_run_at_once() -> None:
    """A synchronous client, such as Bedrock's, and synchronous tools must not limit a worker to 40 turns."""
    arrived = threading.Barrier(60, timeout=20)

    async def work(_: WaitingThread) -> None:
        async with anyio.create_task_group() as group:
            for _each in range(60):
                group.start_soon(partial(anyio.to_thread.run_sync, arrived.wait))

    run(work, call())


def test_close_ends_the_work_and_the_thread() -> None:
    """When the process ends, no connection stays open. Work after that starts another loop."""
    begun, cancelled = threading.Event(), threading.Event()

    async def work(_: WaitingThread) -> None:
        begun.set()
        try:
            await asyncio.sleep(60)
        finally:
            cancelled.set()

    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(run, work, call())
        assert begun.wait(5)
        loop = event_loop.running()
        event_loop.close()
        assert isinstance(waiting.exception(5), CallAborted)
    assert cancelled.is_set()
    assert loop.is_closed()
    assert run(where, call())


def test_work_that_exits_ends_no_other_work() -> None:
    """Asyncio raises `SystemExit` out of the loop, which then goes on."""

    async def leave(_: WaitingThread) -> None:
        raise SystemExit

    async def answer(_: WaitingThread) -> str:
        return "hi"

    event_loop.close()  # so that the work is the first of a loop
    for _ in range(2):
        with pytest.raises(SystemExit):
            run(leave, call())
        assert run(answer, call()) == "hi"
