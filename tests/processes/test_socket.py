"""Tests of a real gateway's WebSocket: a turn's events, a frame that is too long, and a shutdown."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from pytest_celery import CeleryTestSetup
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import ClientConnection, connect

from perdure.channels.http.stream.websocket import MAX_FRAME_BYTES
from tests.processes.gateway import GatewayProcess
from tests.processes.installation import Installation
from tests.processes.model_server import answer_to


@contextmanager
def _connected(gateway: GatewayProcess) -> Iterator[ClientConnection]:
    with connect(f"{gateway.url.replace('http', 'ws')}/v1/ws", open_timeout=20) as made:
        made.send('{"type": "auth"}')
        assert json.loads(made.recv(20)) == {"type": "ready", "user_id": None}
        yield made


@pytest.mark.long
def test_a_turn_over_the_socket(
    celery_setup: CeleryTestSetup, installation: Installation, gateway: GatewayProcess
) -> None:
    """The client receives a turn's events. The close code is 1009 after too long a frame, and 1012 at a shutdown."""
    with _connected(gateway) as socket:
        socket.send('{"type": "send", "user_id": "ana", "text": "hello"}')
        while (frame := json.loads(socket.recv(20))).get("event") != "done":
            assert frame["type"] in {"ok", "event"}
        assert frame["data"]["reply"]["text"] == answer_to("hello")
        socket.send(json.dumps({"type": "send", "text": "x" * MAX_FRAME_BYTES}))
        with pytest.raises(ConnectionClosed) as closed:
            socket.recv(20)
    assert closed.value.rcvd is not None, closed.value
    assert closed.value.rcvd.code == 1009
    with _connected(gateway) as socket:
        gateway.stop()
        with pytest.raises(ConnectionClosed) as closed:
            socket.recv(20)
    assert closed.value.rcvd is not None, closed.value
    assert closed.value.rcvd.code == 1012
