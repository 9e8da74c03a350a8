"""Executes a program, optionally under another account and with a parent-death signal.

`command` wraps an argument list so that this file runs first, as a script in an isolated interpreter (about 12 ms). The
script changes the account and the death signal of its own process, and then execs the program. `preexec_fn` of
`subprocess` could make these changes too, but is unsafe if the parent has threads.

This file may import only the standard library, because an isolated interpreter finds no other packages.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

_NONE = "-"
_PR_SET_PDEATHSIG = 1
_PR_SET_KEEPCAPS = 8
_PR_CAP_AMBIENT = 47
_PR_CAP_AMBIENT_RAISE = 2
_LINUX_CAPABILITY_VERSION_3 = 0x20080522


def command(
    argv: Sequence[str],
    *,
    dies_with_parent: bool = False,
    death_signal: signal.Signals | None = None,
    user: tuple[int, int] | None = None,
    capability: int | None = None,
) -> list[str]:
    """The argument list that makes the changes below and then runs `argv`, all in one process.

    Args:
        argv: The program and its arguments.
        dies_with_parent: Make the kernel send SIGTERM to the program when the thread that started it ends (Linux only).
        death_signal: The signal to send instead of SIGTERM; implies `dies_with_parent`.
        user: The `(uid, gid)` to run the program as, without supplementary groups. Needs root.
        capability: The number of the one capability that the program keeps when it runs as `user` (Linux only).
    """
    if dies_with_parent and death_signal is None:
        death_signal = signal.SIGTERM
    parent = f"{os.getpid()}:{death_signal:d}" if death_signal is not None and sys.platform == "linux" else _NONE
    uid, gid = (_NONE, _NONE) if user is None else map(str, user)
    kept = _NONE if capability is None else str(capability)
    script = str(Path(__file__).resolve())
    return [sys.executable, "-I", "-S", script, parent, uid, gid, kept, *argv]


def main(arguments: Sequence[str]) -> None:
    """Make the changes that `command` encoded in the arguments, then exec the program."""
    parent, uid, gid, capability, *argv = arguments
    if uid != _NONE:
        _become(int(uid), int(gid), None if capability == _NONE else int(capability))
    if parent != _NONE:
        _die_with(*map(int, parent.split(":")))  # must come last: a change of account clears the death signal
    try:
        os.execvp(argv[0], argv)  # noqa: S606 - executing another program is the purpose of this file
    except OSError as error:
        sys.exit(f"{argv[0]} cannot be started: {error.strerror}")


def _become(uid: int, gid: int, capability: int | None) -> None:
    if capability is not None:
        _prctl(_PR_SET_KEEPCAPS, 1)
    os.setgroups([])
    os.setresgid(gid, gid, gid)
    os.setresuid(uid, uid, uid)
    if capability is not None:
        _keep_only(capability)
        _prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_RAISE, capability)


def _keep_only(capability: int) -> None:
    """Reduce the effective, permitted and inheritable capability sets to `capability`; see capset(2)."""
    word, bit = divmod(capability, 32)
    sets = [0] * 6
    sets[word * 3 : word * 3 + 3] = [1 << bit] * 3
    header = (ctypes.c_uint32 * 2)(_LINUX_CAPABILITY_VERSION_3, 0)
    data = (ctypes.c_uint32 * 6)(*sets)
    if _libc().capset(ctypes.byref(header), ctypes.byref(data)) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _die_with(parent: int, number: int = signal.SIGTERM) -> None:
    _prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:  # the parent died before prctl took effect
        sys.exit(f"the parent process {parent} has ended")


def _prctl(option: int, *arguments: int) -> None:
    padded = [ctypes.c_ulong(argument) for argument in (*arguments, 0, 0, 0, 0)[:4]]
    if _libc().prctl(option, *padded) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


if __name__ == "__main__":
    main(sys.argv[1:])
