"""Agents from pydantic-ai's examples and documentation, as they stand there, except that scripted models answer.

The files in `examples` are those of the package `pydantic-ai-examples`, unchanged. Each `Documented` has the agent, the
replies of its model, and how a plain run calls it.
"""

from __future__ import annotations

import importlib
import json
import os
import sqlite3
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import date
from types import ModuleType
from typing import Any
from unittest import mock

import httpx
from pydantic import BaseModel, Field
from pydantic_ai import Agent, ModelRetry, RunContext, format_prompt
from pydantic_ai.messages import ModelMessage, ModelResponse, TextPart, ToolCallPart
from pydantic_ai.models.function import AgentInfo, FunctionModel

Line = str | list[tuple[str, dict[str, Any]]]
"""A reply: text, or calls of tools."""


@dataclass
class Documented:
    """An agent, the replies of its model, the prompts of a conversation, and the dependencies of a run."""

    agent: Agent[Any, Any]
    script: Sequence[Line]
    prompts: Sequence[str]
    deps: Callable[[], Any] | None = None
    inner: Sequence[tuple[Agent[Any, Any], Sequence[Line]]] = ()
    """The agents that tools run, with the replies of their models."""
    seen: list[list[ModelMessage]] = field(default_factory=list)
    """What the model received with each request."""
    opened: AbstractContextManager[Any] = field(default_factory=nullcontext)
    """What the tools use, until the end of `scripted`."""

    @contextmanager
    def scripted(self) -> Iterator[None]:
        """Let new models reply by the scripts within the block, once."""
        agents = [(self.agent, self.script, self.seen), *((each, script, []) for each, script in self.inner)]
        models = [(each, each.model) for each, _, _ in agents]
        try:
            for each, script, seen in agents:
                each.model = _model(script, seen)
            with self.opened:
                yield
        finally:
            for each, model in models:
                each.model = model


def _model(script: Sequence[Line], seen: list[list[ModelMessage]]) -> FunctionModel:
    replies = iter(script)

    def answer(messages: list[ModelMessage], _: AgentInfo) -> ModelResponse:
        seen.append(messages)
        line = next(replies)
        if isinstance(line, str):
            return ModelResponse(parts=[TextPart(line)])
        return ModelResponse(
            parts=[
                ToolCallPart(name, arguments, tool_call_id=f"call_{number}")
                for number, (name, arguments) in enumerate(line)
            ]
        )

    return FunctionModel(answer)


_ABSENT = ("logfire", "pydantic_ai.ui.ag_ui")
"""What the examples import to report their runs to a service, and to serve them to a browser."""

_KEYS = ("OPENAI_API_KEY", "GROQ_API_KEY")


def example(name: str) -> ModuleType:
    """The module `name` of `examples`."""
    stubs = {each: mock.MagicMock() for each in _ABSENT if each not in sys.modules}
    sys.modules.update(stubs)
    try:
        with mock.patch.dict(os.environ, dict.fromkeys(_KEYS, "none")):
            return importlib.import_module(f"tests.adapters.pydantic_ai.examples.{name}")
    finally:
        for each in stubs:
            del sys.modules[each]


# --- the dice game of the documentation --------------------------------------------------------

dice_agent = Agent(
    deps_type=str,
    system_prompt=(
        "You're a dice game, you should roll the die and see if the number you get back matches the user's guess. "
        "If so, tell them they're a winner. Use the player's name in the response."
    ),
)


@dice_agent.tool_plain
def roll_dice() -> str:
    """Roll a six-sided die and return the result."""
    return "4"


@dice_agent.tool
def get_player_name(ctx: RunContext[str]) -> str:
    """Get the player's name."""
    return ctx.deps


# --- SQL generation -----------------------------------------------------------------------------


class Success(BaseModel):
    """Response when SQL could be successfully generated."""

    sql_query: str
    explanation: str = Field("", description="Explanation of the SQL query, as markdown")


class InvalidRequest(BaseModel):
    """Response when the user input didn't include enough information to generate SQL."""

    error_message: str


SQL_EXAMPLES = [{"request": "show me records where foobar is false", "response": "SELECT * FROM records"}]

sql_agent = Agent[None, Success | InvalidRequest](output_type=Success | InvalidRequest)  # type: ignore[arg-type]


@sql_agent.system_prompt
async def sql_system_prompt() -> str:
    """The schema and examples."""
    return f"Given the following examples, write SQL.\n{format_prompt.format_as_xml(SQL_EXAMPLES)}\n{date(2026, 3, 2)}"


@sql_agent.output_validator
async def validate_sql_output(output: Success | InvalidRequest) -> Success | InvalidRequest:
    """Ask again for anything that is no query."""
    if isinstance(output, InvalidRequest):
        return output
    output.sql_query = output.sql_query.replace("\\", "")
    if not output.sql_query.upper().startswith("SELECT"):
        raise ModelRetry("Please create a SELECT query")
    return output


# --- the examples -------------------------------------------------------------------------------


def _bank() -> Documented:
    bank = example("bank_support")
    connection = sqlite3.connect(":memory:", check_same_thread=False)
    cursor = connection.cursor()
    cursor.execute("CREATE TABLE customers(id, name, balance)")
    cursor.execute("INSERT INTO customers VALUES (123, 'John', 123.45)")
    vars(bank)["cur"] = cursor  # a global variable, as when the example is the main program
    advice = {"support_advice": "Hello John, $123.45.", "block_card": False}
    return Documented(
        bank.support_agent,
        [
            [("customer_balance", {})],
            [("final_result", {**advice, "risk": "high"})],
            [("final_result", {**advice, "risk": 1})],
            [("final_result", {"support_advice": "I'm sorry.", "block_card": True, "risk": 8})],
        ],
        ["What is my balance?", "I just lost my card!"],
        lambda: bank.SupportDependencies(customer_id=123, db=bank.DatabaseConn(sqlite_conn=connection)),
        opened=closing(connection),
    )


def _weather() -> Documented:
    weather = example("weather_agent")
    answers = {"/latlng": {"lat": 51.1, "lng": -0.1}, "/number": 21, "/weather": "Sunny"}
    served = httpx.MockTransport(lambda request: httpx.Response(200, json=answers[request.url.path]))
    return Documented(
        weather.weather_agent,
        [
            [
                ("get_lat_lng", {"location_description": "London"}),
                ("get_lat_lng", {"location_description": "Wiltshire"}),
            ],
            [("get_weather", {"lat": 51.1, "lng": -0.1}), ("get_weather", {"lat": "north", "lng": 1})],
            [("get_weather", {"lat": 51.2, "lng": -2.0})],
            "It is sunny in London and in Wiltshire.",
        ],
        ["What is the weather like in London and in Wiltshire?"],
        lambda: weather.Deps(httpx.AsyncClient(transport=served)),
    )


def _flight() -> Documented:
    booking = example("flight_booking")
    found = {"flight_number": "SFO-AK123", "price": 350, "origin": "SFO", "destination": "ANC", "date": "2025-01-10"}
    return Documented(
        booking.search_agent,
        [
            [("extract_flights", {})],
            [("final_result_FlightDetails", {**found, "origin": "LAX"})],
            [("final_result_FlightDetails", found)],
        ],
        ["Find me a flight from SFO to ANC on 2025-01-10"],
        lambda: booking.Deps(booking.flights_web_page, "SFO", "ANC", date(2025, 1, 10)),
        [(booking.extraction_agent, [[("final_result", {"response": [found]})]])],
    )


def _medical() -> Documented:
    medical = example("medical_agent_delegation")
    report = {
        "diagnosis": ["angina"],
        "differential": [],
        "recommended_tests": ["ECG"],
        "immediate_actions": [],
        "estimated_time_minutes": 30,
    }
    return Documented(
        medical.triage_agent,
        [
            [("consult_specialist", {"specialty": "cardiology", "question": "Chest pain?"})],
            [
                (
                    "final_result",
                    {"specialty": "cardiology", "final_report": report, "final_status": "resolved_by_specialist"},
                )
            ],
        ],
        ["Sudden severe chest pain."],
        lambda: medical.PatientInfo(patient_id="P001", age=64, known_conditions=["hypertension"]),
        [(medical.cardiology_agent, [[("final_result", report)]])],
    )


def _roulette() -> Documented:
    roulette = example("roulette_wheel")
    return Documented(
        roulette.roulette_agent,
        [
            [("roulette_wheel", {"square": 18})],
            [("final_result", {"response": True})],
            [("roulette_wheel", {"square": 5})],
            [("final_result", {"response": False})],
        ],
        ["Put my money on square eighteen", "I bet five is the winner"],
        lambda: roulette.Deps(winning_number=18),
    )


def _dice() -> Documented:
    return Documented(
        dice_agent,
        [[("roll_dice", {})], [("get_player_name", {})], "Congratulations Anne, you guessed correctly!", "Again?"],
        ["My guess is 4", "And now?"],
        lambda: "Anne",
    )


def _sql() -> Documented:
    return Documented(
        sql_agent,
        [
            [("final_result_Success", {"sql_query": "DELETE FROM records", "explanation": "all"})],
            [("final_result_Success", {"sql_query": "SELECT * FROM records", "explanation": "all"})],
        ],
        ["show me logs from yesterday, with level error"],
    )


DOCUMENTED: dict[str, Callable[[], Documented]] = {
    "bank": _bank,
    "dice": _dice,
    "flight": _flight,
    "medical": _medical,
    "roulette": _roulette,
    "sql": _sql,
    "weather": _weather,
}
"""The agents by name."""


def shown(output: Any) -> str:
    """An output as a plain run prints it, as JSON."""
    return json.dumps(output.model_dump(mode="json") if isinstance(output, BaseModel) else output)
