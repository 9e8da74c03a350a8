"""A conversation whose model changes from turn to turn: each provider gets its own opaque parts, and no other's."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from perdure import Agent, tool
from perdure.access.tenants import UserKey
from perdure.agents import Agents
from perdure.clock import SystemClock
from perdure.models.resolve import Models
from perdure.settings import Settings
from perdure.turns.inbox.accept import accept
from perdure.turns.inbox.incoming import Incoming
from perdure.turns.run.loop import Runner
from tests.models.anthropic_server import AnthropicServer
from tests.models.gemini_server import GeminiServer, signature_of
from tests.models.openai_server import OpenAIServer, chunk
from tests.models.server import Answer, Call, Chunks, ProviderServer
from tests.models.test_tolerance import Lenient
from tests.turns.harness import Harness

LONG_ID = "an id with spaces/and:colons" * 4
ORDER = ("openai:m", "anthropic:claude", "vllm:m", "gem:gemini-3-pro")


@tool(effect="pure")
def echo(text: str) -> str:
    """Return the text."""
    return text


def chat_step(mark: str, call_id: str) -> Chunks:
    """Thoughts, text and a call with a signature, whose id repeats."""
    function = {"name": "echo", "arguments": '{"text": "x"}'}
    call = {"index": 0, "id": call_id, "function": function, "extra_content": {"signature": f"signed by {mark}"}}
    deltas = [{"reasoning_content": f"thought by {mark}"}, {"content": "Let me see."}, {"tool_calls": [call]}]
    chunks = [chunk([{"index": 0, "delta": delta}]) for delta in deltas]
    return Chunks([*chunks, chunk([{"index": 0, "delta": {}, "finish_reason": "tool_calls"}])])


def messages_step(mark: str) -> Chunks:
    """Thoughts with a signature, and a call."""
    thoughts = {"type": "thinking", "thinking": f"thought by {mark}", "signature": f"signed by {mark}"}
    call = {"type": "tool_use", "id": "toolu_1", "name": "echo", "input": {"text": "x"}}
    begun = [
        {"type": "content_block_start", "index": index, "content_block": block}
        for index, block in enumerate((thoughts, call))
    ]
    end = [{"type": "message_delta", "delta": {"stop_reason": "tool_use"}}, {"type": "message_stop"}]
    return Chunks([*begun, *end])


def steps(server: ProviderServer, mark: str) -> list[Any]:
    """Two replies with calls, whose ids repeat, and an answer."""
    if isinstance(server, AnthropicServer):
        return [messages_step(mark), messages_step(mark), Answer("done")]
    if isinstance(server, GeminiServer):
        return [*[Answer(calls=[Call("echo", '{"text": "x"}', mark)])] * 2, Answer("done")]
    call_id = LONG_ID if isinstance(server, Lenient) else "call_1"
    return [chat_step(mark, call_id), chat_step(mark, call_id), Answer("done")]


def test_each_provider_gets_only_what_it_sent(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each model has two turns with tools, each of which a crash interrupts between the first reply and its tool."""
    with OpenAIServer() as openai, AnthropicServer() as anthropic, Lenient() as vllm, GeminiServer() as gemini:
        servers: dict[str, ProviderServer] = {"openai": openai, "anthropic": anthropic, "vllm": vllm, "gem": gemini}
        for name in ("openai", "anthropic"):
            monkeypatch.setenv(f"{name.upper()}_BASE_URL", servers[name].base_url)
            monkeypatch.setenv(f"{name.upper()}_API_KEY", "sk-of-the-tests")
        endpoints = {
            "vllm": {"url": vllm.base_url},
            "gem": {"url": gemini.base_url, "kind": "google", "key": "sk-of-the-tests"},
        }
        settings = Settings.model_validate({"endpoints": endpoints, "retry": {"max_attempts": 1}})
        models = Models(settings, SystemClock())
        for model in ORDER * 2:
            name = model.partition(":")[0]
            server = servers[name]
            server.script(*steps(server, name))
            agents = Agents([Agent("assistant", "You help.", [echo], model=model)])
            runtime = replace(harness.runtime, agents=agents, models=models.get)
            accepted = accept(runtime, Incoming(user=UserKey("ana"), text="Say it."))
            asked = len(server.requests)
            with harness.crashing("after", "turns.step"):
                Runner(runtime, "harness").run(accepted.session_id)
            harness.move(1_000)
            Runner(runtime, "harness").run(accepted.session_id)
            assert (harness.turn(accepted.turn_id)["status"], len(server.requests) - asked) == ("done", 3)
        marks = {name: [f"thought by {name}", f"signed by {name}"] for name in servers} | {"gem": [signature_of("gem")]}
        for name, server in servers.items():
            last, all_sent = json.dumps(server.requests[-1]), json.dumps(server.requests)
            assert [mark for mark in marks[name] if last.count(mark) < 4] == []
            assert [mark for other in servers if other != name for mark in marks[other] if mark in all_sent] == []
