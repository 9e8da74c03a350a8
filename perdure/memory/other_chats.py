"""Reads the conversations that ChatGPT and Claude export, as lines for `import_export.import_messages`.

Both export a ZIP file with `conversations.json`: one JSON array of all conversations. `ijson` reads it in parts, so
only one conversation is in memory. A conversation is a tree, because an edited question or a repeated answer begins a
branch. Only the current branch is imported: the one that the user sees. Texts are imported with their times and
models, and so are the texts of Claude's attachments, which long pasted texts become; pictures, thoughts and the calls
of tools are left out.
"""

from __future__ import annotations

import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import PurePosixPath
from typing import IO, Any

import ijson

from perdure.errors import InvalidRequest
from perdure.memory.import_export import Given, Unreadable
from perdure.text.untrusted import cut, first_line, storable

_SHOWN = 100
_LEFT_OUT = frozenset({"code", "execution_output", "reasoning_recap", "thoughts", "user_editable_context"})
"""The kinds of content of ChatGPT's messages that the user and the assistant do not say to each other."""

_Node = Mapping[str, Any]


@dataclass(slots=True)
class OtherBranches:
    """Counts the messages of branches that are not current, and are therefore not imported."""

    messages: int = 0


@contextmanager
def unpacked(file: IO[bytes]) -> Iterator[list[IO[bytes]]]:
    """The `conversations*.json` files in `file`, if it is a ZIP file; otherwise `file` itself.

    Raises:
        InvalidRequest: the ZIP file has no such file.
    """
    packed = file.seekable() and zipfile.is_zipfile(file)
    if file.seekable():
        file.seek(0)  # the check has read the end
    if not packed:
        yield [file]
        return
    with zipfile.ZipFile(file) as archive:
        names = sorted(each for each in archive.namelist() if PurePosixPath(each).match("conversations*.json"))
        if not names:
            raise InvalidRequest("The ZIP file has no conversations.json.")
        yield [archive.open(name) for name in names]


def read_chatgpt(file: IO[bytes], user_id: str, others: OtherBranches) -> Iterator[Given]:
    """The messages of each conversation's current branch, as lines; counts those of the other branches.

    Raises:
        InvalidRequest: the file is not ChatGPT's `conversations.json`.
    """
    return _read(file, user_id, "chatgpt", _of_chatgpt, others)


def read_claude(file: IO[bytes], user_id: str, others: OtherBranches) -> Iterator[Given]:
    """As `read_chatgpt`, for Claude's export.

    Raises:
        InvalidRequest: the file is not Claude's `conversations.json`.
    """
    return _read(file, user_id, "claude", _of_claude, others)


READERS = {"chatgpt": read_chatgpt, "claude": read_claude}


@dataclass(frozen=True, slots=True)
class _Said:
    """A message: its id, the id of the message before it, its time, and its line, if it is one of the conversation."""

    id: str
    parent: str | None
    at: str | None
    line: dict[str, Any] | None


@dataclass(frozen=True, slots=True)
class _Conversation:
    """A tree of messages. `current` is the id of the last message of the current branch, if the export names it."""

    session: str
    begun_at: str | None
    said: list[_Said]
    current: str | None


def _read(
    file: IO[bytes], user_id: str, channel: str, parse: Callable[[_Node], _Conversation], others: OtherBranches
) -> Iterator[Given]:
    found = 0
    try:
        for item in ijson.items(_WithoutMark(file), "item", use_float=True):
            found += 1
            try:
                conversation = parse(item)
            except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
                reason = f"{type(error).__name__}: {storable(cut(str(error), _SHOWN))}"
                yield Unreadable(f"conversation {found} is not one of {channel}'s: {reason}")
                continue
            branch, at = _branch(conversation), conversation.begun_at
            others.messages += sum(each.line is not None for each in conversation.said)
            for each in branch:
                at = each.at or at
                if each.line is not None:
                    others.messages -= 1
                    named = {"user_id": user_id, "session": conversation.session, "message_id": each.id}
                    yield {**named, "channel": channel, "occurred_at": at, **each.line}
    except (ijson.JSONError, UnicodeDecodeError) as error:
        raise InvalidRequest(
            f"The file is not JSON after conversation {found}: {first_line(storable(str(error)))}. "
            "The conversations before it were imported."
        ) from None
    if not found:
        raise InvalidRequest("The file has no conversations: expected the JSON array conversations.json of the export.")


def _branch(conversation: _Conversation) -> list[_Said]:
    """The current branch from its first message. If it is not named, the branch of the last message is current."""
    by_id, current = {each.id: each for each in conversation.said}, conversation.current
    if current not in by_id:
        parents = {each.parent for each in by_id.values()}
        current = next((each for each in reversed(by_id) if each not in parents), None)
    branch: dict[str, _Said] = {}
    while current is not None and current in by_id and current not in branch:  # a malformed tree may have a circle
        branch[current] = by_id[current]
        current = by_id[current].parent
    return list(reversed(branch.values()))


def _of_chatgpt(item: _Node) -> _Conversation:
    said = []
    for node_id, node in item["mapping"].items():
        message = node.get("message")
        at, line = (None, None) if message is None else (message.get("create_time"), _line_of_chatgpt(message))
        said.append(_Said(node_id, node.get("parent"), _time(at), line))
    session = str(item.get("conversation_id") or item["id"])
    return _Conversation(session, _time(item.get("create_time")), said, item.get("current_node"))


def _time(seconds: float | None) -> str | None:
    return None if seconds is None else datetime.fromtimestamp(seconds, UTC).isoformat()


def _line_of_chatgpt(message: _Node) -> dict[str, Any] | None:
    content, metadata = message.get("content") or {}, message.get("metadata") or {}
    role = message["author"]["role"]
    if (
        role not in {"user", "assistant"}
        or content.get("content_type") in _LEFT_OUT
        or message.get("recipient", "all") != "all"
        or metadata.get("is_visually_hidden_from_conversation")
    ):
        return None
    line = _line(role, [each if isinstance(each, str) else each.get("text") for each in content.get("parts") or []])
    model = metadata.get("model_slug") if role == "assistant" else None
    return {**line, "model": model} if line and model else line


def _of_claude(item: _Node) -> _Conversation:
    said: list[_Said] = []
    for message in item["chat_messages"]:
        texts = [each.get("text") for each in message.get("content") or [] if each.get("type") == "text"]
        role = "user" if message["sender"] == "human" else message["sender"]
        parent = message.get("parent_message_uuid", said[-1].id if said else None)
        attached = [_attached(each) for each in message.get("attachments") or []]
        line = _line(role, [*(texts or [message.get("text")]), *attached])
        said.append(_Said(message["uuid"], parent, message.get("created_at"), line))
    return _Conversation(item["uuid"], item.get("created_at"), said, item.get("current_leaf_message_uuid"))


def _attached(attachment: _Node) -> str | None:
    """The text of an attachment, after its name; `None` if the export does not have it, as of a picture."""
    text = str(attachment.get("extracted_content") or "").strip()
    return f"[{attachment.get('file_name') or 'attachment'}]\n{text}" if text else None


def _line(role: str, parts: Iterable[Any]) -> dict[str, Any] | None:
    content = storable("\n\n".join(each for each in parts if isinstance(each, str) and each.strip()))
    return {"role": role, "content": content} if content else None


class _WithoutMark:
    """A file without its byte order mark."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._begins = True

    def read(self, size: int = -1) -> bytes:
        found = self._file.read(size)
        if self._begins and size:
            self._begins = False
            found = found.removeprefix(b"\xef\xbb\xbf")
        return found
