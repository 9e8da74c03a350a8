"""Attacks on an installation through HTTP and through its broker. Each attack is a function that takes a `Target`.

Each attack repeats inputs that stopped an installation in the past. If an input is refused, the attack continues. The
inputs have their original size, and the repetitions are spread over the given time. `Attackers` runs all attacks
concurrently. The command `python -m tests.processes.attacks URL KEY BROKER-URL SILENT-URL SECONDS` runs the attacks in
a separate process, so that they do not hold the interpreter lock of the measuring process.
"""

from __future__ import annotations

import itertools
import json
import resource
import socket
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Self
from urllib.parse import urlsplit

import httpx2
from redis import Redis

from perdure.network.queues import QUEUES
from perdure.redis import client_url
from tests import hostile

CALCULATIONS = (
    "what is round(5,-10**9)",
    "what is " + "9**9**9**9",
    "what is 1" + "*" * 60,
    "what is 1" + "*" * 9_000,
    "what is factorial(10**9)",
    "what is 1 << 10**10",
    "what is " + "(" * 4_000,
    "what is 'a' * 10**10",
)
FLOOD = 400
MERGED = 250
SILENT = 400
HALF_SENT = 1_100
RUBBISH = (b"", b"\x80\x04N.", b"{", b"[]", b'{"body": 1}', b'{"body": "e30=", "headers": {}, "properties": {}}')
BROKEN_QUEUES = ("unacked_index", "unacked", "ingress", "turns", "_kombu.binding.turns", "perdure:stream:ana")
_DESCRIPTORS = 8_192
"""The attackers' limit of open files, which permits more connections than the gateway does."""

_GUESS_S = 0.05
"""Seconds between two guessed keys."""

_REPEAT_S = 0.5
"""Seconds between two messages of an attack in which every single message is harmful."""


@dataclass(frozen=True, slots=True)
class Target:
    """The attacked installation. Setting `over` ends the attack; `answers` counts responses by status."""

    url: str
    key: str
    broker_url: str
    silent_url: str
    seconds: float
    over: threading.Event
    answers: Counter[str]

    def client(self, key: str | None = None) -> httpx2.Client:
        """An HTTP client with the API key `key`, by default the valid one."""
        headers = {"Authorization": f"Bearer {key or self.key}"}
        return httpx2.Client(base_url=self.url, headers=headers, timeout=60)

    def send(self, client: httpx2.Client, text: str, **given: Any) -> dict[str, Any] | None:
        """Send one message; returns the accepted turn, or `None` if the message is refused."""
        response = client.post("/v1/messages", json={"text": text, **given})
        self.answers[f"{response.status_code}"] += 1
        assert response.status_code < HTTPStatus.INTERNAL_SERVER_ERROR, response.text
        turn: dict[str, Any] | None = response.json() if response.is_success else None
        return turn

    def rounds(self) -> Iterator[int]:
        """Count up until the attack is over."""
        return itertools.takewhile(lambda _: not self.over.is_set(), itertools.count())

    def spread(self, count: int) -> Iterator[int]:
        """Count up to `count`, at even intervals over the attack's time."""
        for number in itertools.islice(self.rounds(), count):
            yield number
            self.over.wait(self.seconds / count)


def calculate(target: Target) -> None:
    """Ask for calculations that no machine can finish."""
    with target.client() as client:
        for number in target.rounds():
            text = CALCULATIONS[number % len(CALCULATIONS)]
            target.send(client, text, user_id=f"calculator {number}")
            target.over.wait(_REPEAT_S)


def write_hostile_texts(target: Target) -> None:
    """Send texts that slow down regular expressions and loops.

    Positive feedback on the replies makes perdure store the turns as cases.
    """
    texts = list(hostile.STORABLE.values())
    with target.client() as client:
        for number in target.rounds():
            text = texts[number % len(texts)](hostile.LONG - 100)
            turn = target.send(client, text, user_id=f"writer {number % 5}", channel=f"channel-{number}")
            if turn is not None:
                client.get(f"/v1/turns/{turn['turn_id']}", params={"wait": 5})
                client.post(f"/v1/turns/{turn['turn_id']}/feedback", json={"score": 1})
            target.over.wait(_REPEAT_S)


def flood(target: Target) -> None:
    """One user begins hundreds of conversations."""
    with target.client() as client:
        for number in target.spread(FLOOD):
            target.send(client, f"what is {number} + 1", user_id="flood", channel=f"channel-{number}")


def merge(target: Target) -> None:
    """One user sends hundreds of long messages with `on_busy="merge"`."""
    with target.client() as client:
        for number in target.spread(MERGED):
            target.send(client, f"{number} " + "a" * 9_900, user_id="merger", on_busy="merge")


def reply_to_silence(target: Target) -> None:
    """Request replies to a receiver that never answers."""
    with target.client() as client:
        for number in target.spread(SILENT):
            target.send(client, "hello", user_id=f"silent {number}", reply_to={"url": target.silent_url})


def name_queues(target: Target) -> None:
    """Request replies to queues that have the names of the broker's own keys, and to forbidden addresses."""
    targets: list[dict[str, str]] = [{"task": "replies.take", "queue": name} for name in BROKEN_QUEUES]
    targets += [
        {"url": url} for url in ("http://169.254.169.254/latest", "http://0x7f000001/", "http://[::ffff:7f00:1]/")
    ]
    with target.client() as client:
        for number in target.rounds():
            turn = target.send(client, "hello", user_id="namer", reply_to=targets[number % len(targets)])
            assert turn is None, "refused at accept"
            target.over.wait(_REPEAT_S)


def guess_keys(target: Target) -> None:
    """Send requests with invalid API keys."""
    with target.client("a key that is no key at all") as client:
        for number in target.rounds():
            response = client.get("/v1/sessions", params={"user_id": f"{number}"})
            assert response.status_code in (HTTPStatus.UNAUTHORIZED, HTTPStatus.TOO_MANY_REQUESTS)
            target.over.wait(_GUESS_S)


def send_halves(target: Target) -> None:
    """Hold connections open with requests that never end."""
    address = urlsplit(target.url)
    with ExitStack() as stack:
        for _ in target.spread(HALF_SENT):
            client = stack.enter_context(
                socket.create_connection((address.hostname or "", address.port or 0), timeout=60)
            )
            with suppress(OSError):
                client.sendall(b"POST /v1/messages HTTP/1.1\r\nHost: loc")
        target.over.wait()


def push_rubbish(target: Target) -> None:
    """Push items that are not tasks onto every queue."""
    with Redis.from_url(client_url(target.broker_url)) as client:
        items = list(itertools.product(QUEUES, RUBBISH))
        for number in target.spread(len(items)):
            client.lpush(*items[number])


ATTACKS: Sequence[Callable[[Target], None]] = (
    calculate,
    write_hostile_texts,
    flood,
    merge,
    reply_to_silence,
    name_queues,
    guess_keys,
    send_halves,
    push_rubbish,
)


class Attackers:
    """Runs all attacks concurrently within a `with` block; `errors` lists the exceptions that ended an attack."""

    def __init__(self, target: Target, attacks: Sequence[Callable[[Target], None]] = ATTACKS) -> None:
        self.errors: list[str] = []
        self._target = target
        self._threads = [threading.Thread(target=self._run, args=(attack,), name=attack.__name__) for attack in attacks]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._target.over.set()
        for thread in self._threads:
            thread.join(90)

    def _run(self, attack: Callable[[Target], None]) -> None:
        try:
            attack(self._target)
        except Exception as error:  # noqa: BLE001 (reported by the test, which then fails)
            self.errors.append(f"{attack.__name__}: {error!r}")


def main() -> None:
    """Run all attacks for the given seconds, then print the counts of responses and the errors as JSON."""
    url, key, broker_url, silent_url, seconds = sys.argv[1:]
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, _DESCRIPTORS) if hard > 0 else _DESCRIPTORS, hard))
    target = Target(url, key, broker_url, silent_url, float(seconds), threading.Event(), Counter())
    with Attackers(target) as attackers:
        threading.Event().wait(float(seconds))
    sys.stdout.write(json.dumps({"answers": target.answers, "errors": attackers.errors}))


if __name__ == "__main__":
    main()
