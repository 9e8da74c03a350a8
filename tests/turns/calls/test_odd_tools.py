"""If a tool raises a `BaseException` or returns a value without a JSON form, the model reads an error."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from perdure import ToolError, tool
from tests.bombs import peak
from tests.turns.harness import PATIENCE_S, Harness
from tests.turns.scripted import calls, says


class Odd(BaseException):
    """An exception of a library that `except Exception` does not catch."""


def _raising(error: BaseException) -> Callable[[], object]:
    def work() -> object:
        raise error

    return work


def _circle() -> object:
    circle: list[object] = []
    circle.append(circle)
    return circle


@pytest.mark.parametrize(
    ("work", "expected"),
    [
        pytest.param(_raising(SystemExit(3)), "Error: SystemExit: 3", id="SystemExit"),
        pytest.param(_raising(KeyboardInterrupt()), "Error: KeyboardInterrupt: the tool was aborted.", id="Ctrl-C"),
        pytest.param(_raising(GeneratorExit()), "Error: GeneratorExit: the tool was aborted.", id="GeneratorExit"),
        pytest.param(
            _raising(asyncio.CancelledError()), "Error: CancelledError: the tool was aborted.", id="asyncio's"
        ),
        pytest.param(_raising(Odd("secret")), "Error: Odd: the tool was aborted.", id="a class of its own"),
        pytest.param(object, "Error: The tool act ran, but its result of type object cannot be shown", id="an object"),
        pytest.param(_circle, "Error: The tool act ran, but its result of type list cannot be shown", id="a circle"),
        pytest.param(lambda: _circle, "Error: The tool act ran, but its result of type function", id="a function"),
    ],
)
@pytest.mark.parametrize("more", [0, 1], ids=["alone", "with another call"])
def test_the_turn_continues(harness: Harness, work: Callable[[], object], expected: str, more: int) -> None:
    """The failed tool is not run again. The model's other tool calls and the turn continue."""
    ran: list[int] = []

    @tool(effect="unsafe")
    def act() -> object:
        """Count the run, then call `work`."""
        ran.append(1)
        return work()

    @tool(effect="pure")
    def look() -> str:
        """Return `seen`."""
        return "seen"

    harness.equip(act, look)
    harness.script(calls(("act", {}), *[("look", {})] * more), says("on we go"))
    sent = harness.send()
    harness.run(sent.session_id)
    assert harness.turn(sent.turn_id)["reply"]["text"] == "on we go"
    first, *others = [text for role, text in harness.lines(sent.session_id) if role == "tool"]
    assert first.startswith(expected)
    assert others == ["seen"] * more
    assert ran == [1]


def test_a_result_of_a_hundred_megabytes_is_held_once(harness: Harness) -> None:
    """A large result is not copied before it is cut. With copies, the peak of memory use was 837 MB."""

    @tool(effect="pure")
    def read() -> str:
        """Return a hundred million characters."""
        return "x" * 100_000_000

    harness.equip(read)
    harness.script(calls(("read", {})), says("done"))
    with peak() as found:
        assert harness.ask()["status"] == "done"
    assert found.mib < 115
    [result] = [each.content for each in harness.sql("SELECT content FROM messages WHERE role = 'tool'")]
    assert result.endswith("[cut: 100,000,000 characters in all, the first 32,000 at most are shown]")


def test_only_an_unexpected_error_of_a_tool_has_a_traceback(harness: Harness, caplog: pytest.LogCaptureFixture) -> None:
    """A `ToolError` that a tool raises is an answer to the model: the log has one line for it."""

    @tool(effect="pure")
    def look(city: str) -> str:
        """Look a city up."""
        if city == "Atlantis":
            raise ToolError("There is no such city.")
        raise KeyError(city)

    harness.equip(look)
    harness.script(calls(("look", {"city": "Atlantis"})), calls(("look", {"city": "Berlin"})), says("done"))
    caplog.set_level("INFO")
    assert harness.ask()["status"] == "done"
    expected, unexpected = [each for each in caplog.records if "tool look failed" in each.message]
    assert (expected.message, expected.exc_info) == ("tool look failed: ToolError", None)
    assert unexpected.message == "tool look failed: KeyError"
    assert unexpected.exc_info is not None
    assert unexpected.exc_info[0] is KeyError


def test_an_error_of_a_hundred_megabytes_fills_no_log(harness: Harness, caplog: pytest.LogCaptureFixture) -> None:
    """The log contains the tool's name and the error's type, but not the error's message, which may be huge."""

    @tool(effect="pure")
    def read() -> str:
        """Fail with a message of a hundred million characters."""
        raise ValueError("the response was: " + "x" * 100_000_000)

    harness.equip(read)
    harness.script(calls(("read", {})), says("done"))
    caplog.set_level("INFO")
    assert harness.ask()["status"] == "done"
    assert len(caplog.text) < 50_000
    assert "tool read failed: ValueError" in caplog.text
    assert "the response was" not in caplog.text


class Unspeakable(Exception):
    """An error whose class cannot make a text of it."""

    def __str__(self) -> str:
        raise RuntimeError("no text")


def _caused(error: Exception) -> Callable[[], object]:
    def work() -> object:
        raise error from Unspeakable()

    return work


@pytest.mark.parametrize(
    ("work", "shown"),
    [
        (_raising(Unspeakable()), "Error: Unspeakable: its message cannot be shown"),
        (_caused(ValueError("visible")), "Error: ValueError: visible"),
        (_caused(ToolError("visible")), "Error: visible"),
    ],
)
def test_an_error_without_a_text_ends_the_call(harness: Harness, work: Callable[[], object], shown: str) -> None:
    """The call has failed at once, and not at its time limit with an unknown outcome."""

    @tool(timeout_s=PATIENCE_S)
    def act() -> object:
        """Call `work`."""
        return work()

    harness.equip(act)
    harness.script(calls(("act", {})), says("on we go"))
    sent = harness.send()
    harness.run(sent.session_id)
    assert [text for role, text in harness.lines(sent.session_id) if role == "tool"] == [shown]
    assert [row.status for row in harness.sql("SELECT status FROM tool_effects")] == ["failed"]
