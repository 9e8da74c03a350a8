"""`certify`: plays the schedules of all scenarios on a throw-away stack, and returns the certificate.

SIGTERM and SIGHUP stop it as Ctrl-C does: the servers and workers are ended, and their directory is removed.
"""

from __future__ import annotations

import queue
import signal
import threading
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType

from perdure.certify import scenarios
from perdure.certify.certificate import Certificate
from perdure.certify.judging import Judge
from perdure.certify.schedules import Schedule, schedules_of
from perdure.certify.stack import Played, Stack
from perdure.errors import SettingsError

TOOL_TIMEOUT_S = 1.5

Progress = Callable[[int, int], None]
"""Is shown how many schedules have been played, of how many."""

Choose = Callable[[Schedule], bool]

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class CertificationInterrupted(KeyboardInterrupt):
    """A signal stopped a certification. `certificate` has what was found before."""

    def __init__(self, certificate: Certificate) -> None:
        super().__init__("the certification was stopped before its end")
        self.certificate = certificate


def certify(
    module: str,
    *,
    tools: Collection[str] = (),
    tool_timeout_s: float = TOOL_TIMEOUT_S,
    lanes: int = 1,
    choose: Choose = lambda _: True,
    progress: Progress = lambda _done, _of: None,
) -> Certificate:
    """Kill workers at each boundary of the tools of `module`, and compare what happens with what they declare.

    `module` is the import path of a module with agents, and perhaps a `Certification`. Starts PostgreSQL, Redis and two
    workers in a temporary directory, `lanes` times, and plays each schedule there. The tools run for real, many times.

    `tools` restricts it to tools of these names. `tool_timeout_s` is the time limit of a call; after a kill within a
    call, the certification waits for so long. `choose` leaves out schedules for which it returns False.

    Raises:
        SettingsError: the module cannot be imported, has no agent or no tool, or its `Certification` does not fit it.
        EmbeddedServerError: a server cannot be started.
        StackError: the workers do not start.
        CertificationInterrupted: SIGINT, SIGTERM or SIGHUP arrived in the main thread, and all is stopped.

    Example:
        >>> certify("json")
        Traceback (most recent call last):
            ...
        perdure.errors.SettingsError: the module is 'json': the module defines no Agent (it is ...)
    """
    agents, certification = scenarios.load(module)
    plan = scenarios.plan(agents, certification, tools)
    certificate = Certificate(module, left_out=plan.left_out)
    judge = Judge(certificate, plan.tools)
    if not plan.scenarios:
        return certificate
    if lanes < 1:
        raise SettingsError(f"lanes is {lanes}; accepted: 1 or more")
    with _interruptible(certificate), ExitStack() as stack:
        turns = Path(stack.enter_context(TemporaryDirectory(prefix="perdure-"))) / "turns"
        free: queue.SimpleQueue[Stack] = queue.SimpleQueue()
        for _ in range(lanes):
            free.put(stack.enter_context(Stack.running(module, agents, tool_timeout_s, turns)))
        pool = stack.enter_context(ThreadPoolExecutor(lanes))
        stack.callback(pool.shutdown, cancel_futures=True)
        stopped = threading.Event()
        stack.callback(stopped.set)

        def play(schedule: Schedule) -> Played:
            lane = free.get()
            try:
                return lane.play(schedule, stopped)
            finally:
                free.put(lane)

        calm = [Schedule(agent, scenario) for agent, scenario in plan.scenarios]
        undisturbed = list(zip(calm, pool.map(play, calm), strict=True))
        for schedule, played in undisturbed:
            judge.take(schedule, played)
        wild = [
            schedule
            for at, (one, played) in enumerate(undisturbed)
            if played.turn["status"] == "done"
            for schedule in schedules_of(one.agent, one.scenario, played.notes, played.model_calls, first=at == 0)
            if choose(schedule)
        ]
        wild.sort(key=lambda each: each.events)
        progress(len(calm), len(calm) + len(wild))
        for at, (schedule, played) in enumerate(zip(wild, pool.map(play, wild), strict=True)):
            judge.take(schedule, played)
            progress(len(calm) + at + 1, len(calm) + len(wild))
        judge.note_what_was_not_seen(undisturbed)
    return certificate


@contextmanager
def _interruptible(certificate: Certificate) -> Iterator[None]:
    """Make SIGINT, SIGTERM and SIGHUP leave the block, once. A program's own handlers, and ignored signals, stay."""
    own = [each for each in _SIGNALS if signal.getsignal(each) in {signal.SIG_DFL, signal.default_int_handler}]
    if threading.current_thread() is not threading.main_thread():
        own = []
    before = {each: signal.getsignal(each) for each in own}

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        for each in own:  # the servers are stopped now, within limits of time
            signal.signal(each, signal.SIG_IGN)
        raise KeyboardInterrupt

    try:
        for each in own:
            signal.signal(each, interrupt)
        yield
    except KeyboardInterrupt:
        certificate.complete = False
        raise CertificationInterrupted(certificate) from None
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
