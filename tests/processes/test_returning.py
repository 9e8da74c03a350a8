"""After a chat in a terminal ends or is killed, the agent remembers it in later sessions and on other channels.

The tests run real commands and a real worker. The model's prompt shows what the agent remembers.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from pytest_celery import CeleryTestSetup

from perdure.sessions.ending import request_end
from tests.cli.conftest import COMMAND
from tests.processes.faults import wait_until
from tests.processes.installation import Installation
from tests.processes.model_server import answer_to

USER = "ana"
CHAT = (*COMMAND, "chat", "--user", USER)


def _prompt(installation: Installation, text: str) -> list[dict[str, str]]:
    """The newest prompt whose last message is `text`."""
    prompts = [body["messages"] for body in installation.model_server.server.requests]
    return next(prompt for prompt in reversed(prompts) if prompt[-1]["content"] == text)


def _knows(installation: Installation, text: str, fact: str) -> bool:
    return any(fact in message["content"] for message in _prompt(installation, text))


def _talk(installation: Installation, text: str) -> None:
    """Start the chat, send a text, read the answer, and quit."""
    spoken = subprocess.run(
        CHAT, env=installation.environment, input=f"{text}\n", capture_output=True, text=True, check=True, timeout=60
    )
    assert spoken.stdout.strip() == answer_to(text).strip()


@contextmanager
def _talking(installation: Installation, text: str) -> Iterator[subprocess.Popen[str]]:
    """Start the chat, send a text, read the answer, and keep the chat running within the block."""
    chat = subprocess.Popen(
        CHAT,
        env=installation.environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )
    assert chat.stdin is not None
    assert chat.stdout is not None
    try:
        chat.stdin.write(f"{text}\n")
        chat.stdin.flush()
        assert chat.stdout.readline().strip() == answer_to(text).strip()
        yield chat
    finally:
        chat.kill()
        chat.communicate()


@pytest.mark.exhaustive
@pytest.mark.parametrize("worker_count", [1])
def test_a_returning_user_is_remembered(celery_setup: CeleryTestSetup, installation: Installation) -> None:
    """After a quit, the next session's prompt contains a summary of the previous session.

    After a kill, or on another channel, the same session continues.
    """
    _talk(installation, "my cat is called Ida")
    rows = wait_until(
        lambda: installation.query("SELECT session_id, summary FROM sessions WHERE state = 'ended'"), "the end", 60
    )
    assert "Ida" in rows[0].summary

    with _talking(installation, "what is she called?") as chat:
        assert _knows(installation, "what is she called?", rows[0].summary)
        os.kill(chat.pid, signal.SIGKILL)
        chat.wait()
    with _talking(installation, "still there?") as chat:
        assert _knows(installation, "still there?", "what is she called?")
        assert _knows(installation, "still there?", rows[0].summary)

    accepted = installation.accept("I live in Oslo", user=USER, channel="http")
    installation.settled(accepted.turn_id)
    assert _knows(installation, "I live in Oslo", "The user wrote on 'cli' before and now writes on 'http'.")
    _talk(installation, "where do I live?")
    assert _knows(installation, "where do I live?", "I live in Oslo")
    assert _knows(installation, "where do I live?", "The user wrote on 'http' before and now writes on 'cli'.")
    live = installation.query("SELECT session_id FROM sessions WHERE state <> 'ended' AND end_requested_at IS NULL")
    assert [row.session_id for row in live] == [accepted.session_id], "the other channel continues the session"
    installation.check()


@pytest.mark.long
@pytest.mark.usefixtures("redis_server")
def test_a_fact_from_one_channel_is_in_the_prompt_on_another(installation: Installation) -> None:
    """When a session ends, its facts become memories. The prompt of a session on another channel contains them."""
    installation.worker(PERDURE_SUMMARY_MODEL="offline").container.ready()
    fact = "My allergy is to walnuts."
    for text in (fact, "hello", "how are you", "nice weather", "good night"):
        sent = installation.accept(text, channel="telegram", message_id=f"sent with {text}")
        installation.settled(sent.turn_id)
    request_end(installation.database, sent.session_id, "enough")
    installation.runtime.wake.ending(sent.session_id)
    wait_until(lambda: installation.query("SELECT 1 FROM memories WHERE content ~ 'walnut'"), "the memory", 60)

    question = installation.accept("what must I not eat, given my allergy?", channel="http")
    installation.settled(question.turn_id)
    assert question.session_id != sent.session_id
    system = _prompt(installation, "what must I not eat, given my allergy?")[0]["content"]
    [memory] = installation.query("SELECT memory_id, content FROM memories WHERE content ~ 'walnut'")
    source = rf"\n  said on [\d-]+: (?:{re.escape(answer_to(fact))})?"  # the answer, which repeats the fact
    with_its_source = rf"- [\d-]+: {re.escape(memory.content)}(?:{source})*{re.escape(fact)}\n"
    assert re.search(with_its_source, system[system.index("<recalled_memory ") :]), system
    sources = installation.query(
        "SELECT m.message_id FROM memory_sources JOIN messages AS m USING (session_id, seq) WHERE memory_id = %(id)s",
        id=memory.memory_id,
    )
    assert f"sent with {fact}" in [row.message_id for row in sources]
    installation.check()
