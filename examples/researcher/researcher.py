"""A researcher, which looks at files, sends readers to pages of the Internet, and reports with its sources."""

from typing import Literal

from pydantic import BaseModel, Field

from perdure import Agent, ModelRetry, TurnContext, agent_tool
from perdure.tools.fetching import http_get


class Source(BaseModel):
    """Where a statement comes from."""

    page: str = Field(description="The page's URL, or the file's name")
    quote: str = Field(description="The words on which the statement rests")


class Report(BaseModel):
    """An answer that can be checked."""

    answer: str
    confidence: Literal["low", "medium", "high"]
    sources: list[Source]


class Found(BaseModel):
    """What a reader has found on one page."""

    summary: str
    quotes: list[str]


def cites_its_sources(report: Report) -> None:
    """Refuse a report that claims to be sure and names no source."""
    if report.confidence != "low" and not report.sources:
        raise ModelRetry("Name your sources, or say that your confidence is low.")


def instructions(turn: TurnContext) -> str:
    """Tell the agent in which language the user reads."""
    language = (turn.metadata or {}).get("language", "the language of the question")
    return (
        "You research questions. Look at the user's files first. Ask readers to read pages, several at once if their "
        f"tasks do not depend on each other; each reads one page. Write the report in {language}."
    )


researcher = Agent(
    "researcher",
    instructions,
    tools=[
        agent_tool(
            "reader",
            name="read_page",
            description="Let a reader read a page. The task has the page's URL and the question.",
            timeout_s=120,
        )
    ],
    output=Report,
    check_output=cites_its_sources,
    settings={"max_tokens": 4_000},
    max_steps=12,
    max_tokens=200_000,
    timeout_s=600,
)

reader = Agent(
    "reader",
    "Read the page that you are told, and report what it says about the question. Quote it literally.",
    tools=[http_get],
    output=Found,
    settings={"temperature": 0},
    max_steps=4,
)
