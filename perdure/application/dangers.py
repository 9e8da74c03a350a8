"""Finds a Celery application's dangerous settings: they can lose tasks, run tasks twice, or run an attacker's code.

`perdure doctor --app MODULE` lists these settings. `perdure.install` does not change them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import redis
from celery import Celery
from celery.app.utils import find_app
from kombu.transport.redis import Transport as RedisTransport

from perdure.application.queues import broker_url
from perdure.errors import SettingsError, Unavailable
from perdure.network.tls import joined, unverified
from perdure.redis import connect, remedy, where
from perdure.tasks.task import PerdureTask
from perdure.text.untrusted import error_summary
from perdure.workers.celery_application import load_tasks

VISIBILITY_S = 3_600
"""kombu's default visibility timeout on Redis, in seconds."""


@dataclass(frozen=True, slots=True)
class Danger:
    """A dangerous setting: where it is (Celery or Redis), the setting with its value, the risk, and a remedy."""

    where: str
    setting: str
    risk: str
    fix: str


def application(module: str) -> Celery:
    """The Celery application that `celery -A MODULE` would run, with its tasks loaded.

    Raises:
        SettingsError: the module has no Celery application, or the application cannot be set up.
    """
    try:
        app = find_app(module)
        app.loader.init_worker()
    except (ImportError, AttributeError) as error:
        raise SettingsError(f"--app is {module!r}, which has no Celery application: {error}") from error
    except Exception as error:
        raise SettingsError(f"--app is {module!r}, which cannot be set up: {error_summary(error)}") from error
    app.finalize()
    return app


def dangers(app: Celery) -> Iterator[Danger]:
    """The dangerous settings of `app`, whose tasks must be loaded.

    Raises:
        Unavailable: the broker of `app` is Redis, and none of its servers can be reached.
    """
    name = f"Celery application {app.main!r}"
    own = [task for task in app.tasks.values() if not task.name.startswith("celery.") and not _is_perdures(task)]
    yield from _serializers(name, app)
    yield from _lost_children(name, own)
    if "perdure" in vars(app):
        yield from _installed(name, app)
    if (option := unverified(broker_url(app))) is not None:
        risk = "another server can take the broker's place, and read, change and add tasks"
        fix = "Set ssl_cert_reqs=CERT_REQUIRED and ssl_ca_certs in broker_url, or broker_use_ssl."
        yield Danger(name, f"{option} for the broker", risk, fix)
    with app.connection_for_read() as connection:
        if isinstance(connection.transport, RedisTransport):
            yield from _visibility(name, app, own)
            servers = [joined(str(each), connection.ssl) for each in connection.alt] or [broker_url(app)]
            # A Sentinel has no queues, and names the Redis that has them only to kombu.
            yield from _eviction([url for url in servers if not url.startswith("sentinel://")])


def _is_perdures(task: Any) -> bool:
    return isinstance(task, PerdureTask)


def _serializers(name: str, app: Celery) -> Iterator[Danger]:
    accepted = {str(each).rpartition("python-")[2].rpartition("x-")[2] for each in app.conf.accept_content}
    if unsafe := accepted & {"pickle", "yaml"}:
        risk = "every program that can publish to the broker can run code in the workers"
        fix = "Set accept_content to ['json']."
        yield Danger(name, f"accept_content has {', '.join(sorted(unsafe))}", risk, fix)


def _lost_children(name: str, own: list[Any]) -> Iterator[Danger]:
    late = sorted(task.name for task in own if task.acks_late and not task.reject_on_worker_lost)
    if late:
        risk = f"prefork acknowledges the task of a child that is killed, as by the OOM killer: {', '.join(late)}"
        yield Danger(name, "task_acks_late without task_reject_on_worker_lost", risk, "Set task_reject_on_worker_lost.")


def _installed(name: str, app: Celery) -> Iterator[Danger]:
    if app.conf.task_always_eager:
        risk = "perdure's tasks run only in a worker and refuse to run eagerly"
        yield Danger(name, "task_always_eager is true", risk, "Unset it where perdure is used.")
    try:
        load_tasks(app)
        len(app.amqp.queues)
    except SettingsError as error:
        yield Danger(name, "a name of perdure's", str(error), "Rename it.")


def _visibility(name: str, app: Celery, own: list[Any]) -> Iterator[Danger]:
    options = app.conf.broker_transport_options
    visible_s = options.get("visibility_timeout", VISIBILITY_S)
    if not isinstance(visible_s, int | float):
        risk = "kombu cannot compute with it, and does not restore the tasks of a worker that is lost"
        yield Danger(name, f"visibility_timeout is {visible_s!r}", risk, "Set it to a number of seconds.")
        return
    limits = [(task.time_limit or app.conf.task_time_limit, task.name) for task in own if task.acks_late]
    longest = max(((limit, task) for limit, task in limits if limit), default=None)
    if longest is not None and longest[0] >= visible_s:
        risk = f"{longest[1]}, acknowledged late, may run for {longest[0]} s; after {visible_s} s it runs a second time"
        yield Danger(name, f"visibility_timeout is {visible_s}", risk, "Set it longer than the longest task.")
    if visible_s < VISIBILITY_S and "unacked_key" not in options:
        risk = f"tasks of other applications on this Redis database that run or wait for {visible_s} s run twice"
        fix = "Set unacked_key, unacked_index_key and unacked_mutex_key, or use a database of its own."
        yield Danger(name, f"visibility_timeout is {visible_s}, under kombu's default keys", risk, fix)


def _eviction(urls: Sequence[str]) -> Iterator[Danger]:
    """The servers that evict keys, among those that can be reached: of several brokers, some may be standbys.

    Raises:
        Unavailable: none of several servers can be reached.
    """
    failed: list[Unavailable] = []
    for url in urls:
        name = f"Redis at {where(url)}"
        with connect(url) as client:
            try:
                policy = client.config_get("maxmemory-policy").get("maxmemory-policy")
            except redis.ResponseError:  # a managed server may forbid CONFIG
                continue
            except redis.RedisError as error:
                failed.append(Unavailable(f"{name} cannot be reached. {remedy(error)}"))
                continue
        if policy not in (None, "noeviction"):
            risk = "a full Redis evicts queues, with the tasks in them"
            yield Danger(name, f"maxmemory-policy is {policy}", risk, "Set maxmemory-policy noeviction.")
    if failed and len(failed) == len(urls):
        raise failed[0]
