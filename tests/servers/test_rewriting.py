"""A rewrite removes deleted data from the append-only file of the embedded Redis."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import redis as redis_py

from perdure.errors import Unavailable
from perdure.servers import redis, rewriting
from perdure.servers.lifecycle import Running
from perdure.servers.rewriting import AppendOnlyFile
from tests.processes.faults import wait_until

SECRET = b"zyxomma"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Running]:
    """A Redis for this test."""
    with redis.start(tmp_path) as running:
        yield running


@pytest.fixture
def client(server: Running) -> Iterator[Any]:
    """A connection to the embedded Redis."""
    made = redis_py.Redis.from_url(redis.client_url(server.url))
    yield made
    made.close()


def _holds(directory: Path) -> bool:
    return any(SECRET in path.read_bytes() for path in directory.rglob("*") if path.is_file())


def _written_and_deleted(client: Any, directory: Path) -> None:
    client.set("key", SECRET)
    wait_until(lambda: _holds(directory), "the value is in the file")
    client.delete("key")
    assert _holds(directory), "deleting adds to the file"


def test_a_rewrite_removes_what_was_deleted(server: Running, client: Any, tmp_path: Path) -> None:
    """A rewrite removes deleted values from the file. `rewrite` starts at most one rewrite in 5 s."""
    _written_and_deleted(client, tmp_path)
    file = AppendOnlyFile(server.url)
    file.rewrite()
    wait_until(lambda: not _holds(tmp_path), "the value is gone")
    _written_and_deleted(client, tmp_path)
    file.rewrite()
    assert _holds(tmp_path)


def test_an_erasure_is_over_when_a_rewrite_after_it_has_succeeded(server: Running, client: Any, tmp_path: Path) -> None:
    """`rewritten` returns an erasure's id only if a rewrite that began after the erasure has succeeded."""
    file, first, second = AppendOnlyFile(server.url), uuid4(), uuid4()
    _written_and_deleted(client, tmp_path)
    assert file.rewritten({first}) == {first}
    assert not _holds(tmp_path)
    _written_and_deleted(client, tmp_path)
    assert file.rewritten({second}) == {second}
    assert not _holds(tmp_path)


def test_a_rewrite_that_fails_is_begun_again(
    server: Running, client: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If a rewrite fails, for example on a full disk, the next call of `rewritten` begins another one."""
    _written_and_deleted(client, tmp_path)
    file, erasure, begin, finished = AppendOnlyFile(server.url), uuid4(), AppendOnlyFile._begin, rewriting._finished
    begun: list[Any] = []

    def begin_second(its: AppendOnlyFile, redis_client: Any) -> None:
        begun.append(redis_client)
        begin(its, redis_client)

    states = iter([True, None, False, None, False])  # the first call of `rewritten` takes three, the next two one each
    with monkeypatch.context() as patched:
        patched.setattr(AppendOnlyFile, "_begin", lambda _its, redis_client: begun.append(redis_client))
        patched.setattr(rewriting, "_finished", lambda _client: next(states))
        assert file.rewritten({erasure}) == frozenset(), "the rewrite fails"
        assert file.rewritten({erasure}) == frozenset(), "a rewrite is running"
        assert len(begun) == 1
        patched.setattr(rewriting, "_finished", lambda its: finished(its) if begun[1:] else next(states))
        patched.setattr(AppendOnlyFile, "_begin", begin_second)
        assert file.rewritten({erasure}) == {erasure}
        assert len(begun) == 2
    assert not _holds(tmp_path)


def test_a_rewrite_that_is_not_begun_covers_nothing(
    server: Running, client: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If Redis refuses a rewrite, `rewritten` raises `Unavailable`.

    The next call starts another rewrite. The rewrite that succeeded before the erasure does not count.
    """
    file, erasure = AppendOnlyFile(server.url), uuid4()
    assert file.rewritten({uuid4()})
    _written_and_deleted(client, tmp_path)

    def refuse(_file: AppendOnlyFile, _client: Any) -> None:
        raise redis_py.ResponseError("Can't execute an AOF background rewriting")

    with monkeypatch.context() as patched:
        patched.setattr(AppendOnlyFile, "_begin", refuse)
        with pytest.raises(Unavailable):
            file.rewritten({erasure})
    assert file.rewritten({erasure}) == {erasure}
    assert not _holds(tmp_path)


def test_a_rewrite_that_ended_with_its_server_is_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If Redis stops during a rewrite, the rewrite is repeated after the restart.

    The restarted Redis reports the interrupted rewrite as successful, but `rewritten` does not trust this report.
    """
    server, erasure = redis.start(tmp_path), uuid4()
    file = AppendOnlyFile(server.url)
    _written_and_deleted(redis_py.Redis.from_url(redis.client_url(server.url)), tmp_path)
    states = iter([True, None])
    with monkeypatch.context() as patched:
        patched.setattr(AppendOnlyFile, "_begin", lambda _file, _client: None)  # stands for an interrupted rewrite
        patched.setattr(rewriting, "_finished", lambda _client: next(states))
        patched.setattr(rewriting, "_WAIT_S", 0.0)
        assert file.rewritten({erasure}) == frozenset()
    server.stop()
    with redis.start(tmp_path):
        assert _holds(tmp_path)
        assert file.rewritten({erasure}) == {erasure}
        assert not _holds(tmp_path)


def test_a_restart_during_the_wait_is_no_success(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If Redis is restarted between two polls, its status does not end the erasure."""
    servers = [redis.start(tmp_path)]
    file, erasure = AppendOnlyFile(servers[0].url), uuid4()
    _written_and_deleted(redis_py.Redis.from_url(redis.client_url(file._url)), tmp_path)

    def restart(_client: Any) -> bool:
        servers.pop().stop()
        servers.append(redis.start(tmp_path))
        return True

    with monkeypatch.context() as patched:
        patched.setattr(AppendOnlyFile, "_begin", lambda _file, _client: None)  # begun, and interrupted
        patched.setattr(rewriting, "_ends_well", restart)
        assert file.rewritten({erasure}) == frozenset()
    assert _holds(tmp_path)
    assert file.rewritten({erasure}) == {erasure}
    assert not _holds(tmp_path)
    servers.pop().stop()


def test_an_unavailable_redis_raises(tmp_path: Path) -> None:
    """If Redis is stopped, `rewrite` and `rewritten` raise `Unavailable`."""
    server = redis.start(tmp_path)
    file = AppendOnlyFile(server.url)
    server.stop()
    with pytest.raises(Unavailable, match="does not rewrite its append-only file"):
        file.rewrite()
    with pytest.raises(Unavailable):
        file.rewritten({uuid4()})


def test_only_the_directorys_redis_is_embedded(server: Running, tmp_path: Path) -> None:
    """`is_of` accepts only the directory's own Redis, because another server's file belongs to its operator."""
    assert redis.is_of(tmp_path, server.url)
    assert not redis.is_of(tmp_path, "redis://127.0.0.1:6379/0")
    assert not redis.is_of(tmp_path / "elsewhere", server.url)
