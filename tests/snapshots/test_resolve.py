"""`PERDURE_SNAPSHOTS` selects the snapshot store."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from perdure.database.engine import Database
from perdure.errors import SettingsError
from perdure.settings import Settings
from perdure.snapshots.file import FileSnapshots
from perdure.snapshots.postgres import PostgresSnapshots
from perdure.snapshots.redis import RedisSnapshots
from perdure.snapshots.resolve import resolve
from perdure.snapshots.sqlite import SqliteSnapshots
from perdure.snapshots.store import SnapshotStore
from tests.snapshots.storages import MemorySnapshots

NOWHERE = "postgresql+psycopg2://nobody@127.0.0.1:1/none"


def made(url: str, redis_url: str = "redis://127.0.0.1:1/3") -> SnapshotStore:
    """The store that `url` names. The tests do not connect to its server."""
    return resolve(url, Settings(_env_file=None), Database(NOWHERE), redis_url)


def test_postgres_is_the_default() -> None:
    """The default store needs no server besides PostgreSQL."""
    assert isinstance(made(Settings(_env_file=None).snapshots), PostgresSnapshots)


@pytest.mark.parametrize(
    ("given_url", "server", "connection"),
    [
        ("redis://127.0.0.1:1/3", "127.0.0.1:1", {"db": 3, "port": 1}),
        ("redis://:secret@127.0.0.1:1/3", "127.0.0.1:1", {"db": 3, "password": "secret"}),
        ("redis+socket:///run/r.sock?virtual_host=2", "/run/r.sock", {"db": 2, "path": "/run/r.sock"}),
        ("unix:///run/r.sock?db=2", "/run/r.sock", {"db": 2, "path": "/run/r.sock"}),
    ],
)
def test_a_redis_url_is_accepted_in_kombus_and_in_redis_form(
    given_url: str, server: str, connection: dict[str, Any]
) -> None:
    """Redis URLs in Kombu's form and in redis-py's form are accepted. The store's name contains no password."""
    store = made("redis", given_url)
    assert isinstance(store, RedisSnapshots)
    assert connection.items() <= store._client.connection_pool.connection_kwargs.items()
    assert server in store.name
    assert "secret" not in store.name


def test_a_file_url_is_an_absolute_path(tmp_path: Path) -> None:
    """RFC 8089: an absolute, percent-encoded path follows `file://`.

    An additional slash before or after the path is accepted, and so is a space that is not encoded.
    """
    wanted = tmp_path / "a b" / "snapshots"
    for url in (
        f"file://{tmp_path}/a%20b/snapshots",
        f"file:///{tmp_path}/a b/snapshots",
        f"file://localhost{wanted}/",
    ):
        store = made(url)
        assert isinstance(store, FileSnapshots)
        assert store.directory == wanted
    assert wanted.is_dir()


def test_a_sqlite_url_is_read_as_sqlalchemy_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three slashes precede a relative path, four an absolute one."""
    monkeypatch.chdir(tmp_path)
    for url in (f"sqlite:///{tmp_path}/here/s.db", "sqlite:///here/s.db"):
        store = made(url)
        assert isinstance(store, SqliteSnapshots)
        assert store.path == tmp_path / "here" / "s.db"
    assert (tmp_path / "here").is_dir()


@pytest.mark.parametrize(
    "url",
    ["", "mysql://x/y", "Postgres", "postgres:", "redis://127.0.0.1/0", "sqlite", "sqlite://", "sqlite:///", "file",
     "file:", "file://", "file:///", "file:relative", "file://host/dir", "file:///dir?x=1", "sqlite:///:memory:"],
)  # fmt: skip
def test_a_wrong_value_says_what_is_accepted(url: str) -> None:
    """An invalid setting stops the start. The error contains the setting's name, its value and the accepted values."""
    with pytest.raises(SettingsError) as caught:
        made(url)
    assert str(caught.value).startswith(f"PERDURE_SNAPSHOTS is {url!r}: accepted: ")


def test_a_path_that_cannot_be_created_stops_the_start(tmp_path: Path) -> None:
    """`resolve` raises `SettingsError` if a path cannot be created, so the fault is found before the first turn."""
    (tmp_path / "taken").write_text("a file")
    with pytest.raises(SettingsError, match=r"PERDURE_SNAPSHOTS is .*/taken/dir': the directory .* cannot be created"):
        made(f"file://{tmp_path}/taken/dir")
    with pytest.raises(SettingsError, match="cannot be created"):
        made(f"sqlite:///{tmp_path}/taken/s.db")
    with pytest.raises(SettingsError, match="path of a file"):
        made(f"sqlite:///{tmp_path}")
    with pytest.raises(SettingsError, match="cannot be created"):
        made("file:///nul%00")


def test_a_third_party_adds_a_store_by_entry_point(installed: None) -> None:
    """An installed package can add a store. The error for an unknown store names the added store."""
    store = made("acme://host/place")
    assert isinstance(store, MemorySnapshots)
    assert store.name == "acme://host/place"
    with pytest.raises(SettingsError, match="acme"):
        made("nope://x")


def test_an_entry_point_that_cannot_be_loaded_is_a_settings_error(installed: None) -> None:
    """The message names the missing module, and contains no password."""
    with pytest.raises(SettingsError, match="no_such_module") as caught:
        made("broken://me:secret@host/x")
    assert "secret" not in str(caught.value)
