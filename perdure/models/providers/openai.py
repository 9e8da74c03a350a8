"""Implements the models named `openai:NAME`, with the Chat Completions API and the official SDK.

The server is OpenAI's or a compatible one. This module sends and reads plain dicts with the SDK's documented
`client.post`, and does not use the SDK's pydantic models. With ten turns of context, the pydantic models would take a
quarter of a call's CPU time. The SDK's retries are off, because `GuardedModel` retries. No other module maps the SDK's
errors to `perdure.errors`.
"""

from __future__ import annotations

import json
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

import httpx2
import openai
from openai import RequestOptions

from perdure.clock import Clock
from perdure.errors import InvalidResponse, PerdureError
from perdure.models.protocol import ModelCall, ModelReply, ModelRequest
from perdure.models.providers.chat_wire import ReplyAssembler, names_of, request_body
from perdure.models.providers.endpoint import OPENAI, Endpoint, endpoint_of
from perdure.models.providers.errors import Exchange, ProviderFailure, connection_error, error_of
from perdure.models.providers.json_values import as_object, as_string
from perdure.models.providers.transport import CONNECT_TIMEOUT_S, bind_call
from perdure.models.settings import NAMES


class OpenAIModel:
    """A model of OpenAI or of a compatible server. Thread-safe."""

    supported_settings = frozenset(NAMES) - {"top_k"}

    def __init__(
        self, model: str, clock: Clock, variable: str = "PERDURE_MODEL", endpoint: Endpoint | None = None
    ) -> None:
        """Without `endpoint`, read the server's URL and key from the environment variables that the SDK uses.

        `variable` is the name of the setting that selects the model. Error messages contain `variable`.

        Raises:
            SettingsError: `OPENAI_API_KEY` is required but not set, or `OPENAI_BASE_URL` is not an HTTP URL.
        """
        self._model = model
        self._clock = clock
        self._endpoint = endpoint or endpoint_of(OPENAI, variable, f"openai:{model}")
        self._client = client(self._endpoint)
        self._close = weakref.finalize(self, self._client.close)

    @property
    def name(self) -> str:
        return f"{self._endpoint.name}:{self._model}"

    def respond(self, request: ModelRequest, call: ModelCall) -> ModelReply:
        """Reply to one prompt, and stream the text to `call`; see `Model.respond`."""
        assembler = ReplyAssembler(names_of(request))
        with calling(self.name, call, self._clock) as exchange:
            with self._open(request, call) as stream:
                exchange.request_id = stream.response.headers.get("x-request-id")
                _raise_error_in(stream.response)
                for chunk in stream:
                    call.delta(assembler.feed(chunk))
            rest, reply = assembler.finish()
            call.delta(rest)
            exchange.log_success()
            return reply

    def close(self) -> None:
        """Close the connections to the server. Garbage collection of the model also closes them."""
        self._close()

    def _open(self, request: ModelRequest, call: ModelCall) -> openai.Stream[object]:
        return self._client.post(
            "/chat/completions",
            body=request_body(self._model, request),
            cast_to=object,
            stream=True,
            stream_cls=openai.Stream[object],
            options=options_of(call),
        )


def client(endpoint: Endpoint) -> openai.OpenAI:
    """The SDK's client for the server of a model or an embedder."""
    return openai.OpenAI(
        api_key=endpoint.key, base_url=endpoint.base_url, max_retries=0, http_client=endpoint.http_client()
    )


def options_of(call: ModelCall) -> RequestOptions:
    """The options of one request. The timeout is the remaining time of `call`."""
    left = call.remaining()
    return {
        "timeout": httpx2.Timeout(left, connect=min(left, CONNECT_TIMEOUT_S)),
        "security": {"bearer_auth": True},
    }


def _raise_error_in(response: httpx2.Response) -> None:
    """Raise the error that a server reports as JSON under status 200 instead of a stream, if it does."""
    if response.headers.get("content-type", "").startswith("application/json"):
        error = as_object(json.loads(response.read())).get("error")
        if error:
            said = as_string(as_object(error).get("message"))
            raise openai.APIError(said, response.request, body=error)


@contextmanager
def calling(name: str, call: ModelCall, clock: Clock) -> Iterator[Exchange]:
    """Within the block, `call` can abort the SDK's requests. Maps the SDK's errors to `perdure.errors`."""
    exchange = Exchange(name)
    with bind_call(call) as call_socket, call.aborting(call_socket.hang_up):
        try:
            yield exchange
        except openai.APIError as error:
            call.check()  # raises if the engine has ended the call
            raise _mapped(error, exchange, clock) from error
        except httpx2.TransportError as error:  # from a body that this module itself reads
            call.check()
            raise exchange.log_failure(connection_error(error)) from error
        except InvalidResponse as error:
            exchange.log_failure(error)
            raise
        except (ValueError, RecursionError) as error:  # invalid UTF-8 or JSON, or JSON nested too deeply
            unreadable = InvalidResponse("The model's server sent something that cannot be read.")
            raise exchange.log_failure(unreadable) from error


def _mapped(error: openai.APIError, exchange: Exchange, clock: Clock) -> PerdureError:
    if isinstance(error, openai.APIConnectionError):
        return exchange.log_failure(connection_error(error.__cause__))
    failure = ProviderFailure(None, error.code, error.message, {}, error.type)
    if isinstance(error, openai.APIStatusError):
        exchange.request_id = error.request_id
        failure = ProviderFailure(error.status_code, error.code, error.message, error.response.headers, error.type)
    return exchange.log_failure(error_of(failure, clock), failure.status, failure.code)
