"""Files of messages and of tools: a SIGKILL of a real process at each commit, and what reaches the model."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import httpx2
import pytest

from perdure.access.tenants import UserKey
from perdure.database.engine import Moment
from tests.cli.conftest import Perdure
from tests.files.contents import png
from tests.processes.faults import Place, done
from tests.processes.gateway import GatewayProcess
from tests.processes.installation import MODULES, Installation
from tests.processes.model_server import CHART, GUARD_TOKENS, answer_to

PATIENCE_S = 60.0
MOMENTS: tuple[Moment, ...] = ("before", "after")
CAT = png(20, 10)
TOKENS_OF_CALL = 11
PICTURE = png(40, 30, padding=2_000)
"""What the tools return; see `drawing_agents.IMAGE`."""

pytestmark = pytest.mark.timeout(240)

AROUND_THE_CALLS = [
    Place("within", f"{CHART}.acted"),
    *(Place(moment, "files.store", nth) for nth in (1, 2) for moment in MOMENTS),
    *(Place(moment, "turns.finish_effect", nth) for nth in (1, 2) for moment in MOMENTS),
    *(Place(moment, "turns.step", 2) for moment in MOMENTS),
]
OF_OBJECTS = [
    *(Place(moment, "files.add_content") for moment in MOMENTS),  # the object is not written
    *(Place(moment, "files.store", nth) for nth in (1, 2) for moment in MOMENTS),
]
ALWAYS = ("drawing", "rows", "after-files.store-2")
"""The only kill that `make test` runs."""
CASES = [
    *((agent, "rows", place) for agent in ("drawing", "painting") for place in AROUND_THE_CALLS),
    *((agent, "objects", place) for agent in ("drawing", "painting") for place in OF_OBJECTS),
]


def _images(request: dict[str, Any]) -> list[bytes]:
    """The images in a request to the model."""
    contents = [each["content"] for each in request["messages"] if isinstance(each["content"], list)]
    urls = [part["image_url"]["url"] for each in contents for part in each if part["type"] == "image_url"]
    return [base64.b64decode(url.partition("base64,")[2]) for url in urls]


def _part(data: bytes) -> dict[str, Any]:
    return {"type": "image", "data": base64.b64encode(data).decode()}


@pytest.mark.parametrize(
    ("agent", "where", "place"),
    [
        pytest.param(
            *case,
            marks=() if (*case[:2], str(case[2])) == ALWAYS else pytest.mark.exhaustive,
            id="-".join(map(str, case)),
        )
        for case in CASES
    ],
)
def test_after_a_kill_the_files_of_tools_are_there_once(
    installation: Installation, tmp_path: Path, agent: str, where: str, place: Place
) -> None:
    """Each of two calls has one file with one content, the model gets both, and an erasure leaves nothing."""
    objects, environment = tmp_path / "objects", {"PERDURE_AGENTS": MODULES[agent]}
    if where == "objects":
        environment |= {"PERDURE_FILES__URL": f"file://{objects}", "PERDURE_FILES__ROW_BYTES": "1024"}
    text = f"{'chart' if where == 'objects' else 'charts'}: {place}"
    with installation.killed_once(place, **environment):
        sent = installation.accept(text, agent=agent)
        [turn] = installation.settled(sent.turn_id, within_s=PATIENCE_S)
    calls = 1 if where == "objects" else 2
    results = [row for row in installation.transcript(sent.session_id) if row.role == "tool"]
    assert [row.content.partition("\n")[0] for row in results] == [done(CHART, text)] * calls
    told = [row.content for row in results]
    if agent == "painting":
        told = [f"{done(CHART, text)}\n[image: image/png, {len(PICTURE)} bytes]"] * calls
    assert (turn["status"], turn["reply"]["text"]) == ("done", answer_to(text, *told))
    files = installation.query("SELECT file_id::text AS file_id FROM files")
    assert sorted(row.content[-37:-1] for row in results) == sorted(row.file_id for row in files)
    kept = installation.query("SELECT place FROM file_contents WHERE delete_at IS NULL")
    assert [row.place is not None for row in kept] == [where == "objects"]
    assert _images(installation.model_server.server.requests[-1]) == [PICTURE] * calls
    left = installation.query("SELECT place FROM file_contents WHERE place IS NOT NULL")
    assert {str(path) for path in objects.rglob("*") if path.is_file()} <= {row.place[7:] for row in left}
    installation.check()
    installation.runtime.eraser.erase(UserKey("ana"))
    assert installation.query("SELECT FROM files") == []
    assert installation.query("SELECT FROM file_contents WHERE delete_at IS NULL OR delete_at <= perdure_now()") == []


@pytest.mark.long
@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("name", ["files.store", "turns.accept"])
def test_after_a_kill_of_the_gateway_a_message_has_its_file_once(
    installation: Installation, perdure: Perdure, name: str, moment: Moment
) -> None:
    """The client sends the same message again. A file that no message has is deleted after a day."""
    installation.environment["PERDURE_AGENTS"] = MODULES["drawing"]
    installation.worker().ready()
    gateway = GatewayProcess(perdure)
    parts = [{"type": "text", "text": "Look:"}, _part(CAT)]
    body = {"user_id": "ana", "agent": "drawing", "message_id": "1", "parts": parts}
    try:
        gateway.start()
        installation.faults.arm(Place(moment, name))
        with pytest.raises(httpx2.TransportError):
            httpx2.post(f"{gateway.url}/v1/messages", json=body)
        assert installation.faults.fired()
        gateway.kill()
        gateway.start()
        sent = httpx2.post(f"{gateway.url}/v1/messages", json=body).json()
    finally:
        gateway.kill()
    assert sent["duplicate"] is (name == "turns.accept" and moment == "after")
    [turn] = installation.settled(sent["turn_id"], within_s=PATIENCE_S)
    assert turn["status"] == "done"
    assert _images(installation.model_server.server.requests[-1]) == [CAT]
    [row] = installation.query("SELECT parts FROM messages WHERE role = 'user'")
    used = installation.query("SELECT file_id::text AS file_id FROM files WHERE used_at IS NOT NULL")
    assert [part["file_id"] for part in row.parts] == [each.file_id for each in used]
    assert len(installation.query("SELECT FROM file_contents")) == 1
    installation.check()


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "place",
    [
        *(Place(moment, "turns.keep_instructions") for moment in MOMENTS),
        Place("after", "turns.step"),
        *(Place(moment, "files.store") for moment in MOMENTS),
        Place("before", "turns.step", 2),
        *(Place(moment, "turns.settle") for moment in MOMENTS),
    ],
    ids=str,
)
def test_an_agent_with_everything(installation: Installation, place: Place) -> None:
    """An output, guards, dependencies, computed instructions, an image of the user and one of a tool, and a kill."""
    text = f"chart: {place}"
    with installation.killed_once(place, PERDURE_AGENTS=MODULES["everything"]):
        sent = installation.accept("", agent="everything", parts=[{"type": "text", "text": text}, _part(CAT)])
        [turn] = installation.settled(sent.turn_id, within_s=PATIENCE_S)
    assert turn["status"] == "done", turn["error"]
    user, _, result, _ = installation.transcript(sent.session_id)
    assert result.content.partition("\n")[0] == f"{done(CHART, text)} for the shop of ana"
    assert turn["reply"]["data"] == {"said": answer_to(text, result.content)}
    assert [part["type"] for part in user.parts] == ["image"]
    last = installation.model_server.server.requests[-1]
    assert last["messages"][0]["content"].startswith("You draw for the shop of ana.")
    assert _images(last) == [CAT, PICTURE]
    assert [tool["function"]["name"] for tool in last["tools"]] == [CHART, "final_answer"]
    assert turn["usage"]["input_tokens"] == 2 * TOKENS_OF_CALL + 2 * GUARD_TOKENS
    assert len(installation.query("SELECT FROM files")) == 2
    installation.check()
