"""The example receivers in docs/callbacks.md, run unchanged, receive callbacks from `UrlCarrier`."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from perdure.channels.callback import UrlCarrier
from perdure.network.reply_urls import Reachable
from perdure.network.webhook_signatures import make_secret, parse_secrets, signed_headers
from perdure.turns.outbox import Delivered, DeliveryFailed, DeliveryNotDue, deliver, resend
from tests.programs import package, program
from tests.repository.source import read
from tests.turns.harness import Harness

SECRET = make_secret()
LOOPBACK = Reachable.parse(["127.0.0.0/8"])
ID = "01a20501-43ff-7152-9363-e4b105eb51a7"
BODY = b'{"delivery_id": "d", "session_id": "s", "seq": 1, "status": "done"}'


def printed(language: str) -> str:
    """The only code block of docs/callbacks.md in `language`."""
    (block,) = re.findall(rf"^```{language}\n(.*?)^```$", read("docs/callbacks.md"), re.MULTILINE | re.DOTALL)
    assert isinstance(block, str)
    return block


def _python(directory: Path) -> list[str]:
    (directory / "receiver.py").write_text(printed("python"), encoding="utf-8")
    return [sys.executable, str(directory / "receiver.py")]


def _javascript(directory: Path) -> list[str]:
    node, packages = program("node"), package("standardwebhooks").parent
    (directory / "receiver.mjs").write_text(printed("javascript"), encoding="utf-8")
    (directory / "node_modules").symlink_to(packages)
    return [node, str(directory / "receiver.mjs")]


class Printed:
    """A running receiver: its URL, and the lines that it prints for new callbacks."""

    def __init__(self, command: list[str]) -> None:
        environment = {**os.environ, "PORT": "0", "WEBHOOK_SECRET": SECRET}
        self._process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        self._out = self._process.stdout
        self.url = f"http://127.0.0.1:{self._out.readline().split()[-1]}/"

    def stop(self) -> list[str]:
        """End the receiver; returns the lines that it has printed for callbacks."""
        self._process.kill()
        lines = self._out.read().splitlines()
        self._process.wait(10)
        return lines

    def close(self) -> None:
        """End the receiver and close its output."""
        self.stop()
        self._out.close()


@pytest.fixture(params=[_python, _javascript], ids=["python", "javascript"])
def receiver(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Printed]:
    """A running receiver from docs/callbacks.md, in each language."""
    start: Callable[[Path], list[str]] = request.param
    made = Printed(start(tmp_path))
    yield made
    made.close()


def carrier(*secrets: str, **given: Any) -> UrlCarrier:
    """A carrier that signs with `secrets` and may send to loopback addresses."""
    return UrlCarrier(parse_secrets(" ".join(secrets or [SECRET])), LOOPBACK, **given)


def test_a_callback_is_processed_once(receiver: Printed, harness: Harness) -> None:
    """Every attempt has the same id and gets a success status. The receiver processes each id once."""
    harness.settings = harness.settings.model_copy(update={"reply_urls": ("127.0.0.0/8",)})
    sent = harness.send("hello", reply_to={"url": receiver.url})
    harness.run(sent.session_id)
    delivery_id = harness.waker.deliveries[-1]
    carriers = {"url": carrier()}
    assert deliver(harness.database, carriers, delivery_id) == Delivered()
    assert deliver(harness.database, carriers, delivery_id) == DeliveryNotDue()
    resend(harness.database, delivery_id)
    assert deliver(harness.database, carriers, delivery_id) == Delivered()

    assert receiver.stop() == [f"{sent.session_id} 1 done"]


def test_a_delivery_that_no_worker_recorded_is_processed_once(receiver: Printed) -> None:
    """If a worker dies after the receiver's response, the callback is sent again. The receiver processes it once."""
    for _ in range(2):
        carrier().carry({"url": receiver.url}, BODY, ID)

    assert receiver.stop() == ["s 1 done"]


def test_a_signature_by_another_secret_is_refused(receiver: Printed) -> None:
    """A wrong signature gets a 401. While secrets rotate, one valid signature of two is enough."""
    with pytest.raises(DeliveryFailed, match="401"):
        carrier(make_secret()).carry({"url": receiver.url}, BODY, ID)
    carrier(make_secret(), SECRET).carry({"url": receiver.url}, BODY, ID)

    assert receiver.stop() == ["s 1 done"]


@pytest.mark.parametrize("shift_s", [-360.0, 360.0])
def test_a_stale_callback_is_refused(receiver: Printed, shift_s: float) -> None:
    """A timestamp more than five minutes off gets a 401, so a recorded request cannot be replayed later."""
    with pytest.raises(DeliveryFailed, match="401"):
        carrier(clock=lambda: time.time() + shift_s).carry({"url": receiver.url}, BODY, ID)

    assert receiver.stop() == []


def test_a_forged_callback_is_refused(receiver: Printed) -> None:
    """A changed body, id or time is refused, as is a malformed or missing signature. The receiver keeps serving."""
    signed = signed_headers(parse_secrets(SECRET), ID, int(time.time()), BODY)
    forged: list[tuple[bytes, dict[str, str]]] = [
        (BODY.replace(b"done", b"fail"), signed),
        (BODY, {**signed, "webhook-id": "another"}),
        (BODY, {**signed, "webhook-timestamp": str(int(signed["webhook-timestamp"]) - 1)}),
        (BODY, {**signed, "webhook-timestamp": "now"}),
        (BODY, {**signed, "webhook-signature": "v1,AAAA"}),
        (BODY, {**signed, "webhook-signature": "v1"}),
        (BODY, {**signed, "webhook-signature": "v1,="}),
        (b"\xff", signed),
        (BODY, {}),
    ]
    with httpx2.Client(trust_env=False) as client:
        answers = [client.post(receiver.url, content=body, headers=headers) for body, headers in forged]
        assert [answer.status_code for answer in answers] == [401] * len(forged)
        assert client.post(receiver.url, content=BODY, headers=signed).status_code == 204

    assert receiver.stop() == ["s 1 done"]
