"""A tool's results and errors become storable text of limited length for the transcript."""

from __future__ import annotations

import json
import re
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, date, datetime
from enum import Enum
from itertools import count
from typing import Any
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perdure.errors import OutcomeUnknown, ToolError
from perdure.files.results import File
from perdure.text import untrusted
from perdure.tools.registry import MAX_RESULT_CHARS, Tool, ToolContext, tool
from tests.bombs import peak

FILE = File(b"a,b", name="shot.csv")
LINE = r"\[file: shot\.csv\]"
CONTEXT = ToolContext("ana", UUID(int=1), UUID(int=2), UUID(int=3), "cli", threading.Event())


@dataclass
class Point:
    x: int
    at: datetime


class Colour(str, Enum):  # noqa: UP042 (as applications have them)
    RED = "red"


class Level(Enum):
    LOW = "low"


class Unspeakable(Exception):
    """An error whose class cannot make a text of it."""

    def __str__(self) -> str:
        raise RuntimeError("no text")


def returning(value: Any, **declared: Any) -> Tool:
    """A tool that returns `value`."""

    @tool(**declared)
    def returns() -> Any:
        """Return `value`."""
        return value

    return returns


def raising(error: BaseException) -> Tool:
    """A tool that raises `error`."""

    @tool
    def raises() -> None:
        """Raise `error`."""
        raise error

    return raises


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("as it is: 서울", "as it is: 서울"),
        ("", ""),
        ({"city": "서울", "n": [1, 2.5, None, True]}, '{"city": "서울", "n": [1, 2.5, null, true]}'),
        (7, "7"),
        (Point(1, datetime(2026, 1, 1, tzinfo=UTC)), '{"x": 1, "at": "2026-01-01T00:00:00Z"}'),
        ({"ids": {UUID(int=1)}}, '{"ids": ["00000000-0000-0000-0000-000000000001"]}'),
        ("NUL \x00 half \ud83d whole \ud83d\ude00", "NUL \ufffd half \ufffd whole \N{GRINNING FACE}"),
        (["half \udc00"], '["half \ufffd"]'),
        (Colour.RED, "red"),
        ([Colour.RED], '["red"]'),
        ({Colour.RED: 1, Level.LOW: 2, date(2026, 1, 2): 3}, '{"red": 1, "low": 2, "2026-01-02": 3}'),
        ({UUID(int=1): [Level.LOW]}, '{"00000000-0000-0000-0000-000000000001": ["low"]}'),
        ({1: "a", None: "b", False: "c", 0.5: "d"}, '{"1": "a", "null": "b", "false": "c", "0.5": "d"}'),
    ],
)
def test_results_become_text_that_can_be_stored(value: Any, shown: str) -> None:
    """Text stays as it is, other values become readable JSON, and unstorable characters are replaced."""
    assert returning(value).call({}, CONTEXT) == shown


@pytest.mark.parametrize(
    "value",
    [b"\x89PNG\r\n", bytearray(b"\xff"), memoryview(b"text"), {"image": [b"\x89PNG"]}, b"\xff" * 100_000],
    ids=["bytes", "a bytearray", "a memoryview", "nested", "long"],
)
def test_the_refusal_of_binary_data_names_the_way_out(value: Any) -> None:
    """A model receives text only. The error says what a tool can return instead."""
    with pytest.raises(ToolError) as raised:
        returning(value).call({}, CONTEXT)
    assert raised.value.message.startswith("The tool returns ran, but its result of type ")
    assert "Return text, such as base64.b64encode(data).decode(), or store the data" in raised.value.message


def test_bytes_that_are_text_are_text() -> None:
    """UTF-8 bytes are shown as text. A cut may be within a character."""
    assert returning("서울".encode()).call({}, CONTEXT) == '"서울"'
    assert returning("서울".encode() * 100, max_result_chars=100).call({}, CONTEXT).startswith('"서울')


@given(st.text())
def test_any_text_becomes_text_that_can_be_stored(text: str) -> None:
    """`storable` makes any text storable, and does not change storable text."""
    stored = untrusted.storable(text)
    stored.encode()
    assert "\x00" not in stored
    assert untrusted.storable(stored) == stored
    assert (stored == text) is untrusted.is_storable(text)


def _circle() -> list[Any]:
    circle: list[Any] = []
    circle.append(circle)
    return circle


def _deep() -> list[Any]:
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    return deep


def _keyed_by_tuples() -> dict[tuple[int, int], int]:
    return {(1, 2): 3}


def _endless_number() -> int:
    return 10**5_000


@pytest.mark.parametrize("make", [object, _circle, _deep, _keyed_by_tuples, _endless_number])
def test_a_result_without_a_json_form_is_an_error_that_says_so(make: Callable[[], Any]) -> None:
    """If a result has no JSON form, the error says that the tool ran, so that the model does not repeat the call."""
    with pytest.raises(ToolError, match="The tool returns ran, but its result of type"):
        returning(make()).call({}, CONTEXT)


def test_a_result_over_the_limit_is_cut_visibly() -> None:
    """A result over the length limit is cut. A notice at the end has the result's full length."""
    shown = returning("x" * 10_000_000).call({}, CONTEXT)
    assert len(shown) == MAX_RESULT_CHARS
    assert shown.endswith("[cut: 10,000,000 characters in all, the first 32,000 at most are shown]")
    assert returning("x" * MAX_RESULT_CHARS).call({}, CONTEXT) == "x" * MAX_RESULT_CHARS


def test_a_tool_has_a_limit_of_its_own() -> None:
    """A tool can declare its own maximum result length."""
    assert len(returning("x" * 1_000, max_result_chars=200).call({}, CONTEXT)) == 200


def test_a_tool_error_reaches_the_model_unchanged() -> None:
    """The model reads all lines of a `ToolError`'s message."""
    with pytest.raises(ToolError) as caught:
        raising(ToolError("No such city.\nTry Lyon.\x00")).call({}, CONTEXT)
    assert caught.value.message == "No such city.\nTry Lyon.\ufffd"


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (ValueError("bad\nTraceback: secrets"), "ValueError: bad"),
        (KeyError("x"), "KeyError: 'x'"),
        (ZeroDivisionError(), "ZeroDivisionError:"),
        (RecursionError("deep"), "RecursionError: deep"),
        (RuntimeError("half \ud83d"), "RuntimeError: half \ufffd"),
    ],
)
def test_any_other_error_becomes_one_line(error: Exception, message: str) -> None:
    """Of an exception other than `ToolError`, the model reads the type and the first line of the message."""
    with pytest.raises(ToolError) as caught:
        raising(error).call({}, CONTEXT)
    assert caught.value.message == message
    assert caught.value.__cause__ is error


def test_an_errors_line_is_bounded() -> None:
    """The error line has at most 500 characters, because some libraries put whole responses into error messages."""
    with pytest.raises(ToolError) as caught:
        raising(ValueError("x" * 1_000_000)).call({}, CONTEXT)
    assert len(caught.value.message) == 500


def test_a_tool_that_exits_ends_itself_only() -> None:
    """A tool's `SystemExit`, for example from a command-line library, becomes a `ToolError`."""

    @tool
    def exits() -> None:
        """Exit."""
        sys.exit(3)

    with pytest.raises(ToolError, match="SystemExit: 3"):
        exits.call({}, CONTEXT)


@dataclass
class Report:
    title: str
    body: str


MEGABYTE = "x" * 1_000_000
LARGE: dict[str, Callable[[], Any]] = {
    "text": lambda: "x" * 100_000_000,
    "wide text": lambda: "서울" * 25_000_000,
    "half pairs": lambda: "\ud83d" * 50_000_000,
    "bytes": lambda: b"x" * 100_000_000,
    "a list": lambda: [MEGABYTE + str(number) for number in range(100)],
    "an object": lambda: {"a": 1, "b": {"c": [MEGABYTE * 100]}},
    "a key": lambda: {MEGABYTE * 100: 1},
    "a dataclass": lambda: Report("all of it", MEGABYTE * 100),
    "many numbers": lambda: [7] * 12_500_000,
    "a generator": lambda: (MEGABYTE + str(number) for number in range(100)),
    "tuples": lambda: (((MEGABYTE * 100,),),),
}
"""For each kind of value, a function that makes a value of about 100 MB."""


@pytest.mark.parametrize("kind", LARGE)
def test_a_hundred_megabytes_are_cut_before_they_are_copied(kind: str) -> None:
    """A large result is cut before it is copied: a result of 100 MB takes less than 5 MiB of additional memory."""
    returns = returning(LARGE[kind]())
    with peak() as found:
        shown = returns.call({}, CONTEXT)
    assert found.mib < 5
    assert len(shown) == MAX_RESULT_CHARS
    assert "characters in all, the first 32,000 at most are shown]" in shown
    assert untrusted.is_storable(shown)


@pytest.mark.parametrize("kind", [ToolError, OutcomeUnknown, ValueError])
def test_an_error_of_a_hundred_megabytes_is_cut_before_it_is_copied(kind: type[Exception]) -> None:
    """A large error message is cut before it is copied."""
    raises = raising(kind("x" * 100_000_000))
    with peak() as found, pytest.raises((ToolError, OutcomeUnknown)) as caught:
        raises.call({}, CONTEXT)
    assert found.mib < 5
    assert len(caught.value.message) <= MAX_RESULT_CHARS


def test_a_cut_result_begins_like_the_whole() -> None:
    """Before the notice at its end, a cut result is a prefix of the whole JSON."""
    value = {"rows": [{"n": number, "city": "서울"} for number in range(5_000)], "at": {UUID(int=1)}}
    whole = json.dumps({**value, "at": [str(UUID(int=1))]}, ensure_ascii=False)
    shown = returning(value).call({}, CONTEXT)
    assert shown.partition("\n[cut: ")[0] == whole[: shown.index("\n[cut: ")]
    assert len(shown) == MAX_RESULT_CHARS
    assert returning(value, max_result_chars=len(whole)).call({}, CONTEXT) == whole


def _texts() -> Any:
    return map(str, count())


def _pairs() -> Any:
    return zip(count(), count(), strict=False)


@pytest.mark.parametrize("make", [_texts, count, _pairs])
def test_an_iterator_is_read_as_far_as_there_is_room(make: Callable[[], Any]) -> None:
    """It may have no end."""

    @tool(max_result_chars=500)
    def numbers() -> Any:
        """Return numbers."""
        return make()

    shown = numbers.call({}, CONTEXT)
    assert shown.startswith(("[0, 1,", '["0", "1",', "[[0, 0],"))
    assert len(shown) == 500


def test_an_error_without_a_text_is_named() -> None:
    """The model reads the type of the error that was raised."""
    with pytest.raises(ToolError, match=r"^Unspeakable: its message cannot be shown$"):
        raising(Unspeakable()).call({}, CONTEXT)


def _attach(file: File) -> str:
    return f"[file: {file.name}]"


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (["q" * 1_000, FILE], rf"q+\n\[cut: 1,000 characters in all, the first \d+ at most are shown\]\n{LINE}"),
        ([FILE, "q" * 1_000], rf"{LINE}\nq+\n\[cut: 1,000 characters in all, .*\]"),
        (["a", FILE, "q" * 1_000, "b", FILE], rf"a\n{LINE}\nq+\n\[cut: 1,000 .*\]\n{LINE}"),
        (["q" * 350, "r" * 100, FILE], rf"q{{350}}\n{LINE}"),
        (["a", FILE, {"b": 1}], rf"a\n{LINE}\n\{{'b': 1\}}"),
        (("a", FILE), rf"a\n{LINE}"),
    ],
)
def test_only_texts_are_cut_next_to_files(value: Any, shown: str) -> None:
    """The line of each file is in the result, because the model gets the file by it."""
    context = replace(CONTEXT, attach=_attach)
    found = returning(value, max_result_chars=400).call({}, context)
    assert re.fullmatch(shown, found), found
    assert len(found) <= 400


def test_a_file_inside_another_object_is_refused() -> None:
    """The file would not be stored, and its text would be in the transcript."""
    with pytest.raises(ToolError, match=r"result of type dict cannot be shown: it has a file inside. Return the File,"):
        returning({"chart": FILE}).call({}, replace(CONTEXT, attach=_attach))
