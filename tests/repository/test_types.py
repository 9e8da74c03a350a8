"""A type checker finds an author's mistakes before a worker does."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import get_type_hints

import pytest

from perdure.application.sending import Fields
from perdure.turns.inbox.incoming import MessageFields
from tests.programs import package, program
from tests.repository.source import ROOT

PROGRAM = """
from dataclasses import dataclass
from perdure import Agent, Sent, ToolContext, TurnContext, celery_tool, result, send, tool
from perdure.testing import Scripted, ask, call

@dataclass
class Order:
    article: str
    pieces: int

@tool(effect="pure")
def price(article: str, pieces: int = 1) -> float:
    '''Look up a price.'''
    return 3.5 * pieces

@tool
async def stock(article: str, context: ToolContext[Order]) -> int:
    '''Look up the stock.'''
    return context.deps.pieces

def greet(turn: TurnContext[Order]) -> str:
    return turn.deps.article

shop = Agent("shop", greet, [price, stock], output=Order, max_tokens=5_000)
sent: Sent = send(None, user_id="ana", text="Tea!", channel="web", on_busy="steer", reply_to={"task": "shop.reply"})
total: float = price("tea") + price("tea", pieces=2)
scripted = Scripted(call(price, article="tea"), call("stock", article="tea"), Order("tea", 2))
data = result(sent, output=Order).data
pieces: int = 0 if data is None else data.pieces

@tool(effect="idempotant")  # a wrong effect
def pay(cents: int) -> str:
    '''Pay.'''
    return "paid"

report = celery_tool("reports.make", effect="safe")  # a wrong effect
price()  # a missing argument
price(article=3)  # a wrong type
wrong: str = price("tea")  # a wrong type
Agent("shop", "You sell tea.", max_token=5)  # a misspelt keyword
send(None, user_id="ana", text="Tea!", chanel="web")  # a misspelt keyword
send(None, user_id="ana", text="Tea!", on_busy="wait")  # a wrong value
call(price, artcle="tea")  # a misspelt keyword
result(sent).repply  # a wrong field
pieces = 0 if data is None else data.peices  # a wrong field
"""
"""Correct declarations, and mistakes with a comment each."""


def mypy(path: Path) -> list[str]:
    return [sys.executable, "-m", "mypy", "--strict", "--config-file", "pyproject.toml", str(path)]


def pyright(path: Path) -> list[str]:
    return [program("node"), str(package("pyright") / "index.js"), "--pythonpath", sys.executable, str(path)]


@pytest.mark.exhaustive
@pytest.mark.parametrize("checker", [mypy, pyright])
def test_a_checker_finds_planted_mistakes(checker: Callable[[Path], list[str]], tmp_path: Path) -> None:
    """Each line with a mistake has an error, and no other line has one, but for the function of a wrong decorator."""
    path = tmp_path / "planted.py"
    path.write_text(PROGRAM, encoding="utf-8")
    ran = subprocess.run(checker(path), cwd=ROOT, capture_output=True, text=True, timeout=110, check=False)
    errors = [line for line in ran.stdout.splitlines() if "[untyped-decorator]" not in line]
    found = {int(line) for line in re.findall(r"planted\.py:(\d+):(?:\d+ -)? error", "\n".join(errors))}
    planted = {number for number, line in enumerate(PROGRAM.splitlines(), start=1) if "  # a " in line}
    assert found == planted, ran.stdout + ran.stderr


def test_send_has_a_type_for_each_field_of_a_message() -> None:
    """A field of `POST /v1/messages` without a type in `send` would be a mistake for the checker."""
    assert get_type_hints(Fields).keys() == MessageFields.model_fields.keys() - {"text"}
