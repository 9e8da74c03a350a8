"""What uses the installation while faults happen: a thread, and a call that is repeated until it succeeds."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Self, TypeVar

from perdure.errors import Unavailable

T = TypeVar("T")

_LONGEST_S = 300.0
_PAUSE_S = 0.1


class Actor:
    """Runs `act` in a thread within a `with` block, whose end sets `over` and waits for the thread.

    An exception of the thread is raised at the end of the block.
    """

    def __init__(self) -> None:
        self.over = threading.Event()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=type(self).__name__, daemon=True)

    def act(self) -> None:
        """Use the installation until `over` is set."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.over.set()
        self._thread.join(_LONGEST_S)
        assert not self._thread.is_alive(), f"{self._thread.name} has not ended within {_LONGEST_S:g} s"
        if self._failure is not None:
            raise self._failure

    def _run(self) -> None:
        try:
            self.act()
        except BaseException as failure:  # noqa: BLE001 (raised at the end of the block)
            self._failure = failure


def insist(call: Callable[[], T]) -> T:
    """Repeat a call until the database can be reached."""
    while True:
        try:
            return call()
        except Unavailable:
            threading.Event().wait(_PAUSE_S)
