"""Workers refuse Celery's pools, and options of pools, with which perdure's tasks do not run."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.conftest import Environment, Perdure

POOLS = ["-P prefork", "-Pprefork", "--pool=prefork", "-P processes", "--pool solo", "-Pgevent"]
NEEDS_THREADS = "perdure's queues need threads: start the worker with `-P threads`"

APPLICATION = """
import perdure
from celery import Celery

app = Celery("shop", broker={url!r}, set_as_current=False)
app.conf.update({configured})
perdure.install(app)
"""


@pytest.fixture
def celery(environment: Environment, tmp_path: Path) -> Perdure:
    """Runs `celery` in the test's directory, with running servers."""
    return Perdure(environment, tmp_path, "celery.__main__:main")


@pytest.mark.parametrize("options", POOLS)
def test_a_pool_without_threads_is_refused(celery: Perdure, options: str) -> None:
    """A pool in which perdure's tasks do not run is refused by its name, and not replaced without a message."""
    ended = celery("-A", "perdure", "worker", *options.split())
    pool = options.rsplit("=", maxsplit=1)[-1].rsplit(maxsplit=1)[-1].removeprefix("-P")
    assert (ended.returncode, ended.stderr) == (2, f"perdure: the pool is '{pool}', and {NEEDS_THREADS}\n")


@pytest.mark.parametrize(
    ("pool", "needed"),
    [
        ("gevent", NEEDS_THREADS),
        ("eventlet", NEEDS_THREADS),
        ("custom", "CELERY_CUSTOM_WORKER_POOL is not set: use `-P threads`"),
    ],
)
def test_a_pool_in_the_environment_is_refused(
    environment: Environment, celery: Perdure, pool: str, needed: str
) -> None:
    """The worker refuses a pool before Celery imports the pool's library, which may not be installed."""
    ended = celery("-A", "perdure", "worker", env={**environment, "CELERY_WORKER_POOL": pool})
    assert (ended.returncode, ended.stderr) == (2, f"perdure: the pool is '{pool}', and {needed}\n")


@pytest.mark.parametrize(
    "option",
    [
        "--autoscale=8,2",
        "--max-tasks-per-child=10",
        "--max-memory-per-child=1000",
        "--time-limit=5",
        "--soft-time-limit=5",
    ],
)
def test_an_option_for_child_processes_is_refused(celery: Perdure, option: str) -> None:
    """An option that threads would ignore, or fail with, is refused before the worker starts."""
    ended = celery("-A", "perdure", "worker", option)
    assert ended.returncode == 2
    assert f"perdure: {option.partition('=')[0]} does not apply to threads" in ended.stderr.splitlines()[-1]


@pytest.mark.parametrize(
    ("configured", "options", "message"),
    [
        ("worker_pool='solo'", "", "the pool is 'solo'"),
        ("worker_pool='threads'", "-P prefork", "the pool is 'prefork'"),
        ("", "", "the pool is 'prefork'"),
        ("worker_pool='celery.concurrency.solo:TaskPool'", "", "the pool is 'solo'"),
        ("", "-P threads --autoscale=8,2", "--autoscale does not apply to threads"),
        ("task_time_limit=9", "-P threads --time-limit=5", "--time-limit does not apply to threads"),
    ],
)
def test_the_worker_of_an_application_is_refused_likewise(  # noqa: PLR0917 (fixtures, given by name)
    celery: Perdure, tmp_path: Path, redis_url: str, configured: str, options: str, message: str
) -> None:
    """A worker that consumes perdure's queues is checked like perdure's own. The application's settings may differ."""
    (tmp_path / "shop.py").write_text(APPLICATION.format(url=redis_url, configured=configured))
    ended = celery("-A", "shop", "worker", "-Q", "turns", *options.split())
    assert ended.returncode == 2, ended.stderr
    assert message in ended.stderr
    assert "or without the queues turns" in ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize("option", ["--pool=solo", "-P solo", "--autoscale=8,2", "--concurrency 0"])
def test_perdures_command_has_no_such_options(perdure: Perdure, option: str) -> None:
    """`perdure worker` always has threads; an option that it does not have is wrong usage."""
    ended = perdure("worker", *option.split())
    assert ended.returncode == 2
    assert "Traceback" not in ended.stderr
