"""What `perdure.install` changes in an application's Celery application, and what it leaves unchanged."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
from celery import Celery
from celery.beat import PersistentScheduler, Service
from celery.schedules import crontab, schedule
from celery.signals import beat_init
from kombu import Connection, Queue

import perdure
from perdure.application.queues import publisher
from perdure.application.schedule import PREFIX, entries
from perdure.application.step import InstalledStep
from perdure.errors import SettingsError
from perdure.network.queues import QUEUES
from perdure.settings import Settings
from perdure.workers.celery_application import TASKS, broker_priority, load_tasks, registered

PICKLE = "application/x-python-serialize"
CONFIGURATION = {
    "broker_url": "redis://127.0.0.1:1/0",
    "broker_transport_options": {"visibility_timeout": 7200, "global_keyprefix": "shop:"},
    "task_default_queue": "shop",
    "task_routes": [{"*": "shop"}],
    "task_acks_late": True,
    "task_serializer": "pickle",
    "task_annotations": {"*": {"rate_limit": "1/m", "acks_late": True}},
    "beat_schedule": {"own": {"task": "own", "schedule": 60.0}},
}


@pytest.fixture
def app() -> Iterator[Celery]:
    """A Celery application that is configured after `install`."""
    with Celery("shop", set_as_current=False) as made:
        perdure.install(made)
        made.config_from_object(CONFIGURATION)
        yield made


def test_the_listed_tasks_are_those_that_are_registered() -> None:
    """`TASKS` equals the registered tasks, because a process without the task modules uses `TASKS` for routing."""
    assert {name for name in registered() if not name.startswith(("celery.", "pytest_celery."))} == TASKS


def test_install_does_nothing_yet(app: Celery) -> None:
    """`install` loads no task and starts no thread, and a second call adds no second worker step."""
    threads = threading.active_count()
    perdure.install(app)
    assert threading.active_count() == threads
    assert len(app.steps["worker"]) == 1
    assert [name for name in app.tasks if name in TASKS] == []
    with pytest.raises(SettingsError, match="no worker of perdure"):
        app.perdure()


def test_a_late_configuration_applies(app: Celery) -> None:
    """A configuration that is set after `install` takes effect, in addition to perdure's queues and routes."""
    assert set(app.amqp.queues) == {"shop", *QUEUES}
    assert set(app.amqp.queues.consume_from) == {"shop"}
    assert app.conf.broker_transport_options == CONFIGURATION["broker_transport_options"]
    route = app.amqp.router.route
    assert route({}, "sessions.expired_carts")["queue"].name == "shop"
    assert {route({}, name)["queue"].name for name in TASKS} == set(QUEUES)
    assert route({}, "turns.run")["priority"] == broker_priority("redis://", 5)


def test_a_second_application_of_the_process_has_nothing_of_perdure(app: Celery) -> None:
    """Perdure's tasks and queues exist only in the application that installed perdure."""
    load_tasks(app)
    with Celery("other", broker="memory://", set_as_current=False) as other:
        other.finalize()
        assert not TASKS & set(other.tasks)
        assert set(other.amqp.queues) == {"celery"}
    assert set(app.tasks) >= TASKS
    assert all(app.tasks[name].app is app for name in TASKS)


def test_the_applications_defaults_are_for_its_own_tasks(app: Celery) -> None:
    """The application's task defaults, such as late acknowledgement or pickle, do not apply to perdure's tasks."""
    load_tasks(app)
    run, submit = app.tasks["turns.run"], app.tasks["turns.submit"]
    assert (run.acks_late, run.rate_limit, run.serializer, run.ignore_result) == (False, None, "json", True)
    assert (submit.acks_late, submit.reject_on_worker_lost, submit.ignore_result) == (True, True, False)


def test_a_task_of_the_same_name_is_refused(app: Celery) -> None:
    """A task with the name of one of perdure's tasks is refused, because Celery can register only one of the two."""

    def run() -> None:
        """A task of the application with the name of one of perdure's tasks."""

    app.task(run, name="turns.run", shared=False)
    with pytest.raises(SettingsError, match=r"'shop' has a task 'turns\.run', which is a name of perdure's"):
        load_tasks(app)


def test_a_queue_of_the_same_name_is_refused(app: Celery) -> None:
    """A queue with the name of one of perdure's queues is refused: the application would receive perdure's messages."""
    app.conf.task_queues = [Queue("memory")]
    with pytest.raises(SettingsError, match="'shop' has a queue 'memory', which is a name of perdure's"):
        len(app.amqp.queues)


def test_perdures_messages_are_json_whatever_the_application_sends(app: Celery) -> None:
    """Messages of perdure are JSON, and a worker that consumes perdure's queues accepts JSON."""
    app.conf.accept_content = ["pickle"]
    assert {app.amqp.router.route({}, name)["serializer"] for name in TASKS} == {"json"}
    assert "serializer" not in app.amqp.router.route({}, "own")
    with Connection("memory://") as connection:
        assert app.amqp.TaskConsumer(connection).accept == {PICKLE}
        app.amqp.queues.select(["turns"])
        assert app.amqp.TaskConsumer(connection).accept == {PICKLE, "application/json"}


def test_the_applications_maximum_priority_is_not_perdures(app: Celery) -> None:
    """`task_queue_max_priority` does not apply to perdure's queues: RabbitMQ refuses a changed `x-max-priority`."""
    app.conf.update(broker_url="amqp://127.0.0.1:1//", task_queue_max_priority=10)
    for amqp in (app.amqp, publisher(app).amqp):
        found = {name: amqp.queues[name].queue_arguments for name in QUEUES}
        assert found.pop("turns") == {"x-max-priority": 9}
        assert set(map(str, found.values())) <= {"None", "{}"}
        assert amqp.queues["shop"].queue_arguments == {"x-max-priority": 10}


def test_tasks_are_not_run_eagerly(app: Celery) -> None:
    """`task_always_eager` is refused, because a turn needs a worker. Tests call `perdure.testing.ask` instead."""
    load_tasks(app)
    app.conf.task_always_eager = True
    with pytest.raises(SettingsError, match=r"test your agent with perdure\.testing\.ask"):
        app.tasks["turns.run"].delay(session_id="any")


def test_wake_ups_use_the_applications_queues_and_options(app: Celery) -> None:
    """The application's queues and transport options apply to wake-ups. perdure's timeouts apply only to wake-ups."""
    publishing = publisher(app)
    options = publishing.conf.broker_transport_options
    assert (options["visibility_timeout"], options["global_keyprefix"]) == (7200, "shop:")
    assert options["socket_timeout"] < 1
    assert set(publishing.amqp.queues) == set(app.amqp.queues)
    assert "socket_timeout" not in app.conf.broker_transport_options


def test_a_worker_without_perdures_queues_has_no_step(app: Celery) -> None:
    """A worker gets perdure's boot step only if `-Q` selects one of perdure's queues."""

    class Worker:
        def __init__(self) -> None:
            self.app: Any = app

    assert not InstalledStep(Worker()).include_if(Worker())
    app.amqp.queues.select(["turns"])
    assert InstalledStep(Worker()).include_if(Worker())


def test_beat_has_plain_entries_next_to_the_applications(app: Celery, tmp_path: Any) -> None:
    """Perdure's entries are plain schedules for any scheduler. A later `beat_schedule` does not remove them."""
    app.loader.import_default_modules()
    assert {PREFIX + "consolidate", "own"} <= set(app.conf.beat_schedule)
    app.conf.beat_schedule = CONFIGURATION["beat_schedule"]
    service = Service(app, schedule_filename=str(tmp_path / "schedule"))
    try:
        assert isinstance(service.scheduler, PersistentScheduler)
        beat_init.send(sender=service)
        names = set(service.scheduler.schedule)
        assert {"own", *entries(Settings(_env_file=None))} <= names
        assert {type(each.schedule) for each in service.scheduler.schedule.values()} <= {crontab, schedule}
    finally:
        service.scheduler.close()


def test_an_entrys_header_names_its_slot() -> None:
    """The message of a schedule entry has a header with the entry's name.

    The task needs this name to claim the entry's slot, which is the time at which the entry was last due.
    """
    prune = entries(Settings(_env_file=None))[PREFIX + "prune"]
    assert prune["options"] == {"queue": "maintenance", "serializer": "json", "headers": {"perdure_entry": "prune"}}
    assert prune["schedule"] == crontab(minute="0")
