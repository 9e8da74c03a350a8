"""What an execution of a tool changes, as far as the worker can see it.

The author's `world` is compared before and after the execution. Besides, Python's audit events name the files that the
tool opens for writing, renames or removes, whose contents are compared, and the requests that `http.client` or `urllib`
send with another method than GET. The hook sees Python's own functions only: neither drivers written in C nor what
other programs do. It also notes the addresses to which the tool connects, whose effects only a `world` shows.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_LONGEST_SHOWN, _MOST_SHOWN = 400, 6
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_MOVES = {"os.remove": 1, "os.rename": 2, "os.rmdir": 1, "os.mkdir": 1, "os.truncate": 1, "os.link": 2, "os.symlink": 2}
"""The audit events of functions that change the file system, with the number of paths among their arguments."""
_READING = {"GET", "HEAD", "OPTIONS"}
_LOCAL_NAMES = ("__pycache__", "/dev/", "/proc/")


@dataclass(slots=True)
class Watch:
    """One execution: the files that it touches, with their contents before, and its requests and connections."""

    files: dict[str, str | None] = field(default_factory=dict)
    requests: set[str] = field(default_factory=set)
    connections: set[str] = field(default_factory=set)
    looking: bool = False

    def changed_files(self) -> list[str]:
        """The files whose contents differ from those before the execution."""
        return sorted(path for path, before in self.files.items() if _content(path) != before)

    def see(self, event: str, arguments: tuple[Any, ...]) -> None:
        """Take an audit event."""
        match event, arguments:
            case "open", (path, _, int() as flags) if flags & _WRITING:
                self._touch(path)
            case "sqlite3.connect", (path, *_):
                self._touch(path)
            case "urllib.Request", (url, _, _, method):
                self._request(method, url)
            case "http.client.send", (_, data):
                self._raw_request(data)
            case "socket.connect", (_, address):
                self.connections.add(_address(address))
            case _:
                for path in arguments[: _MOVES.get(event, 0)]:
                    self._touch(path)

    def _touch(self, path: object) -> None:
        if isinstance(path, str | bytes | os.PathLike):
            name = os.path.abspath(os.fsdecode(path))  # noqa: PTH100 (a Path would resolve links)
            if not any(each in name for each in _LOCAL_NAMES):
                self.files.setdefault(name, _content(name))

    def _raw_request(self, data: object) -> None:
        head = bytes(data[:_LONGEST_SHOWN]) if isinstance(data, bytes | bytearray | memoryview) else b""
        words = head.partition(b"\r\n")[0].decode("latin-1").split(" ")
        if words[-1].startswith("HTTP/") and len(words) > 1:
            self._request(words[0], words[1])

    def _request(self, method: str | None, url: str) -> None:
        if method is not None and method.upper() not in _READING:
            self.requests.add(f"{method.upper()} {url.partition('?')[0][:_LONGEST_SHOWN]}")


_current: ContextVar[Watch | None] = ContextVar("perdure_watched", default=None)


def install() -> None:
    """Install the audit hook of this process. It cannot be removed."""
    sys.addaudithook(_audit)


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    watch = _current.get(None)
    if watch is None or watch.looking:
        return
    watch.looking = True  # reading a file raises events, too
    try:
        watch.see(event, arguments)
    finally:
        watch.looking = False


def watched(work: Callable[[], str], watch: Watch) -> str:
    """Run `work` under a watch."""
    token = _current.set(watch)
    try:
        return work()
    finally:
        _current.reset(token)


@contextmanager
def unwatched() -> Iterator[None]:
    """See nothing of the block: it belongs to the certification, not to the tool."""
    token = _current.set(None)
    try:
        yield
    finally:
        _current.reset(token)


def picture(world: Callable[[], Any] | None) -> list[str]:
    """The author's world as lines of JSON: one for each member, if it is an object or a list. Empty without a world.

    >>> picture(lambda: {"b": 1, "a": [2]})
    ['"a": [2]', '"b": 1']
    """
    if world is None:
        return []
    found = json.loads(json.dumps(world(), sort_keys=True, default=repr))
    if isinstance(found, dict):
        return [f"{json.dumps(name, ensure_ascii=False)}: {_shown(value)}" for name, value in found.items()]
    return [_shown(each) for each in (found if isinstance(found, list) else [found])]


def difference(before: list[str], after: list[str]) -> str:
    """The first changed lines of a world; empty if it is unchanged.

    >>> difference(["1", "2"], ["1", "3"])
    '- 2, + 3'
    """
    was, became = Counter(before), Counter(after)
    changed = [f"- {each}" for each in (was - became).elements()] + [f"+ {each}" for each in (became - was).elements()]
    more = f", and {len(changed) - _MOST_SHOWN} more" if len(changed) > _MOST_SHOWN else ""
    return ", ".join(each[:_LONGEST_SHOWN] for each in changed[:_MOST_SHOWN]) + more


def _shown(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def _content(path: str) -> str | None:
    try:
        if Path(path).is_dir():
            return "a directory"
        return hashlib.sha256(Path(path).read_bytes()).hexdigest()
    except OSError:
        return None


def _address(address: object) -> str:
    match address:
        case (str() | bytes() as host, int() as port, *_):
            return f"{host if isinstance(host, str) else os.fsdecode(host)}:{port}"
        case bytes():
            return os.fsdecode(address)
        case _:
            return str(address)
