"""The faults of `test_chaos`."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial

from redis import Redis

from perdure.access.tenants import UserKey
from perdure.network.queues import QUEUES
from perdure.redis import client_url
from tests.databases import engine_of
from tests.processes.chaos.actor import insist
from tests.processes.chaos.beat import Beat
from tests.processes.gateway import GatewayProcess
from tests.processes.installation import LEASE_S, Installation
from tests.processes.nodes import PostgresServer, Worker
from tests.processes.pooler import Pooler
from tests.processes.rabbit import Rabbit, empty_queues

OWN_KEYS = ["perdure:*", *(glob for name in QUEUES for glob in (name, f"{name}\x06\x16*"))]
"""Globs that match perdure's keys in Redis: keys with its prefix, and the lists of its queues for each priority."""

PAUSE_S = 3.0
"""The longest pause of a server, the gateway or a beat."""

Fault = Callable[[], None]


class Chaos:
    """Causes faults in an installation, with a method for each kind. A method ends its fault before it returns.

    `pooler` is before PostgreSQL, if there is one. `broker` is the broker if it is not Redis. `application` is the
    worker of the application whose tasks are tools.
    """

    def __init__(
        self,
        installation: Installation,
        drawn: random.Random,
        *,
        server: PostgresServer,
        pooler: Pooler | None,
        broker: Rabbit | None,
        gateway: GatewayProcess,
        beats: Sequence[Beat],
        application: Worker,
    ) -> None:
        self._installation = installation
        self._fleet = tuple(each for each in installation.workers if each is not application)
        self._drawn = drawn
        self._server = server
        self._pooler = pooler
        self._broker = broker
        self._gateway = gateway
        self._beats = beats
        self._application = application
        self._pause = threading.Event()
        self.erased = 0
        self.done: Counter[str] = Counter()
        self.harmless: list[Fault] = [self.kill, self.kill, self.stop, self.leave, self.forget, self.silence]
        self.harmless += [self.outage, self.erase, self.maintain, self.kill_gateway, self.leave_gateway]
        self.harmless += [self.stop_gateway, self.kill_beat, self.stop_beat, self.kill_application]
        self.harmless += [] if pooler is None else [self.restart_pooler]
        self.harmless += [] if broker is None else [self.restart_broker]
        """Faults that do not harm another application on the same Redis database."""
        self.all: list[Fault] = [*self.harmless, self.flush, self.restart]

    def inject(self, faults: Sequence[Fault], seconds: float) -> None:
        """Cause faults, one after another, for `seconds`; `done` counts them."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            fault = self._drawn.choice(faults)
            fault()
            self.done[fault.__name__] += 1
            self._pause.wait(self._drawn.uniform(0, 1))

    def kill(self) -> None:
        """Kill a worker, and start it again."""
        worker = self._drawn.choice(self._fleet)
        worker.kill()
        worker.container.start()

    def stop(self) -> None:
        """Pause a worker, possibly for longer than its lease."""
        self._stop(self._drawn.choice(self._fleet).pid, LEASE_S * 2)

    def leave(self) -> None:
        """Stop a worker with SIGTERM and start it again, as a deploy does."""
        worker = self._drawn.choice(self._fleet)
        worker.kill(signal.SIGTERM)
        worker.container.start()

    def kill_application(self) -> None:
        """Kill the worker of the tools' tasks, and start it again. The tasks that it ran are lost."""
        self._application.kill()
        self._application.container.start()

    def kill_gateway(self) -> None:
        """Kill the gateway, and start it again."""
        assert self._gateway.pid
        self._gateway.kill()
        self._gateway.start()

    def leave_gateway(self) -> None:
        """Stop the gateway with SIGTERM and start it again, as a deploy does."""
        self._gateway.stop()
        self._gateway.start()

    def stop_gateway(self) -> None:
        """Pause the gateway."""
        self._stop(self._gateway.pid, PAUSE_S)

    def kill_beat(self) -> None:
        """Stop a beat with SIGKILL or SIGTERM, and start it again. A started beat knows no earlier firing."""
        beat = self._drawn.choice(self._beats)
        assert beat.pid
        self._drawn.choice([beat.kill, beat.stop])()
        beat.start()

    def stop_beat(self) -> None:
        """Pause a beat."""
        self._stop(self._drawn.choice(self._beats).pid, PAUSE_S)

    def flush(self) -> None:
        """Delete all data of Redis."""
        self._installation.redis.flush()

    def forget(self) -> None:
        """Delete only perdure's queues and keys, in Redis and in another broker."""
        with Redis.from_url(client_url(self._installation.redis.url), socket_timeout=10) as client:
            own = [key for glob in OWN_KEYS for key in client.scan_iter(match=glob, count=1_000)]
            if own:
                client.delete(*own)
        if self._broker is not None:
            empty_queues(self._installation.waker.app, self._broker.url)

    def restart(self) -> None:
        """Kill Redis, and start it again."""
        self._installation.redis.restart()

    def restart_pooler(self) -> None:
        """Kill PgBouncer, and start it again."""
        assert self._pooler is not None
        self._pooler.kill()
        self._pooler.start()

    def restart_broker(self) -> None:
        """Kill RabbitMQ, and start it again."""
        assert self._broker is not None
        self._broker.kill()
        self._broker.start()

    def silence(self) -> None:
        """Pause Redis."""
        self._stop(self._installation.redis.pid, PAUSE_S)

    def outage(self) -> None:
        """Restart PostgreSQL with a fast or immediate shutdown or a SIGKILL."""
        self._server.restart(self._drawn.choice([signal.SIGINT, signal.SIGQUIT, signal.SIGKILL]))

    def erase(self) -> None:
        """Erase a user whose turn may be running."""
        self.erased += 1
        user = f"erased {self.erased}"
        insist(partial(self._installation.accept, f"hello: {user}", user=user, message_id=user))
        self._pause.wait(self._drawn.uniform(0, 0.5))
        insist(partial(self._installation.runtime.eraser.erase, UserKey(user)))

    def maintain(self) -> None:
        """Hold a lock that conflicts with `ANALYZE` and with the build of an index, as `VACUUM` does."""
        engine = engine_of(self._server.url)
        with engine.begin() as connection:
            connection.exec_driver_sql("LOCK TABLE messages, users IN SHARE UPDATE EXCLUSIVE MODE")
            self._pause.wait(self._drawn.uniform(0, 8))
        engine.dispose()

    def _stop(self, pid: int, longest_s: float) -> None:
        os.kill(pid, signal.SIGSTOP)
        self._pause.wait(self._drawn.uniform(0, longest_s))
        os.kill(pid, signal.SIGCONT)
