"""Senders of messages of many users: one as a program with the database does, one over HTTP."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID

import httpx2

from perdure.errors import Unavailable
from perdure.turns.inbox.accept import Accepted
from tests.models.server import Answer
from tests.processes.chaos.actor import Actor
from tests.processes.chaos.listeners import Listeners
from tests.processes.installation import Installation
from tests.processes.streams import story

USERS = 24
KINDS = ("hello", "pure", "idempotent", "unsafe", "probed", "all", "report", "charge")

OWED = 10
"""One turn in `OWED` has a `reply_to`."""

NEW = 8
"""One message in `NEW` is for the agent that only the worker of the newer deployment has."""

STORY = 3
"""One message over HTTP in `STORY` gets a long answer, which listeners follow as it is written."""

AGAIN = 0.1
"""The share of messages over HTTP that are sent once more although they were accepted."""

EVERY_S, HTTP_EVERY_S = 0.1, 0.2

_ACCEPTED = (200, 202)
_REFUSED = (429, 503)
"""The gateway is shutting down, has no database, or has too much to do: the message is sent again."""


class Sender(Actor):
    """Accepts messages in the test's process; `accepted` lists them. `receivers` get some of the replies."""

    def __init__(self, installation: Installation, drawn: random.Random, receivers: Sequence[str]) -> None:
        super().__init__()
        self.accepted: list[Accepted] = []
        self._installation = installation
        self._drawn = drawn
        self._receivers = receivers

    def act(self) -> None:
        for number in itertools.count():
            text = f"{self._drawn.choice(KINDS)}: {number}"
            user = f"user {self._drawn.randrange(USERS)}"
            owed = {"reply_to": {"url": self._drawn.choice(self._receivers)}} if number % OWED == 0 else {}
            given = {**owed, **({"agent": "newer"} if number % NEW == 0 else {})}
            while not self.over.is_set():
                try:
                    self.accepted.append(
                        self._installation.accept(text, user=user, message_id=f"message {number}", **given)
                    )
                    break
                except Unavailable:
                    self.over.wait(0.1)
            if self.over.wait(EVERY_S):
                return


@dataclass
class Request:
    """A message over HTTP, with its idempotency key; `turn_ids` has the turn of each answer."""

    key: str
    text: str
    path: str
    headers: dict[str, str]
    body: dict[str, Any]
    turn_ids: list[str] = field(default_factory=list)


class HttpSender(Actor):
    """Sends messages to the gateway, each until it is accepted; `sent` lists them, and `failures` counts failures.

    Every other message is a background response of OpenAI's API.
    """

    def __init__(self, installation: Installation, drawn: random.Random, url: str, listeners: Listeners) -> None:
        super().__init__()
        self.sent: list[Request] = []
        self.failures = 0
        self._installation = installation
        self._drawn = drawn
        self._url = url
        self._listeners = listeners

    def act(self) -> None:
        with httpx2.Client(base_url=self._url, timeout=20) as client:
            for number in itertools.count():
                request = self._make(number)
                self._send(client, request)
                self.sent.append(request)
                self._listeners.follow(request.turn_ids[0])
                if self._drawn.random() < AGAIN:
                    self._send(client, self._drawn.choice(self.sent))
                if self.over.wait(HTTP_EVERY_S):
                    return

    def _make(self, number: int) -> Request:
        if number % STORY:
            text = f"{self._drawn.choice(KINDS)}: http {number}"
        else:
            text = f"tell story {number}"
            self._installation.model_server.answers[text] = Answer(story(number), piece=7, interval_s=0.02)
        key, user = f"http {number}", f"user {self._drawn.randrange(USERS)}"
        if number % 2:
            return Request(key, text, "/v1/messages", {}, {"user_id": user, "text": text, "message_id": key})
        body = {"model": "tester", "user": user, "input": text, "background": True}
        return Request(key, text, "/v1/responses", {"idempotency-key": key}, body)

    def _send(self, client: httpx2.Client, request: Request) -> None:
        while True:
            try:
                response = client.post(request.path, json=request.body, headers=request.headers)
            except httpx2.TransportError:  # the gateway was killed: the message may have been accepted
                self.failures += 1
                self.over.wait(0.1)
                continue
            if response.status_code in _ACCEPTED:
                break
            assert response.status_code in _REFUSED, (response.status_code, response.text)
            self.failures += 1
            self.over.wait(0.1)
        answer = response.json()
        request.turn_ids.append(
            answer["turn_id"] if "turn_id" in answer else str(UUID(answer["id"].removeprefix("resp_")))
        )
