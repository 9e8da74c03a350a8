"""`openai:NAME`: Chat Completions through the official SDK, against any compatible server.

The request goes out and the events come in through the SDK's documented way to a plain
endpoint (`client.post`), not through its pydantic models: at ten turns of context that is a
quarter of the CPU of a call. The SDK's own retries are off; retrying is the engine's affair.
Foreign errors are mapped to `perdure.errors` here and nowhere else.
"""

from __future__ import annotations

import logging
import math
import os
import weakref
from datetime import UTC
from email.utils import parsedate_to_datetime

import httpx2
import openai

from perdure.clock import Clock
from perdure.errors import (
    ContextTooLong,
    DeadlineExceeded,
    InvalidResponse,
    PerdureError,
    ProviderError,
    RateLimited,
    SettingsError,
)
from perdure.models.chat_wire import Assembly, request_body
from perdure.models.line import CONNECT_TIMEOUT_S, Transport, line_of
from perdure.models.protocol import ModelCall, ModelReply, ModelRequest

_log = logging.getLogger(__name__)

_DEFAULT_BASE_URL = "https://api.openai.com/v1"
_NO_KEY = "none"
_LONGEST_RETRY_AFTER_S = 86_400.0


class OpenAIModel:
    """One model of one server. Threads may share it; a process needs no more than one."""

    def __init__(self, model: str, clock: Clock) -> None:
        """Read the server's address and key from the environment, as the SDK does.

        Raises:
            SettingsError: `OPENAI_API_KEY` is missing, or `OPENAI_BASE_URL` is no address.
        """
        self._model = model
        self._clock = clock
        base_url = os.environ.get("OPENAI_BASE_URL") or _DEFAULT_BASE_URL
        key = os.environ.get("OPENAI_API_KEY")
        if not key and base_url == _DEFAULT_BASE_URL:
            raise SettingsError(
                f"OPENAI_API_KEY is not set and PERDURE_MODEL is {self.name!r}: set OPENAI_API_KEY, "
                "or OPENAI_BASE_URL to a compatible server that needs no key"
            )
        _check_address(base_url)
        self._client = openai.OpenAI(
            api_key=key or _NO_KEY,
            base_url=base_url,
            max_retries=0,
            http_client=httpx2.Client(transport=Transport(base_url), follow_redirects=True),
        )
        self._close = weakref.finalize(self, self._client.close)

    @property
    def name(self) -> str:
        """As in `PERDURE_MODEL`."""
        return f"openai:{self._model}"

    def respond(self, request: ModelRequest, call: ModelCall) -> ModelReply:
        """Stream one reply. See `Model.respond` for what is raised."""
        assembly = Assembly()
        with line_of(call) as line, call.aborting(line.hang_up):
            try:
                with self._open(request, call) as stream:
                    for chunk in stream:
                        call.delta(assembly.feed(chunk))
            except openai.APIError as error:
                raise self._mapped(error) from error
            except (ValueError, RecursionError) as error:  # no UTF-8, no JSON, or nested without end
                raise InvalidResponse("The model's server sent something that cannot be read.") from error
            rest, reply = assembly.finish()
            call.delta(rest)
            return reply

    def close(self) -> None:
        """Close the connections; done anyway once nobody holds the model any more."""
        self._close()

    def _open(self, request: ModelRequest, call: ModelCall) -> openai.Stream[object]:
        left = call.remaining()
        return self._client.post(
            "/chat/completions",
            body=request_body(self._model, request),
            cast_to=object,
            stream=True,
            stream_cls=openai.Stream[object],
            options={
                "timeout": httpx2.Timeout(left, connect=min(left, CONNECT_TIMEOUT_S)),
                "security": {"bearer_auth": True},
            },
        )

    def _mapped(self, error: openai.APIError) -> PerdureError:
        if isinstance(error, openai.APIConnectionError):
            return _lost(error)
        status = error.status_code if isinstance(error, openai.APIStatusError) else None
        request_id = error.request_id if isinstance(error, openai.APIStatusError) else None
        _log.warning("%s: status %s, code %s, request id %s", self.name, status, error.code, request_id)
        if _says_too_long(error):
            return ContextTooLong("The conversation does not fit the model's context window.")
        if status == httpx2.codes.TOO_MANY_REQUESTS or error.code == "rate_limit_exceeded":
            return RateLimited("The model's provider limits the rate of requests.", retry_after_s=self._pause(error))
        if status is None:
            return ProviderError("The model's server reported an error in the middle of its reply.")
        failed = status >= httpx2.codes.INTERNAL_SERVER_ERROR
        return ProviderError(f"The model's server {'failed' if failed else 'refused the request'} (status {status}).")

    def _pause(self, error: openai.APIError) -> float | None:
        """Seconds that the provider asks to wait; None if it says nothing, or nonsense."""
        if not isinstance(error, openai.APIStatusError):
            return None
        headers = error.response.headers
        if (milliseconds := _number(headers.get("retry-after-ms"))) is not None:
            seconds: float | None = milliseconds / 1000
        else:
            given = headers.get("retry-after", "")
            seconds = _number(given)
            if seconds is None:
                seconds = self._seconds_until(given)
        return seconds if seconds is not None and 0 <= seconds <= _LONGEST_RETRY_AFTER_S else None

    def _seconds_until(self, http_date: str) -> float | None:
        try:
            moment = parsedate_to_datetime(http_date)
        except (ValueError, OverflowError):
            return None
        aware = moment if moment.tzinfo else moment.replace(tzinfo=UTC)
        return max(0.0, (aware - self._clock.now()).total_seconds())


def _lost(error: openai.APIConnectionError) -> PerdureError:
    if isinstance(error, openai.APITimeoutError) and not isinstance(error.__cause__, httpx2.ConnectTimeout):
        return DeadlineExceeded("The model did not answer in time.")
    return ProviderError("The connection to the model's server failed.")


def _number(text: str | None) -> float | None:
    try:
        number = float(text or "")
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def _says_too_long(error: openai.APIError) -> bool:
    if error.code == "context_length_exceeded":
        return True
    # Compatible servers have the sentence, though not the code.
    return isinstance(error, openai.BadRequestError) and "maximum context length" in error.message.lower()


def _check_address(base_url: str) -> None:
    try:
        url = httpx2.URL(base_url)
        usable = url.scheme in ("http", "https") and bool(url.host)
    except httpx2.InvalidURL:
        usable = False
    if not usable:
        raise SettingsError(
            f"OPENAI_BASE_URL is {base_url!r}: accepted: an address that begins with http:// or https://, "
            "such as http://127.0.0.1:8000/v1"
        )
