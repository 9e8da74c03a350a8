"""The adapted models of each vendor's SDK pass the suite of the own wires.

The classes override what differs for a vendor, each with the reason.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, ClassVar

import pydantic_ai
import pytest

from perdure.clock import SystemClock
from perdure.errors import InvalidResponse, ProviderError, RateLimited
from perdure.models.adapted import AdaptedModel, adapted_model
from perdure.models.protocol import Model
from perdure.models.providers.endpoint import Endpoint
from perdure.testing.suites.models import QUESTION, ask
from tests.models.anthropic_server import AnthropicServer
from tests.models.bedrock_server import BedrockServer, prelude
from tests.models.gemini_server import GeminiServer
from tests.models.openai_server import OpenAIServer
from tests.models.provider_suite import CALLS, ProviderSuite
from tests.models.responses_server import ResponsesServer
from tests.models.server import Answer, Broken, ProviderServer, Status, Step, Wire


def adapted(kind: str, base_url: str, model: str = "test-model") -> AdaptedModel:
    return adapted_model(f"{kind}:{model}", SystemClock(), "PERDURE_MODEL", Endpoint(kind, base_url, "key"))


class AdaptedSuite(ProviderSuite):
    """The suite with a model of the kind `kind`, which calls `server`."""

    kind = ""

    @pytest.fixture
    def model(self, server: ProviderServer) -> Iterator[AdaptedModel]:
        made = adapted(self.kind, self.url(server))
        yield made
        made.close()

    def url(self, server: ProviderServer) -> str:
        return server.base_url


class TestOpenAIChat(AdaptedSuite):
    kind = "openai-chat"

    @pytest.fixture
    def server(self) -> Iterator[OpenAIServer]:
        with OpenAIServer() as server:
            yield server


class _Rooted(AdaptedSuite):
    """The SDK adds the version to the URL."""

    def url(self, server: ProviderServer) -> str:
        return server.base_url.removesuffix("/v1")


class MistralServer(OpenAIServer):
    """Mistral's SDK sends the content of messages as arrays of parts. Thoughts are a part of it."""

    thoughts: ClassVar[Wire] = {
        "content": [{"type": "thinking", "thinking": [{"type": "text", "text": "Let me think."}]}]
    }

    def has_thoughts(self, message: Wire) -> bool:
        return "Let me think." in message.get("thought", "")

    def take(self, path: str, body: dict[str, Any], headers: dict[str, str]) -> Step:
        for message in body["messages"]:
            if isinstance(parts := message.get("content"), list):
                message["thought"] = json.dumps([part for part in parts if part["type"] == "thinking"])
                message["content"] = "".join(part.get("text", "") for part in parts)
            if message.get("tool_calls") == []:
                del message["tool_calls"]
        return super().take(path, body, headers)


@pytest.mark.exhaustive
@pytest.mark.skipif(
    pydantic_ai.__version__.startswith("2.64."), reason="pydantic-ai 2.64 needs all calls of Mistral's in one piece"
)
class TestMistral(_Rooted):
    kind = "mistral"

    @pytest.fixture
    def server(self) -> Iterator[OpenAIServer]:
        with MistralServer() as server:
            yield server


class BlocksServer(AnthropicServer):
    """pydantic-ai sends a tool's result as an array of blocks."""

    def take(self, path: str, body: dict[str, Any], headers: dict[str, str]) -> Step:
        for message in body["messages"]:
            for block in message["content"]:
                if isinstance(block.get("content"), list):
                    block["content"] = "".join(part["text"] for part in block["content"])
        return super().take(path, body, headers)


@pytest.mark.exhaustive
class TestAnthropic(_Rooted):
    kind = "anthropic"

    @pytest.fixture
    def server(self) -> Iterator[AnthropicServer]:
        with BlocksServer() as server:
            yield server

    def test_takes_missing_usage_as_unknown(self, model: Model, server: ProviderServer) -> None:
        """pydantic-ai cannot read a message of Anthropic's without usage. The own wire can."""
        server.script(Answer("hello", usage=None))
        with pytest.raises(InvalidResponse):
            ask(model, QUESTION)


class GroqServer(OpenAIServer):
    """Groq's API is under `/openai`, and its usage in an object of its own. pydantic-ai sends it thoughts in tags."""

    thoughts: ClassVar[Wire] = {"reasoning": "Let me think."}

    def has_thoughts(self, message: Wire) -> bool:
        return str(message["content"]).startswith("<think>\nLet me think.\n</think>")

    def chunks(self, answer: Answer, model: str) -> list[Any]:
        chunks = super().chunks(answer, model)
        if answer.usage is not None:
            chunks[-1]["x_groq"] = {"id": "req_1", "usage": chunks[-1].pop("usage")}
        return chunks

    def judge(self, path: str, body: Wire) -> Status | None:
        return super().judge(path.removeprefix("/openai"), body)


@pytest.mark.exhaustive
class TestGroq(_Rooted):
    kind = "groq"

    @pytest.fixture
    def server(self) -> Iterator[OpenAIServer]:
        with GroqServer() as server:
            yield server


class TestGoogle(AdaptedSuite):
    kind = "google"

    @pytest.fixture
    def server(self) -> Iterator[GeminiServer]:
        with GeminiServer() as server:
            yield server

    @pytest.fixture
    def cut_off_model(self, model: Model, server: ProviderServer) -> Model:
        """Gemini sends each call in one piece, so that a text is what it cuts off."""
        server.script(Answer("half of", finish_reason="length"))
        return model

    def test_joins_calls_streamed_in_more_than_fifty_pieces(self, model: Model, server: ProviderServer) -> None:
        """Gemini sends each call in one piece."""
        server.script(Answer(calls=CALLS))
        made = ask(model, QUESTION).tool_calls
        assert [(each.id, each.name, json.loads(each.arguments)) for each in made] == [
            (each.id, each.name, json.loads(each.arguments)) for each in CALLS
        ]

    def test_a_failed_server_is_a_failure_of_the_provider(self, model: Model, server: ProviderServer) -> None:
        """Gemini reports its own failure by an error only, not by a finish reason."""
        server.script(Broken(Answer("half of it"), 1, Status(503)))
        with pytest.raises(ProviderError) as caught:
            ask(model, QUESTION)
        assert caught.value.transient


@pytest.mark.long
class TestResponses(AdaptedSuite):
    kind = "openai-responses"

    @pytest.fixture
    def server(self) -> Iterator[ResponsesServer]:
        with ResponsesServer() as server:
            yield server

    @pytest.fixture
    def thinking_model(self, server: ResponsesServer) -> Iterator[Model]:
        """Only models that are known to think get their reasoning back."""
        server.thinks = True
        made = adapted(self.kind, server.base_url, "gpt-5")
        yield made
        made.close()


@pytest.mark.exhaustive
class TestBedrock(AdaptedSuite):
    kind = "bedrock"

    @pytest.fixture
    def server(self) -> Iterator[BedrockServer]:
        with BedrockServer() as server:
            yield server

    @pytest.fixture
    def thinking_model(self, server: BedrockServer) -> Iterator[Model]:
        """Only models that are known to think get their thoughts back."""
        server.thinks = True
        made = adapted(self.kind, server.base_url, "anthropic.claude-sonnet-4-20250514-v1:0")
        yield made
        made.close()

    def test_refuses_a_stream_without_end(
        self, model: Model, server: ProviderServer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Each event has its length in front, of which botocore accepts 24 MiB. Replies are limited as ever."""
        server.script(Broken(Answer("a good beginning"), 3, prelude(32 * 1024**2)))
        with pytest.raises(InvalidResponse):
            ask(model, QUESTION)

    def test_follows_no_redirect_to_another_origin(self, model: Model, server: ProviderServer) -> None:
        """Botocore follows no redirect at all."""
        with BedrockServer() as other:
            server.script(Status(307, headers={"Location": f"{other.base_url}/anywhere"}))
            with pytest.raises(ProviderError, match="status 307") as caught:
                ask(model, QUESTION)
            assert not caught.value.transient
            assert other.requests == []

    def test_follows_a_redirect_within_its_origin(self, model: Model, server: ProviderServer) -> None:
        """Botocore follows no redirect at all."""
        server.script(Status(307, headers={"Location": "?moved"}))
        with pytest.raises(ProviderError, match="status 307"):
            ask(model, QUESTION)

    def test_a_rate_limit_in_mid_stream_is_one(self, model: Model, server: ProviderServer) -> None:
        """An exception in a stream has a name, but no status."""
        server.script(Broken(Answer("half of it"), 3, Status(0, "throttlingException")))
        with pytest.raises(RateLimited):
            ask(model, QUESTION)

    @pytest.mark.parametrize(
        ("key", "authorization"), [("of-bedrock", "Bearer of-bedrock"), ("none", "AWS4-HMAC-SHA256")]
    )
    def test_an_endpoint_has_a_key_or_the_credentials_of_aws(
        self, server: BedrockServer, monkeypatch: pytest.MonkeyPatch, key: str, authorization: str
    ) -> None:
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_DEFAULT_REGION"):
            monkeypatch.setenv(name, "of-the-tests")
        model = adapted_model(
            "mine:m", SystemClock(), "PERDURE_MODEL", Endpoint("mine", server.base_url, key), "bedrock"
        )
        ask(model, QUESTION)
        model.close()
        assert server.headers[0]["authorization"].startswith(authorization)
