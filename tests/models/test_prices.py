"""Prices and windows of models, from the data of genai-prices."""

from __future__ import annotations

from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import pytest

from perdure.models.prices import cost, window
from perdure.models.protocol import Usage
from perdure.settings import Settings

AT = datetime(2026, 1, 1, tzinfo=UTC)
SETTINGS = Settings.model_validate(
    {
        "endpoints": {
            "vllm": {"url": "http://127.0.0.1:8000/v1"},
            "second": {"url": "https://api.openai.com/v1", "key": "sk-2"},
            "mine": {"url": "https://generativelanguage.googleapis.com", "kind": "google", "key": "sk-3"},
        },
        "model_window": 2_048,
    }
)


@pytest.fixture(autouse=True)
def vendors(monkeypatch: pytest.MonkeyPatch) -> None:
    """The vendors' own servers."""
    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)
    monkeypatch.delenv("ANTHROPIC_BASE_URL", raising=False)


@pytest.mark.parametrize(
    ("model", "usage", "dollars"),
    [
        ("openai:gpt-5-mini", Usage(1_000_000, 0), "0.25"),
        ("openai:gpt-5-mini-2025-08-07", Usage(0, 1_000_000), "2"),
        ("openai:gpt-5-mini", Usage(1_000_000, 0, cached_tokens=1_000_000), "0.025"),
        ("openai-responses:gpt-5-mini", Usage(1_000_000, 0), "0.25"),
        ("SECOND:gpt-5-mini", Usage(1_000_000, 0), "0.25"),
        ("anthropic:claude-sonnet-4-5", Usage(100_000, 0), "0.3"),
        ("mine:gemini-2.5-flash", Usage(1_000_000, 0), "0.3"),
        ("offline", Usage(1, 1), None),
        ("openai:no-such-model", Usage(1, 1), None),
        ("vllm:gpt-5-mini", Usage(1, 1), None),
        ("acme:gpt-5-mini", Usage(1, 1), None),
    ],
)
def test_the_cost_of_a_call(model: str, usage: Usage, dollars: str | None) -> None:
    """A model of a known vendor has a price. One on a server of one's own has none, whatever its name."""
    assert cost(model, usage, SETTINGS, AT) == (None if dollars is None else Decimal(dollars))


def test_another_server_of_chat_completions_has_no_prices_of_openai(monkeypatch: pytest.MonkeyPatch) -> None:
    """`openai:` with another base URL is another provider."""
    monkeypatch.setenv("OPENAI_BASE_URL", "http://127.0.0.1:8000/v1")
    assert cost("openai:gpt-5-mini", Usage(1, 1), SETTINGS, AT) is None
    assert window("openai:gpt-5-mini", SETTINGS) == 2_048


@pytest.mark.parametrize(
    ("model", "tokens"),
    [("openai:gpt-5", 400_000), ("anthropic:claude-sonnet-4-5", 200_000), ("vllm:gpt-5", 2_048), ("offline", 2_048)],
)
def test_a_known_window_comes_before_the_setting(model: str, tokens: int) -> None:
    """`PERDURE_MODEL_WINDOW` counts for models that genai-prices does not have."""
    assert window(model, SETTINGS) == tokens


@pytest.mark.parametrize("model", ["offline", "acme:x"])
def test_without_setting_the_window_is_unknown(model: Any) -> None:
    """Without the setting, the window of an unknown model is `None`."""
    assert window(model, Settings()) is None
