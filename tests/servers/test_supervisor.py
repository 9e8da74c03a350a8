"""The supervisor restarts and stops its processes. The tests use real processes and signals."""

import asyncio
import io
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from perdure.servers.supervisor import Backoff, SupervisedProcess, _Child, _Printer
from tests.servers.conftest import Program

Start = Callable[..., Program]

# A program that supervises the processes that its first argument defines.
SUPERVISE = """
import asyncio, sys
from pathlib import Path
from perdure.servers.supervisor import Backoff, SupervisedProcess, run
def python(name, source, **more):
    return SupervisedProcess(name, [sys.executable, "-u", "-c", source, *sys.argv[2:]], **more)
POLITE = '''
import os, signal, sys
def leave(number, frame):
    print("leaving", flush=True)
    sys.exit(0)
signal.signal(signal.SIGTERM, leave)
print("is", os.getpid(), flush=True)
while True:
    signal.pause()
'''
EITHER = POLITE.replace("signal.SIGTERM, leave)", "signal.SIGTERM, leave); signal.signal(signal.SIGINT, leave)")
# Python runs the handlers of two pending signals in the order of their numbers: SIGINT first.
SLOW = '''
import os, signal, sys
def leave(number, frame):
    print("leaving", flush=True)
    sys.exit(0)
def dawdle(number, frame):
    print("takes its time", flush=True)
signal.signal(signal.SIGTERM, dawdle)
signal.signal(signal.SIGINT, leave)
print("is", os.getpid(), flush=True)
while True:
    signal.pause()
'''
DEAF = '''
import os, signal, subprocess, sys
signal.signal(signal.SIGTERM, signal.SIG_IGN)
signal.signal(signal.SIGINT, lambda number, frame: print("gets a second signal", flush=True))
child = subprocess.Popen(["sleep", "600"])
print("is", os.getpid(), child.pid, flush=True)
while True:
    signal.pause()
'''
def ready():
    print("all ready", flush=True)
processes = eval(sys.argv[1])
sys.exit(run(processes, on_ready=ready, backoff=Backoff(first_s=0.01)))
"""


def has_ended(pid: int) -> bool:
    """Wait up to 20 s for a process to end; returns whether it ended. It need not be a child of this process."""
    try:
        psutil.Process(pid).wait(20)
    except psutil.NoSuchProcess:
        return True
    except psutil.TimeoutExpired:
        return False
    return True


@given(deaths=st.integers(1, 10**6), first=st.floats(0.001, 60), cap=st.floats(0.001, 3600))
def test_a_delay_doubles_up_to_its_cap(deaths: int, first: float, cap: float) -> None:
    """The delay before a restart doubles with each consecutive death, up to a cap."""
    backoff = Backoff(first_s=first, cap_s=cap)
    delay = backoff.delay_s(deaths)
    assert 0 < delay <= cap
    assert delay == pytest.approx(min(cap, first * 2 ** min(deaths - 1, 64)))
    assert backoff.delay_s(deaths + 1) in (pytest.approx(2 * delay), cap)


@given(before=st.integers(0, 10**6), lived=st.floats(0, 10**6))
def test_a_long_run_resets_the_delay(before: int, lived: float) -> None:
    """If a process ran at least `reset_after_s` seconds, its death counts as the first one again."""
    backoff = Backoff(reset_after_s=60)
    assert backoff.deaths(before, lived) == (1 if lived >= 60 else before + 1)


def test_the_documented_delays() -> None:
    """The default delays equal those in the documentation."""
    assert [Backoff().delay_s(n) for n in range(1, 8)] == [1, 2, 4, 8, 16, 30, 30]


@pytest.mark.long
def test_a_killed_process_is_restarted(program: Start) -> None:
    """A process that was killed is started again."""
    supervisor = program(SUPERVISE, "[python('worker', POLITE)]")
    first = int(supervisor.until("is").split()[-1])
    os.kill(first, signal.SIGKILL)
    supervisor.until("ended by signal 9; restarting it in 0.01 s")
    assert int(supervisor.until("is").split()[-1]) != first
    supervisor.process.terminate()
    assert supervisor.ends() == 0


def test_a_process_that_refuses_its_settings_stops_all(program: Start) -> None:
    """If a process refuses its settings, the supervisor stops all processes and exits with that process's status."""
    refuses = "print('perdure: PERDURE_X is wrong', flush=True); raise SystemExit(2)"
    supervisor = program(
        SUPERVISE, f"[python('worker', POLITE, final_status=2), python('beat', {refuses!r}, final_status=2)]"
    )
    supervisor.until("ended with status 2, which a restart does not change; stopping")
    assert supervisor.ends() == 2
    assert supervisor.lines[-1].split(" | ") == ["beat  ", "perdure: PERDURE_X is wrong"]
    assert not [line for line in supervisor.lines if "restarting it" in line]


def test_another_status_is_followed_by_a_restart(program: Start) -> None:
    """A process that exits with a status other than its `final_status` is restarted."""
    supervisor = program(SUPERVISE, "[python('beat', 'raise SystemExit(3)', final_status=2)]")
    supervisor.until("ended with status 3; restarting it in 0.01 s")
    supervisor.process.terminate()
    assert supervisor.ends() == 0


def test_a_closed_terminal_stops_no_supervisor_that_ignores_it(program: Start) -> None:
    """Under `nohup`, which ignores SIGHUP, the supervisor goes on when its terminal is closed."""
    ignoring = "import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN)\n"
    supervisor = program(ignoring + SUPERVISE, "[python('worker', POLITE)]")
    first = int(supervisor.until("is").split()[-1])
    supervisor.process.send_signal(signal.SIGHUP)
    os.kill(first, signal.SIGKILL)
    supervisor.until("ended by signal 9; restarting it in 0.01 s")
    supervisor.until("is")
    supervisor.process.terminate()
    assert supervisor.ends() == 0


@pytest.mark.long
def test_children_are_stopped_rank_by_rank(program: Start) -> None:
    """Processes stop in the order of `stop_rank`, so that Beat and the gateway hand no work to stopping workers."""
    supervisor = program(
        SUPERVISE,
        "[python('last', POLITE, stop_rank=2), python('first', POLITE), python('middle', POLITE, stop_rank=1)]",
    )
    for _ in range(3):
        supervisor.until(" is ")
    supervisor.process.send_signal(signal.SIGINT)
    assert supervisor.ends() == 0
    assert [line.split()[0] for line in supervisor.lines if "leaving" in line] == ["first", "middle", "last"]


@pytest.mark.long
def test_a_process_that_does_not_end_is_killed_with_its_children(program: Start) -> None:
    """A process that does not end in time is killed together with its children, which could keep a port open."""
    supervisor = program(SUPERVISE, "[python('deaf', DEAF, stop_within_s=0.1), python('polite', POLITE, stop_rank=1)]")
    deaf = next(line for line in (supervisor.until(" is "), supervisor.until(" is ")) if line.startswith("deaf"))
    pids = [int(word) for word in deaf.split()[-2:]]
    supervisor.process.terminate()
    assert supervisor.ends() == 1
    assert any("leaving" in line for line in supervisor.lines)
    assert all(has_ended(pid) for pid in pids)


@pytest.mark.long
def test_a_second_signal_hastens(program: Start) -> None:
    """On a second Ctrl-C, the supervisor sends SIGINT to the processes that still run, so that they end sooner."""
    supervisor = program(SUPERVISE, "[python('slow', SLOW, stop_within_s=600), python('later', EITHER, stop_rank=1)]")
    for _ in range(2):
        supervisor.until(" is ")
    supervisor.process.send_signal(signal.SIGINT)
    supervisor.until("takes its time")
    supervisor.process.send_signal(signal.SIGINT)
    assert supervisor.ends() == 0
    leaving = dict.fromkeys(line.split()[0] for line in supervisor.lines if "leaving" in line)
    assert list(leaving) == ["slow", "later"]


@pytest.mark.long
def test_a_third_signal_kills(program: Start) -> None:
    """A third Ctrl-C kills all processes at once."""
    supervisor = program(SUPERVISE, "[python('deaf', DEAF, stop_rank=1, stop_within_s=600), python('polite', POLITE)]")
    printed = [supervisor.until(" is "), supervisor.until(" is ")]
    supervisor.process.send_signal(signal.SIGINT)
    supervisor.until("leaving")
    supervisor.process.send_signal(signal.SIGINT)
    supervisor.until("gets a second signal")
    supervisor.process.send_signal(signal.SIGINT)
    assert supervisor.ends() == 1
    deaf = next(line for line in printed if line.startswith("deaf"))
    assert all(has_ended(int(word)) for word in deaf.split()[-2:])


@pytest.mark.long
def test_the_children_of_a_dead_process_are_killed(program: Start) -> None:
    """When a process dies, the supervisor kills that process's children, so that none runs next to the new process."""
    orphaning = "import subprocess, os; p = subprocess.Popen(['sleep', '600']); print('is', p.pid); os._exit(7)"
    supervisor = program(SUPERVISE, f"[python('worker', {orphaning!r})]")
    grandchild = int(supervisor.until(" is ").split()[-1])
    supervisor.until("ended with status 7")
    assert has_ended(grandchild)
    supervisor.process.terminate()
    assert supervisor.ends() == 0


@pytest.mark.long
def test_children_do_not_outlive_a_killed_supervisor(program: Start, tmp_path: Path) -> None:
    """If the supervisor is killed, its processes end, so that the next `perdure up` does not run them twice."""
    supervisor = program(SUPERVISE, "[python('worker', POLITE)]")
    pid = int(supervisor.until(" is ").split()[-1])
    assert os.getsid(pid) == pid
    supervisor.process.kill()
    assert has_ended(pid)


def test_readiness_is_reported_once_when_all_are_ready(program: Start, tmp_path: Path) -> None:
    """The supervisor calls `on_ready` once, when all processes are ready. A restart causes no second call."""
    fifo = tmp_path / "go"
    os.mkfifo(fifo)
    probe = "lambda: asyncio.to_thread(Path(sys.argv[2]).read_bytes)"
    supervisor = program(SUPERVISE, f"[python('slow', POLITE, ready={probe}), python('quick', POLITE)]", fifo)
    printed = [supervisor.until(" is "), supervisor.until(" is ")]
    assert "all ready" not in supervisor.lines
    fifo.write_bytes(b"go")
    supervisor.until("all ready")
    quick = next(line for line in printed if line.startswith("quick"))
    os.kill(int(quick.split()[-1]), signal.SIGKILL)
    supervisor.until(" is ")
    supervisor.process.terminate()
    assert supervisor.ends() == 0
    assert supervisor.lines.count("all ready") == 1


@pytest.mark.long
def test_any_output_passes_through_line_by_line(program: Start) -> None:
    """The supervisor prints partial lines, invalid UTF-8 and very long lines. None of them blocks a process."""
    noisy = (
        r"import os, signal; os.write(1, b'a\xffb\n' + b'x' * 200_000 + b'\n');"
        r"os.write(1, b'done\nhalf'); signal.pause()"
    )
    supervisor = program(SUPERVISE, f"[python('noisy', {noisy!r})]")
    supervisor.until("noisy | done")
    supervisor.process.terminate()
    assert supervisor.ends() == 0
    assert "noisy | a\ufffdb" in supervisor.lines
    assert "noisy | half" in supervisor.lines
    assert sum(line.count("x") for line in supervisor.lines) == 200_000


@pytest.mark.long
def test_a_missing_program_is_reported_by_name(program: Start) -> None:
    """If a program cannot be found, the supervisor prints its name and the reason."""
    supervisor = program(SUPERVISE, "[SupervisedProcess('typo', ['perdure-no-such-program'])]")
    assert (
        supervisor.until("cannot be started")
        == "typo | perdure-no-such-program cannot be started: No such file or directory"
    )
    supervisor.process.terminate()
    assert supervisor.ends() == 0


@pytest.mark.long
def test_a_closed_output_ends_the_supervisor(program: Start, tmp_path: Path) -> None:
    """The supervisor ends when the reader of its output ends, as in `perdure up | head`."""
    reading, writing = os.pipe()
    to_pipe = f"import sys; sys.stdout = open('/proc/{os.getpid()}/fd/{writing}', 'w');"
    supervisor = program(to_pipe + SUPERVISE, "[python('chatty', 'while True: print(1, flush=True)')]")
    assert os.read(reading, 1)
    os.close(reading)
    os.close(writing)
    assert supervisor.ends() == 0


@pytest.mark.parametrize("act", [_Child.terminate, _Child.hasten, _Child.kill])
def test_a_signal_to_a_process_that_has_just_exited_is_harmless(act: Callable[[_Child], None]) -> None:
    """A process may exit after the stop has begun and before the supervisor handles its SIGCHLD."""

    async def stopped() -> int:
        child = _Child(
            SupervisedProcess("brief", [sys.executable, "-c", ""]), _Printer(["brief"], io.StringIO(), lambda: None)
        )
        os.waitid(os.P_PID, child._popen.pid, os.WEXITED | os.WNOWAIT)  # noqa: ASYNC222 (no other task runs)
        act(child)
        child.reap_if_ended()
        assert child.ended.is_set()
        return child.status

    assert asyncio.run(stopped()) == 0
