"""Agents from pydantic-ai's documentation, as they stand there, except that scripted models answer.

Each `Documented` has the agent, its model, and how a plain run calls it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import date
from typing import Any, Literal

from pydantic import BaseModel, Field
from pydantic_ai import Agent, ModelRetry, RunContext, format_prompt
from pydantic_ai.messages import ModelMessage, ModelResponse, TextPart, ToolCallPart
from pydantic_ai.models.function import AgentInfo, FunctionModel


@dataclass
class Documented:
    """An agent, the replies of its model, the prompt, and the dependencies of a run."""

    agent: Agent[Any, Any]
    script: list[str | list[tuple[str, dict[str, Any]]]]
    prompt: str
    deps: Callable[[], Any] | None = None
    seen: list[int] = field(default_factory=list)

    def model(self) -> FunctionModel:
        """A new model that replies by the script: with text, or with calls."""
        replies = iter(self.script)

        def answer(messages: list[ModelMessage], _: AgentInfo) -> ModelResponse:
            self.seen.append(len(messages))
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


# --- the roulette wheel and the dice game -------------------------------------------------------

roulette_agent = Agent[int, bool](
    deps_type=int,
    output_type=bool,
    system_prompt=(
        "Use the `roulette_wheel` function to see if the customer has won based on the number they provide."
    ),
)


@roulette_agent.tool
async def roulette_wheel(ctx: RunContext[int], square: int) -> str:
    """Check if the square is a winner."""
    return "winner" if square == ctx.deps else "loser"


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


# --- bank support -------------------------------------------------------------------------------


class DatabaseConn:
    """The fake database of the documentation."""

    @classmethod
    async def customer_name(cls, *, id: int) -> str | None:  # noqa: A002 (as documented)
        """The customer's name."""
        return "John" if id == 123 else None

    @classmethod
    async def customer_balance(cls, *, id: int, include_pending: bool) -> float:  # noqa: A002 (the same)
        """The customer's balance."""
        if id == 123:
            return 123.45 if include_pending else 100.00
        raise ValueError("Customer not found")


@dataclass
class SupportDependencies:
    """The dependencies of the support agent."""

    customer_id: int
    db: DatabaseConn


class SupportOutput(BaseModel):
    """The output of the support agent."""

    support_advice: str = Field(description="Advice returned to the customer")
    block_card: bool = Field(description="Whether to block their card or not")
    risk: int = Field(description="Risk level of query", ge=0, le=10)


support_agent = Agent(
    deps_type=SupportDependencies,
    output_type=SupportOutput,
    instructions=(
        "You are a support agent in our bank, give the customer support and judge the risk level of their query. "
        "Reply using the customer's name."
    ),
)


@support_agent.instructions
async def add_customer_name(ctx: RunContext[SupportDependencies]) -> str:
    """Add the customer's name."""
    customer_name = await ctx.deps.db.customer_name(id=ctx.deps.customer_id)
    return f"The customer's name is {customer_name!r}"


@support_agent.tool
async def customer_balance(ctx: RunContext[SupportDependencies], include_pending: bool) -> str:
    """Returns the customer's current account balance."""
    balance = await ctx.deps.db.customer_balance(id=ctx.deps.customer_id, include_pending=include_pending)
    return f"${balance:.2f}"


# --- weather ------------------------------------------------------------------------------------


class LatLng(BaseModel):
    """A place on Earth."""

    lat: float
    lng: float


@dataclass
class WeatherDeps:
    """The dependencies of the weather agent: a client, here without a network."""

    places: dict[str, LatLng]


weather_agent = Agent(
    instructions="Be concise, reply with one sentence.",
    deps_type=WeatherDeps,
    retries=2,
)


@weather_agent.tool
async def get_lat_lng(ctx: RunContext[WeatherDeps], location_description: str) -> LatLng:
    """Get the latitude and longitude of a location."""
    return ctx.deps.places[location_description]


@weather_agent.tool
async def get_weather(ctx: RunContext[WeatherDeps], lat: float, lng: float) -> dict[str, Any]:
    """Get the weather at a location."""
    return {"temperature": f"{21 + round(lat - lng) % 3} °C", "description": "Sunny"}


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


# --- flight booking -----------------------------------------------------------------------------


class FlightDetails(BaseModel):
    """Details of the most suitable flight."""

    flight_number: str
    price: int
    origin: str = Field(description="Three-letter airport code")
    destination: str = Field(description="Three-letter airport code")
    date: date


class NoFlightFound(BaseModel):
    """When no valid flight is found."""


@dataclass
class FlightDeps:
    """What the search agent needs."""

    web_page_text: str
    req_origin: str
    req_destination: str
    req_date: date


search_agent = Agent[FlightDeps, FlightDetails | NoFlightFound](
    output_type=FlightDetails | NoFlightFound,  # type: ignore[arg-type]
    deps_type=FlightDeps,
    retries=4,
    system_prompt="Your job is to find the cheapest flight for the user on the given date. ",
)

extraction_replies: Iterable[Any] = ()

extraction_agent = Agent(
    FunctionModel(
        lambda _, info: ModelResponse(
            parts=[
                ToolCallPart(
                    info.output_tools[0].name,
                    {
                        "response": [
                            {
                                "flight_number": "SFO-AK123",
                                "price": 350,
                                "origin": "SFO",
                                "destination": "ANC",
                                "date": "2025-01-10",
                            }
                        ]
                    },
                )
            ]
        )
    ),
    output_type=list[FlightDetails],
    system_prompt="Extract all the flight details from the given text.",
)


@search_agent.tool
async def extract_flights(ctx: RunContext[FlightDeps]) -> list[FlightDetails]:
    """Get details of all flights."""
    result = await extraction_agent.run(ctx.deps.web_page_text, usage=ctx.usage)
    return result.output


@search_agent.output_validator
async def validate_output(
    ctx: RunContext[FlightDeps], output: FlightDetails | NoFlightFound
) -> FlightDetails | NoFlightFound:
    """Procedural validation that the flight meets the constraints."""
    if isinstance(output, NoFlightFound):
        return output
    errors: list[str] = []
    if output.origin != ctx.deps.req_origin:
        errors.append(f"Flight should have origin {ctx.deps.req_origin}, not {output.origin}")
    if output.destination != ctx.deps.req_destination:
        errors.append(f"Flight should have destination {ctx.deps.req_destination}, not {output.destination}")
    if errors:
        raise ModelRetry("\n".join(errors))
    return output


_FLIGHT = {"flight_number": "SFO-AK123", "price": 350, "destination": "ANC", "date": "2025-01-10"}
_PLACES = {"London": LatLng(lat=51.1, lng=-0.1), "Wiltshire": LatLng(lat=51.2, lng=-2.0)}

Name = Literal["roulette", "dice", "bank", "weather", "sql", "flight"]


def documented() -> dict[str, Documented]:
    """The agents by name."""
    return {
        "roulette": Documented(
            roulette_agent,
            [[("roulette_wheel", {"square": 18})], [("final_result", {"response": True})]],
            "Put my money on square eighteen",
            lambda: 18,
        ),
        "dice": Documented(
            dice_agent,
            [[("roll_dice", {})], [("get_player_name", {})], "Congratulations Anne, you guessed correctly!"],
            "My guess is 4",
            lambda: "Anne",
        ),
        "bank": Documented(
            support_agent,
            [
                [("customer_balance", {"include_pending": True})],
                [("final_result", {"support_advice": "Hello John, $123.45.", "block_card": False, "risk": 11})],
                [("final_result", {"support_advice": "Hello John, $123.45.", "block_card": False, "risk": 1})],
            ],
            "What is my balance?",
            lambda: SupportDependencies(customer_id=123, db=DatabaseConn()),
        ),
        "weather": Documented(
            weather_agent,
            [
                [
                    ("get_lat_lng", {"location_description": "London"}),
                    ("get_lat_lng", {"location_description": "Wiltshire"}),
                ],
                [("get_weather", {"lat": 51.1, "lng": -0.1}), ("get_weather", {"lat": "north", "lng": 1})],
                [("get_weather", {"lat": 51.2, "lng": -2.0})],
                "It is sunny in London and in Wiltshire.",
            ],
            "What is the weather like in London and in Wiltshire?",
            lambda: WeatherDeps(_PLACES),
        ),
        "sql": Documented(
            sql_agent,
            [
                [("final_result_Success", {"sql_query": "DELETE FROM records", "explanation": "all"})],
                [("final_result_Success", {"sql_query": "SELECT * FROM records", "explanation": "all"})],
            ],
            "show me logs from yesterday, with level error",
        ),
        "flight": Documented(
            search_agent,
            [
                [("extract_flights", {})],
                [("final_result_FlightDetails", {**_FLIGHT, "origin": "LAX"})],
                [("final_result_FlightDetails", {**_FLIGHT, "origin": "SFO"})],
            ],
            "Find me a flight from SFO to ANC on 2025-01-10",
            lambda: FlightDeps("SFO-AK123 …", "SFO", "ANC", date(2025, 1, 10)),
        ),
    }


def shown(output: Any) -> str:
    """An output as a plain run prints it, as JSON."""
    return json.dumps(output.model_dump(mode="json") if isinstance(output, BaseModel) else output)
