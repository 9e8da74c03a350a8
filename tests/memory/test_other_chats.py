"""The exports of ChatGPT and Claude: the current branch, times and models; streamed, and imported once."""

from __future__ import annotations

import io
import json
import tracemalloc
import zipfile
from collections.abc import Iterator
from typing import Any

import pytest

from perdure.access.tenants import UserKey
from perdure.clock import MovedClock
from perdure.database.engine import Database
from perdure.errors import InvalidRequest
from perdure.memory.import_export import Given, Unreadable, export_messages, import_messages
from perdure.memory.other_chats import READERS, OtherBranches, read_chatgpt, read_claude, unpacked

_ROOT = "00000000-0000-4000-8000-000000000000"


def _node(node_id: str, parent: str | None, role: str, *parts: Any, **message: Any) -> dict[str, Any]:
    content = {"content_type": message.pop("content_type", "text"), "parts": list(parts)}
    said = {"id": node_id, "author": {"role": role, "name": None}, "create_time": None, "content": content}
    return {"id": node_id, "parent": parent, "children": [], "message": {**said, "recipient": "all", **message}}


CHATGPT = {
    "title": "Bees",
    "create_time": 1_700_000_000.5,
    "conversation_id": "c1",
    "current_node": "a2",
    "mapping": {
        each["id"]: each
        for each in (
            {"id": "root", "parent": None, "children": ["s"], "message": None},
            _node("s", "root", "system", ""),
            _node("u1", "s", "user", "How many hives?", create_time=1_700_000_010.0),
            _node("a1", "u1", "assistant", "Four.", metadata={"model_slug": "gpt-4o"}),
            _node("t", "u1", "assistant", "lookup()", content_type="code", recipient="python"),
            _node("r", "t", "tool", "4"),
            _node("a2", "r", "assistant", "Five, ", {"content_type": "image_asset_pointer"}, "in fact.",
                  create_time=1_700_000_020.0, metadata={"model_slug": "gpt-5"}),
        )
    },
}  # fmt: skip
"""A question with two answers. The second one, after a tool's call, is current."""

CLAUDE = {
    "uuid": "k1",
    "name": "Honey",
    "created_at": "2025-01-02T03:04:05.678901Z",
    "chat_messages": [
        {"uuid": "m1", "parent_message_uuid": _ROOT, "sender": "human", "text": "Hello", "content": [],
         "created_at": "2025-01-02T03:04:06Z"},
        {"uuid": "m2", "parent_message_uuid": "m1", "sender": "assistant", "created_at": "2025-01-02T03:04:07Z",
         "content": [{"type": "thinking", "thinking": "hm"}, {"type": "text", "text": "Old answer"}]},
        {"uuid": "m3", "parent_message_uuid": "m1", "sender": "assistant", "created_at": "2025-01-02T03:04:08Z",
         "content": [{"type": "text", "text": "New"}, {"type": "text", "text": "answer"}]},
    ],
}  # fmt: skip
"""A question whose answer was repeated. The last one is current."""


def test_a_message_without_content_does_not_lose_the_conversation() -> None:
    """An export may lack the content and the metadata of single messages."""
    mapping = {each["id"]: each for each in (_node("u1", None, "user", "Hi"), _node("a1", "u1", "assistant", "Hello"))}
    mapping["x"] = {"id": "x", "parent": "a1", "message": {"author": {"role": "assistant"}, "content": None}}
    mapping["u2"] = _node("u2", "x", "user", "Bye")
    given = {**CHATGPT, "mapping": mapping, "current_node": "u2"}
    lines = _shown(read_chatgpt(_file(given), "ana", OtherBranches()))
    assert [each[3] for each in lines] == ["Hi", "Hello", "Bye"]


def test_the_texts_of_claudes_attachments_are_imported() -> None:
    """Claude makes an attachment of a long text that is pasted, which may be all of a message."""
    pasted = {"file_name": "paste.txt", "extracted_content": "Long text\n"}
    picture = {"file_name": "bee.png", "extracted_content": ""}
    messages = [
        {"uuid": "m1", "sender": "human", "text": "", "content": [], "attachments": [pasted]},
        {"uuid": "m2", "sender": "human", "text": "See", "content": [], "attachments": [picture, pasted]},
        {"uuid": "m3", "sender": "human", "text": "", "content": [], "attachments": [picture]},
    ]
    lines = _shown(read_claude(_file({**CLAUDE, "chat_messages": messages}), "ana", OtherBranches()))
    assert [each[3] for each in lines] == ["[paste.txt]\nLong text", "See\n\n[paste.txt]\nLong text"]


def _file(*conversations: Any, mark: bytes = b"") -> io.BytesIO:
    return io.BytesIO(mark + json.dumps(conversations).encode())


def _shown(lines: Iterator[Given]) -> list[tuple[Any, ...]]:
    members = ("session", "message_id", "role", "content", "occurred_at", "model")
    return [tuple(each.get(name) for name in members) for each in lines if isinstance(each, dict)]


@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
def test_the_current_branch_of_chatgpt_is_read(mark: bytes) -> None:
    """Texts come with their times and models; the other answer is counted, and tools and pictures are left out."""
    others = OtherBranches()
    assert _shown(read_chatgpt(_file(CHATGPT, mark=mark), "ana", others)) == [
        ("c1", "u1", "user", "How many hives?", "2023-11-14T22:13:30+00:00", None),
        ("c1", "a2", "assistant", "Five, \n\nin fact.", "2023-11-14T22:13:40+00:00", "gpt-5"),
    ]
    assert others.messages == 1
    [*_, last] = _shown(read_chatgpt(_file({**CHATGPT, "current_node": "a1"}), "ana", OtherBranches()))
    assert last == ("c1", "a1", "assistant", "Four.", "2023-11-14T22:13:30+00:00", "gpt-4o")  # the time before it


def test_the_current_branch_of_claude_is_read() -> None:
    """Without the name of the current message, the branch of the last message is current. Thoughts are left out."""
    others = OtherBranches()
    assert _shown(read_claude(_file(CLAUDE), "ana", others)) == [
        ("k1", "m1", "user", "Hello", "2025-01-02T03:04:06Z", None),
        ("k1", "m3", "assistant", "New\n\nanswer", "2025-01-02T03:04:08Z", None),
    ]
    assert others.messages == 1
    said: Any = CLAUDE["chat_messages"]
    plain = [{name: value for name, value in each.items() if name != "parent_message_uuid"} for each in said]
    assert len(_shown(read_claude(_file({**CLAUDE, "chat_messages": plain}), "ana", others))) == 3


@pytest.mark.parametrize(("origin", "conversation"), [("chatgpt", CHATGPT), ("claude", CLAUDE)])
def test_an_export_is_imported_once(
    database: Database, clock: MovedClock, origin: str, conversation: dict[str, Any]
) -> None:
    """A repeated import adds nothing; an export of the imported messages has what was read."""

    def result() -> tuple[int, int, int]:
        lines = READERS[origin](_file(conversation), "ana", OtherBranches())
        [found] = list(import_messages(database, clock, "assistant", lines))
        return found.added, found.known, found.refused

    assert [result(), result()] == [(2, 0, 0), (0, 2, 0)]
    exported = list(export_messages(database, UserKey("ana")))
    assert [(each["session"], each["channel"]) for each in exported] == [(exported[0]["session"], origin)] * 2
    assert exported[1].get("model") == ("gpt-5" if origin == "chatgpt" else None)


def test_what_is_no_conversation_is_reported_and_the_others_are_read() -> None:
    """Hostile and foreign conversations: each is refused by itself. A circle of messages ends."""
    circle = {**CHATGPT, "mapping": {"x": _node("x", "y", "user", "Ho"), "y": _node("y", "x", "user", "Hi\x00\ud800")},
              "current_node": "x"}  # fmt: skip
    odd = [CLAUDE, 7, None, {"mapping": 3}, {**CHATGPT, "mapping": {"a": {"message": {}}}}, circle]
    read = list(read_chatgpt(_file(*odd, CHATGPT), "ana", OtherBranches()))
    assert [isinstance(each, Unreadable) for each in read] == [True] * 5 + [False] * 4
    assert next(each["content"] for each in read if isinstance(each, dict)).isprintable()


@pytest.mark.parametrize("text", [b"", b"{}", b"[]", b'{"conversations": []}', b"not json", b"[{", b"[\xff]"])
def test_another_file_is_refused(text: bytes) -> None:
    """The error says what is expected, or where the JSON ends."""
    with pytest.raises(InvalidRequest, match="conversations"):
        list(read_chatgpt(io.BytesIO(text), "ana", OtherBranches()))


def test_the_zip_file_itself_is_read() -> None:
    """The services export a ZIP file. Large exports have several numbered files in it."""
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        archive.writestr("chat.html", "")
        for number in (0, 1):
            archive.writestr(
                f"conversations-00{number}.json", json.dumps([{**CHATGPT, "conversation_id": f"c{number}"}])
            )
    with unpacked(packed) as files:
        read = [each for file in files for each in _shown(read_chatgpt(file, "ana", OtherBranches()))]
    assert [session for session, *_ in read] == ["c0", "c0", "c1", "c1"]
    empty = io.BytesIO()
    zipfile.ZipFile(empty, "w").close()
    with pytest.raises(InvalidRequest, match=r"no conversations\.json"), unpacked(empty):
        pass


class _Endless(io.BytesIO):
    """An export of many conversations, which is made as it is read."""

    def __init__(self, conversations: int) -> None:
        super().__init__()
        text = json.dumps({**CLAUDE, "name": "x" * 100_000}).encode()
        self._parts = iter([b"[", text, *[b"," + text] * (conversations - 1), b"]"])
        self._rest = b""

    def read(self, size: int | None = -1, /) -> bytes:
        size = size or 0
        while len(self._rest) < size and (part := next(self._parts, None)) is not None:
            self._rest += part
        found, self._rest = self._rest[:size], self._rest[size:]
        return found


def test_a_large_export_is_read_in_parts() -> None:
    """30 MB take a small part of that in memory."""
    tracemalloc.start()
    read = len(_shown(read_claude(_Endless(300), "ana", OtherBranches())))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert read == 600
    assert peak < 3_000_000
