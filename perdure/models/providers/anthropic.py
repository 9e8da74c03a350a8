"""Implements the models named `anthropic:NAME`, with the Messages API and the official SDK.

Like the module `openai`, this module sends and reads plain dicts with the SDK's `client.post`, and does not use the
SDK's pydantic models. The SDK's retries are off, because `GuardedModel` retries. No other module maps the SDK's errors
to `perdure.errors`.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager

import anthropic
import httpx2

from perdure.clock import Clock
from perdure.errors import InvalidResponse, PerdureError
from perdure.models.protocol import ModelCall, ModelReply, ModelRequest
from perdure.models.providers.endpoint import ANTHROPIC, Endpoint, endpoint_of
from perdure.models.providers.errors import Exchange, ProviderFailure, connection_error, error_of
from perdure.models.providers.json_values import as_string
from perdure.models.providers.messages_wire import ReplyAssembler, names_of, request_body
from perdure.models.providers.transport import CONNECT_TIMEOUT_S, bind_call
from perdure.models.settings import NAMES

_STATUS_OF_TYPE = {
    "invalid_request_error": 400,
    "authentication_error": 401,
    "billing_error": 402,
    "permission_error": 403,
    "not_found_error": 404,
    "request_too_large": 413,
    "rate_limit_error": 429,
    "api_error": 500,
    "timeout_error": 504,
    "overloaded_error": 529,
}
"""The HTTP status for each of Anthropic's error types. An error within a stream has a type, but no status."""


class AnthropicModel:
    """A model of Anthropic or of a compatible server. Thread-safe."""

    supported_settings = frozenset(NAMES) - {"seed", "presence_penalty", "frequency_penalty", "logit_bias"}

    def __init__(
        self, model: str, clock: Clock, variable: str = "PERDURE_MODEL", endpoint: Endpoint | None = None
    ) -> None:
        """Without `endpoint`, read the server's URL and key from the environment variables that the SDK uses.

        `variable` is the name of the setting that selects the model. Error messages contain `variable`.

        Raises:
            SettingsError: `ANTHROPIC_API_KEY` is required but not set, or `ANTHROPIC_BASE_URL` is not an HTTP URL.
        """
        self._model = model
        self._clock = clock
        endpoint = endpoint or endpoint_of(ANTHROPIC, variable, f"anthropic:{model}")
        self._endpoint = endpoint
        self._client = anthropic.Anthropic(
            api_key=endpoint.key, base_url=endpoint.base_url, max_retries=0, http_client=endpoint.http_client()
        )
        self._close = weakref.finalize(self, self._client.close)

    @property
    def name(self) -> str:
        return f"{self._endpoint.name}:{self._model}"

    def respond(self, request: ModelRequest, call: ModelCall) -> ModelReply:
        """Reply to one prompt, and stream the text to `call`; see `Model.respond`."""
        assembler = ReplyAssembler(names_of(request))
        with _calling(self.name, call, self._clock) as exchange:
            with self._open(request, call) as stream:
                exchange.request_id = stream.response.headers.get("request-id")
                for event in stream:
                    call.delta(assembler.feed(event))
                    if assembler.complete:
                        break
            rest, reply = assembler.finish()
            call.delta(rest)
            exchange.log_success()
            return reply

    def close(self) -> None:
        """Close the connections to the server. Garbage collection of the model also closes them."""
        self._close()

    def _open(self, request: ModelRequest, call: ModelCall) -> anthropic.Stream[object]:
        left = call.remaining()
        return self._client.post(
            "/v1/messages",
            body=request_body(self._model, request),
            cast_to=object,
            stream=True,
            stream_cls=anthropic.Stream[object],
            options={"timeout": httpx2.Timeout(left, connect=min(left, CONNECT_TIMEOUT_S))},
        )


@contextmanager
def _calling(name: str, call: ModelCall, clock: Clock) -> Iterator[Exchange]:
    """Within the block, `call` can abort the SDK's requests. Maps the SDK's errors to `perdure.errors`."""
    exchange = Exchange(name)
    with bind_call(call) as call_socket, call.aborting(call_socket.hang_up):
        try:
            yield exchange
        except anthropic.APIConnectionError as error:
            call.check()  # raises if the engine has ended the call
            raise exchange.log_failure(connection_error(error.__cause__)) from error
        except httpx2.TransportError as error:  # the SDK does not wrap errors that interrupt a stream
            call.check()
            raise exchange.log_failure(connection_error(error)) from error
        except anthropic.APIStatusError as error:
            raise _mapped(error, exchange, clock) from error
        except InvalidResponse as error:
            exchange.log_failure(error)
            raise
        except (anthropic.APIError, ValueError, RecursionError) as error:  # invalid UTF-8 or JSON, or nested too deeply
            unreadable = InvalidResponse("The model's server sent something that cannot be read.")
            raise exchange.log_failure(unreadable) from error


def _mapped(error: anthropic.APIStatusError, exchange: Exchange, clock: Clock) -> PerdureError:
    exchange.request_id = error.request_id
    status: int | None = error.status_code
    kind = as_string(error.type) or None  # the SDK takes it from the server's JSON, where it may have any type
    if error.response.is_success:  # an error within the stream
        status = _STATUS_OF_TYPE.get(kind or "")
    said = error.api_message if isinstance(error.api_message, str) else error.message
    failure = ProviderFailure(status, kind, said, error.response.headers)
    return exchange.log_failure(error_of(failure, clock), failure.status, failure.code)
