"""What a worker sees of an execution: files, requests, connections."""

from __future__ import annotations

import http.client
import json
import os
import sqlite3
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import closing
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from perdure.certify import watching
from perdure.certify.worker import EXECUTIONS, Journal


@pytest.fixture(scope="module", autouse=True)
def hook() -> None:
    """The audit hook, which stays installed in this process."""
    watching.install()


@pytest.fixture
def address() -> Iterator[str]:
    """A web server that answers each request with 204."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(204)
            self.end_headers()

        do_POST = do_GET  # noqa: N815 (the name that the server calls)

        def log_message(self, *_: Any) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def _seen(work: Any) -> watching.Watch:
    watch = watching.Watch()
    watching.watched(lambda: str(work()), watch)
    return watch


def test_files_whose_contents_change_are_seen(tmp_path: Path) -> None:
    """A file that is written, removed or renamed; not one that is read, or written as it was."""
    for name in ("read", "removed", "renamed", "same"):
        (tmp_path / name).write_text(name)

    def work() -> None:
        (tmp_path / "read").read_text()
        (tmp_path / "removed").unlink()
        (tmp_path / "renamed").rename(tmp_path / "new")
        (tmp_path / "same").write_text("same")
        (tmp_path / "gone").write_text("a temporary file")
        (tmp_path / "gone").unlink()
        with closing(sqlite3.connect(tmp_path / "database")) as connection:
            connection.execute("CREATE TABLE orders (article text)")
        (tmp_path / "directory").mkdir()

    changed = [os.path.relpath(each, tmp_path) for each in _seen(work).changed_files()]
    assert changed == ["database", "directory", "new", "removed", "renamed"]


def test_requests_that_may_change_something_are_seen(address: str) -> None:
    """A POST of `http.client`, as `requests` sends it, and of `urllib`; a GET only as a connection."""

    def read() -> None:
        urllib.request.urlopen(f"http://{address}/price").close()

    def write() -> None:
        connection = http.client.HTTPConnection(address)
        connection.request("POST", "/orders", body=b"ink")
        connection.getresponse().close()
        connection.close()

    assert (_seen(read).requests, _seen(read).connections) == (set(), {address})
    assert _seen(write).requests == {"POST /orders"}


def test_only_the_watched_execution_is_seen(tmp_path: Path) -> None:
    """Neither what happens outside of it, nor in another thread of the worker."""
    watch = watching.Watch()
    (tmp_path / "before").write_text("before")

    def elsewhere() -> str:
        thread = threading.Thread(target=lambda: (tmp_path / "elsewhere").write_text("elsewhere"))
        thread.start()
        thread.join()
        return ""

    def of_the_certification() -> str:
        with watching.unwatched():
            (tmp_path / "journal").write_text("a commit")
        return ""

    watching.watched(elsewhere, watch)
    watching.watched(of_the_certification, watch)
    assert watch.changed_files() == []


def test_a_world_is_compared_by_its_contents() -> None:
    """The order of members does not count; a change names the members that differ."""
    world: dict[str, Any] = {"b": 1, "a": {2}}
    before = watching.picture(lambda: world)
    assert watching.picture(lambda: dict(reversed(world.items()))) == before
    world["b"] = 2
    assert watching.difference(before, watching.picture(lambda: world)) == '- "b": 1, + "b": 2'
    assert watching.difference(before, before) == ""
    assert watching.difference([], [str(each) for each in range(9)]).endswith(", + 5, and 3 more")
    assert (watching.picture(None), watching.picture(lambda: [1, "a"])) == ([], ["1", '"a"'])


def _run(place: Path, lane: str, work: Any, world: Any = None, longest_s: float = 10.0) -> None:
    directory = place / lane
    directory.mkdir()
    journal = Journal(directory, lambda: world, place / "turns", longest_s)
    journal.execute(SimpleNamespace(name=lane), SimpleNamespace(turn_id=1, effect_id=2), work)  # type: ignore[arg-type]


def test_a_change_is_that_of_one_execution(tmp_path: Path) -> None:
    """Two lanes change one world: the pure tool of one lane waits for the tool of the other, and sees no change."""
    counted, working = [0], threading.Event()

    def count() -> str:
        working.set()
        time.sleep(0.3)
        counted[0] += 1
        return "counted"

    other = threading.Thread(target=_run, args=(tmp_path, "changing", count, counted))
    other.start()
    assert working.wait(10)
    _run(tmp_path, "pure", lambda: "nothing", counted)
    other.join()
    lines = {lane: (tmp_path / lane / EXECUTIONS).read_text().splitlines()[-1] for lane in ("changing", "pure")}
    assert json.loads(lines["changing"])["changed"] == ["the world: - 0, + 1"]
    assert json.loads(lines["pure"])["changed"] == []


def test_a_tool_that_does_not_end_holds_up_no_other(tmp_path: Path) -> None:
    """Its turn ends with its time limit, although its thread goes on."""
    working, over = threading.Event(), threading.Event()

    def hang() -> str:
        working.set()
        return str(over.wait(60))

    other = threading.Thread(target=_run, args=(tmp_path, "hung", hang, None, 0.2))
    other.start()
    assert working.wait(10)
    _run(tmp_path, "pure", lambda: "nothing")
    assert other.is_alive()
    over.set()
    other.join()
