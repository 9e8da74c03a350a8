"""Threads for blocking work outside the gateway's event loop."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from perdure.channels.http.threads import _CHECK_S, _USUAL, Threads

MOST = 12

_PATIENCE_S = 30.0


@contextmanager
def pool() -> Iterator[Threads]:
    """A pool of threads that is closed after the block."""
    made = Threads(MOST)
    yield made
    made.close()


def test_each_caller_gets_its_own_result() -> None:
    """A thousand concurrent calls share a few threads. Each call gets its own result, and no thread remains."""
    before, names = set(threading.enumerate()), set()

    def work(number: int) -> int:
        names.add(threading.current_thread().name)
        if number % 7 == 0:
            raise ValueError(number)
        return number

    async def main() -> list[int | BaseException]:
        with pool() as threads:
            return await asyncio.gather(
                *(threads.run(lambda number=number: work(number)) for number in range(1_000)),  # type: ignore[misc]
                return_exceptions=True,
            )

    found = asyncio.run(main())

    assert [str(each) for each in found] == [str(number) for number in range(1_000)]
    assert all(isinstance(each, ValueError) for each in found[::7])
    assert 1 <= len(names) <= MOST
    assert set(threading.enumerate()) <= before


def test_the_loop_continues_while_a_call_blocks() -> None:
    """Other calls return while one call blocks."""
    release = threading.Event()

    async def main() -> list[object]:
        with pool() as threads:
            stuck = asyncio.ensure_future(threads.run(lambda: release.wait(_PATIENCE_S)))
            found: list[object] = [await threads.run(lambda: "answered"), stuck.done()]
            release.set()
            return [*found, await stuck]

    assert asyncio.run(main()) == ["answered", False, True]


def test_extra_threads_start_while_calls_queue_and_end_afterwards() -> None:
    """If all permanent threads are busy, the pool starts extra threads, so that slow calls do not delay other calls.

    The pool has at most `MOST` threads. The extra threads end when no call waits.
    """
    release = threading.Event()

    def extra() -> list[threading.Thread]:
        return [each for each in threading.enumerate() if each.name == "gateway-extra"]

    async def main() -> tuple[str, int, list[bool]]:
        with pool() as threads:
            stuck = [asyncio.ensure_future(threads.run(lambda: release.wait(_PATIENCE_S))) for _ in range(MOST - 1)]
            await asyncio.sleep(0)  # let the loop submit them
            answered = await threads.run(lambda: "answered")
            most = len(extra())
            release.set()
            results = await asyncio.gather(*stuck)
            for each in extra():
                each.join(_PATIENCE_S)
            again = [asyncio.ensure_future(threads.run(lambda: True)) for _ in range(MOST)]
            return answered, most, [*results, *await asyncio.gather(*again)]

    answered, most, results = asyncio.run(main())

    assert answered == "answered"
    assert most >= MOST - 1 - _USUAL
    assert all(results)
    assert extra() == []


def test_a_caller_that_is_cancelled_takes_nothing_from_the_others() -> None:
    """A cancelled caller's work continues, because a thread cannot be stopped. The work's result is dropped."""
    release, ended = threading.Event(), threading.Event()

    def work() -> None:
        release.wait(_PATIENCE_S)
        ended.set()

    async def main() -> str:
        with pool() as threads:
            gone = asyncio.ensure_future(threads.run(work))
            await asyncio.sleep(0)
            gone.cancel()
            with pytest.raises(asyncio.CancelledError):
                await gone
            release.set()
            return await threads.run(lambda: "answered")

    assert asyncio.run(main()) == "answered"
    assert ended.wait(_PATIENCE_S)


def test_cancelled_callers_add_no_threads() -> None:
    """The limit counts the threads whose caller was cancelled, so clients that disconnect cannot exhaust threads."""
    release = threading.Event()

    async def main() -> int:
        others = set(threading.enumerate())
        with pool() as threads:
            for _ in range(4):
                gone = [asyncio.ensure_future(threads.run(lambda: release.wait(_PATIENCE_S))) for _ in range(MOST)]
                await asyncio.wait(gone, timeout=3 * _CHECK_S)
                for each in gone:
                    each.cancel()
            most = sum(each.name.startswith("gateway-") for each in set(threading.enumerate()) - others)
            release.set()
            return most

    assert asyncio.run(main()) <= MOST


@pytest.mark.long
def test_a_thread_that_hangs_ends_with_the_process() -> None:
    """`close` waits for a hanging thread for about a second, and the interpreter does not wait for it at all."""
    release = threading.Event()

    async def main() -> tuple[float, bool]:
        others = set(threading.enumerate())
        threads = Threads(MOST)
        stuck = asyncio.ensure_future(threads.run(lambda: release.wait(_PATIENCE_S)))
        await asyncio.sleep(0)
        (thread,) = (each for each in set(threading.enumerate()) - others if each.name.startswith("gateway-"))
        began = time.monotonic()
        threads.close()
        took = time.monotonic() - began
        stuck.cancel()
        release.set()
        return took, thread.daemon

    took, daemon = asyncio.run(main())

    assert took < _PATIENCE_S / 2
    assert daemon


def test_no_error_of_the_work_stops_the_delivery() -> None:
    """If the work raises `StopIteration`, its caller gets `RuntimeError`. Later calls still get their results."""

    def work() -> None:
        raise StopIteration

    async def main() -> str:
        with pool() as threads:
            with pytest.raises(RuntimeError, match="StopIteration"):
                await threads.run(work)
            return await threads.run(lambda: "answered")

    assert asyncio.run(main()) == "answered"
