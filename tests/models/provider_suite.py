"""A test suite for the models of all providers, with well-behaved and faulty servers.

The suite runs against a test server that speaks the provider's wire format. To use the suite, subclass `ProviderSuite`
and define the fixtures `server` and `model`. The model must call that server.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from email.utils import format_datetime

import pytest

from perdure.clock import SystemClock
from perdure.errors import (
    ContentFiltered,
    ContextTooLong,
    DeadlineExceeded,
    IncompleteReply,
    InvalidResponse,
    PerdureError,
    ProviderError,
    RateLimited,
)
from perdure.models.protocol import (
    CallAborted,
    Message,
    Model,
    ModelCall,
    ModelReply,
    ModelRequest,
    Role,
    ToolCall,
    ToolSchema,
)
from perdure.models.providers import transport as connection
from perdure.testing.suites.models import QUESTION, STATEMENT, ModelSuite, ask, new_call, turn
from tests.bombs import gzip_bomb, peak
from tests.models.server import Answer, Broken, Call, Drip, ProviderServer, Raw, Silence, Status, Step

AT_ONCE_S = 5.0
"""Seconds within which an abort or a deadline must end a call. Every other timeout of the call is far longer."""

SECRET = "sk-secret"
TOO_LARGE = "Request too large (TPM): Limit 6000, Requested 8012, please reduce your message size and try again."

CALLS = [
    Call("calculator", json.dumps({"expression": "12*7+5" + "+0" * 30}), "call_a"),
    Call("clock", '{"zone": "Asia/Seoul"}', "call_b"),
]
SILENT = [
    pytest.param(Silence(), id="says nothing"),
    pytest.param(Silence(after_headers=True), id="says nothing after the headers"),
    pytest.param(Drip(), id="drips"),
    pytest.param(Broken(Answer("many words that stop"), 5, "hang"), id="falls silent in mid-stream"),
]
SLOW = pytest.param(Answer("slow " * 500, interval_s=0.05), id="speaks slowly")


class ProviderSuite(ModelSuite):
    """The tests of a provider's model. Subclass this class and define the fixtures `server` and `model`."""

    @pytest.fixture
    def cut_off_model(self, model: Model, server: ProviderServer) -> Model:
        """The server's next reply ends within the arguments of a call."""
        server.script(Answer(calls=[Call("calculator", '{"expression": "12')], finish_reason="length"))
        return model

    @pytest.fixture
    def unended_model(self, model: Model, server: ProviderServer) -> Model:
        """The server's next reply ends after three chunks."""
        server.script(Broken(Answer("half of it"), 3, b""))
        return model

    @pytest.fixture
    def thinking_model(self, model: Model, server: ProviderServer) -> Model:
        """The server's replies begin with thoughts, without which their calls may not come back."""
        server.thinks = True
        return model

    # --- replies

    def test_a_second_turn_may_reuse_the_call_ids_of_the_first(self, model: Model) -> None:
        """Two replies may contain the same call id. The model returns each id as the provider sent it."""
        first = turn(model, QUESTION)
        second = turn(model, *first, QUESTION)
        assert first[1].tool_calls[0].id == second[5].tool_calls[0].id
        assert "89" in second[-1].content

    def test_joins_calls_streamed_in_more_than_fifty_pieces(self, model: Model, server: ProviderServer) -> None:
        """Several tool calls are assembled correctly, even if their arguments arrive one character at a time."""
        answer = Answer(calls=CALLS, piece=1)
        assert len(server.chunks(answer, "m")) > 50
        server.script(answer)
        assert ask(model, QUESTION).tool_calls == tuple(ToolCall(each.id, each.name, each.arguments) for each in CALLS)

    def test_distinguishes_two_calls_with_one_id(self, model: Model, server: ProviderServer) -> None:
        """If two calls of a reply have the same id, they get distinct ids, so that each call gets its own result."""
        server.script(
            Answer(calls=[Call("calculator", '{"expression": "1+1"}'), Call("calculator", '{"expression": "2"}')])
        )
        conversation = turn(model, QUESTION)
        assert len({call.id for call in conversation[1].tool_calls}) == 2
        assert [each.content for each in conversation[2:4]] == ["2", "2"]
        assert conversation[-1].role is Role.ASSISTANT

    def test_calls_tools_by_names_that_the_provider_would_refuse(self, model: Model, server: ProviderServer) -> None:
        """Tool names that a provider refuses, such as `a:b`, are replaced in requests and restored in replies."""
        tools = tuple(ToolSchema(name, "", {"type": "object", "properties": {}}) for name in ("a_b", "a:b", "a.b"))
        server.script(Answer(calls=[Call("a_b_2", id="x"), Call("a_b", id="y"), Call("a_b_3", id="z")]))
        reply = model.respond(ModelRequest((QUESTION,), tools), new_call())
        assert [call.name for call in reply.tool_calls] == ["a:b", "a_b", "a.b"]
        results = [Message(Role.TOOL, "done", tool_call_id=call.id) for call in reply.tool_calls]
        again = (QUESTION, Message(Role.ASSISTANT, "", reply.tool_calls, opaque=reply.opaque), *results)
        assert model.respond(ModelRequest(again, tools), new_call()).content.startswith("done")
        assert '"a_b_2"' in json.dumps(server.requests[1]["messages"])

    def test_makes_a_call_without_tools_on_a_conversation_with_calls(self, model: Model) -> None:
        """A request that offers no tools is valid even if the conversation contains tool calls."""
        assert ask(model, *turn(model, QUESTION), STATEMENT, tools=False).tool_calls == ()

    def test_sums_up_usage(self, model: Model, server: ProviderServer) -> None:
        """Tokens from the provider's cache count as input tokens."""
        server.script(Answer("hello"))
        usage = ask(model, QUESTION).usage
        assert usage is not None
        assert (usage.input_tokens, usage.output_tokens) == (11, 7)

    def test_takes_missing_usage_as_unknown(self, model: Model, server: ProviderServer) -> None:
        """Missing usage is `None` and not zero: compatible servers may omit it, but no reply costs nothing."""
        server.script(Answer("hello", usage=None))
        assert ask(model, QUESTION).usage is None

    @pytest.mark.parametrize("reason", ["length", "content_filter"])
    def test_keeps_why_a_reply_stopped(self, model: Model, server: ProviderServer, reason: str) -> None:
        """A truncated reply is returned, and its `stop_reason` gives the reason."""
        server.script(Answer("hal", finish_reason=reason))
        assert ask(model, QUESTION).stop_reason == reason

    def test_sends_text_in_any_script_unchanged(self, model: Model, server: ProviderServer) -> None:
        """Text in any script reaches the provider unchanged."""
        said = "안녕하세요 \N{GRINNING FACE} Ünï"
        ask(model, Message(Role.USER, said))
        assert said in json.dumps(server.requests[0]["messages"][-1], ensure_ascii=False)

    def test_keeps_its_connection(self, model: Model, server: ProviderServer) -> None:
        """All calls use one connection, even after an error, because a new handshake for each call would be slow."""
        for _ in range(4):
            ask(model, QUESTION)
        server.script(Status(500))
        with pytest.raises(ProviderError):
            ask(model, QUESTION)
        ask(model, QUESTION)
        assert server.connections == 1

    # --- what the input causes

    @pytest.mark.parametrize(
        ("step", "kind"),
        [
            pytest.param(Answer(finish_reason="content_filter"), ContentFiltered, id="an empty reply, filtered"),
            pytest.param(Answer(finish_reason="length"), IncompleteReply, id="an empty reply, cut off"),
            pytest.param(Answer(finish_reason="pause_turn"), IncompleteReply, id="an empty reply, another reason"),
            pytest.param(
                Status(400, message="The prompt triggered the content management policy."), ContentFiltered, id="Azure"
            ),
            pytest.param(
                Status(400, message="Output blocked by content filtering policy"), ContentFiltered, id="Anthropic"
            ),
            pytest.param(
                Broken(Answer("half of it"), 3, Status(0, "content_filter")),
                ContentFiltered,
                id="filtered in mid-stream",
            ),
            pytest.param(Status(400, "exceed_context_size_error"), ContextTooLong, id="llama.cpp"),
            pytest.param(
                Status(400, message="The input (9 tokens) is longer than the model's context length (8 tokens)."),
                ContextTooLong,
                id="SGLang",
            ),
            pytest.param(Status(413), ContextTooLong, id="413"),
            pytest.param(Status(413, "rate_limit_exceeded", TOO_LARGE), ContextTooLong, id="Groq"),
            pytest.param(Status(429, "rate_limit_exceeded", TOO_LARGE), ContextTooLong, id="more than a whole limit"),
            pytest.param(
                Status(422, message="Input validation error: `inputs` tokens + `max_new_tokens` must be <= 4096."),
                ContextTooLong,
                id="TGI",
            ),
            pytest.param(
                Status(400, message="Please reduce the length of the messages or completion."),
                ContextTooLong,
                id="messages or completion",
            ),
            pytest.param(
                Status(500, message="the request exceeds the available context size"), ContextTooLong, id="500"
            ),
            pytest.param(
                Status(500, message="The prompt exceeds the maximum context length."), ContextTooLong, id="500, maximum"
            ),
        ],
    )
    def test_what_the_input_causes_is_no_failure_of_the_provider(
        self, model: Model, server: ProviderServer, step: Step, kind: type[PerdureError]
    ) -> None:
        """Such an error has a class of its own and is not transient: no breaker counts it, and it is not retried."""
        server.script(step)
        with pytest.raises(kind) as caught:
            ask(model, QUESTION)
        assert caught.value.transient is False

    @pytest.mark.parametrize(
        "step",
        [
            Status(413, "rate_limit_exceeded", "Request too large on tokens per minute (TPM): Limit 6000."),
            Status(413, message="Request too large for the model on tokens per minute (TPM): Limit 6000."),
            Status(429, message="Rate limit reached on tokens per min (TPM): Limit 6000, Used 5000, Requested 2000."),
        ],
        ids=["code", "text", "a request within the limit"],
    )
    def test_a_rate_limit_under_another_status_is_one(self, model: Model, server: ProviderServer, step: Step) -> None:
        """Some providers report a rate limit of tokens with status 413, which else means a prompt that is too long."""
        server.script(step)
        with pytest.raises(RateLimited):
            ask(model, QUESTION)

    def test_a_locked_account_is_no_content_filter(self, model: Model, server: ProviderServer) -> None:
        """The account's holder can do something about it, and the user cannot. Another model may answer."""
        server.script(Status(403, message="Your organisation violated our usage policies and is deactivated."))
        with pytest.raises(ProviderError, match="status 403"):
            ask(model, QUESTION)

    def test_a_failed_server_is_a_failure_of_the_provider(self, model: Model, server: ProviderServer) -> None:
        """An empty reply whose reason is the server's own failure is retried, and the breaker counts it."""
        server.script(Answer(finish_reason="insufficient_system_resource"))
        with pytest.raises(ProviderError) as caught:
            ask(model, QUESTION)
        assert caught.value.transient

    # --- failures

    @pytest.mark.parametrize(
        "step",
        [
            pytest.param(Answer(), id="neither text nor calls"),
            pytest.param(Answer(" \n "), id="only white space"),
            pytest.param(Raw(b"<html><body>It works!</body></html>", "text/html"), id="HTML with status 200"),
            pytest.param(Raw(b'{"answer": 42}', "application/json"), id="some other JSON"),
            pytest.param(Raw(b""), id="nothing"),
            pytest.param(Broken(Answer("half of it"), 3, b""), id="cut off at an event's end"),
        ],
    )
    def test_refuses_a_malformed_response(self, model: Model, server: ProviderServer, step: Step) -> None:
        """A malformed response fails the call with `InvalidResponse`. An empty one may be requested again."""
        server.script(step, step)
        with pytest.raises(InvalidResponse):
            ask(model, QUESTION)

    @pytest.mark.parametrize(
        "payload",
        [
            pytest.param(b"\xff\xfe\x80", id="no UTF-8"),
            pytest.param(b"{not json", id="no JSON"),
            pytest.param(b"[" * 100_000, id="nested without end"),
            pytest.param(b"17", id="a number for an event"),
        ],
    )
    def test_refuses_a_stream_with_a_malformed_event(
        self, model: Model, server: ProviderServer, payload: bytes
    ) -> None:
        """If an event is malformed, the call fails, even if valid events came before it."""
        server.script(Broken(Answer("a good beginning"), 3, server.frame(payload)))
        with pytest.raises(InvalidResponse):
            ask(model, QUESTION)

    def test_refuses_a_stream_without_end(
        self, model: Model, server: ProviderServer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A response longer than `MAX_BODY_BYTES` fails the call, so an endless response cannot exhaust the memory."""
        monkeypatch.setattr(connection, "MAX_BODY_BYTES", 100_000)
        server.script(Broken(Answer("a good beginning"), 3, b"data: " + b"x" * 200_000))
        with pytest.raises(InvalidResponse, match="too long"):
            ask(model, QUESTION)

    def test_refuses_a_compressed_reply_before_it_is_unpacked(self, model: Model, server: ProviderServer) -> None:
        """A compressed reply is refused without decompression, because one megabyte can expand to a gigabyte."""
        bomb = gzip_bomb(before=b"data: ")
        server.script(Raw(bomb, headers={"Content-Encoding": "gzip"}))
        with peak() as found, pytest.raises(InvalidResponse, match="compressed"):
            ask(model, QUESTION)
        assert found.mib < 20
        assert server.headers[0]["accept-encoding"] == "identity"
        server.script(Answer("still here"))
        assert ask(model, QUESTION).content == "still here"

    def test_a_compressed_error_is_mapped_by_its_status(self, model: Model, server: ProviderServer) -> None:
        """The status and `Retry-After` of a compressed error response determine the error. The body is ignored."""
        headers = {"Content-Encoding": "gzip", "Retry-After": "7"}
        server.script(Raw(gzip_bomb(), "application/json", status=429, headers=headers))
        with peak() as found, pytest.raises(RateLimited) as caught:
            ask(model, QUESTION)
        assert found.mib < 20
        assert caught.value.retry_after_s == 7

    def test_a_connection_closed_in_mid_stream_is_a_transient_failure(
        self, model: Model, server: ProviderServer
    ) -> None:
        """If the connection closes in the middle of a reply, the call fails with a transient error."""
        server.script(Broken(Answer("a good beginning"), 4, "close"))
        with pytest.raises(ProviderError) as caught:
            ask(model, QUESTION)
        assert caught.value.transient

    def test_an_error_in_mid_stream_is_a_transient_failure(self, model: Model, server: ProviderServer) -> None:
        """A provider's error event in the middle of a stream is a transient failure."""
        server.script(Broken(Answer("a good beginning"), 4, Status(500, message=SECRET)))
        with pytest.raises(ProviderError) as caught:
            ask(model, QUESTION)
        assert caught.value.transient
        assert SECRET not in caught.value.message

    @pytest.mark.parametrize(
        ("status", "kind", "transient"),
        [
            (400, ProviderError, False),
            (401, ProviderError, False),
            (403, ProviderError, False),
            (404, ProviderError, False),
            (413, ContextTooLong, False),
            (422, ProviderError, False),
            (408, ProviderError, True),
            (429, RateLimited, True),
            (500, ProviderError, True),
            (503, ProviderError, True),
            (529, ProviderError, True),
        ],
    )
    def test_maps_each_status(
        self, model: Model, server: ProviderServer, status: int, kind: type[PerdureError], transient: bool
    ) -> None:
        """The HTTP status determines the type of the error and whether the error is transient.

        Users may see the error's message, so the message does not quote the provider's text.
        """
        server.script(Status(status, message=SECRET))
        with pytest.raises(kind) as caught:
            ask(model, QUESTION)
        assert caught.value.transient is transient
        assert SECRET not in caught.value.message
        assert len(server.requests) == 1, "the engine retries; the SDK must not"

    def test_follows_no_redirect_to_another_origin(self, model: Model, server: ProviderServer) -> None:
        """A redirect to another origin is refused, because the server there would receive the conversation."""
        other = type(server)(player=server.player)
        with other:
            server.script(Status(307, headers={"Location": f"{other.base_url}/anywhere"}))
            with pytest.raises(ProviderError, match="another origin") as caught:
                ask(model, QUESTION)
        assert not caught.value.transient
        assert other.requests == []

    def test_follows_a_redirect_within_its_origin(self, model: Model, server: ProviderServer) -> None:
        """A redirect to the same origin is followed."""
        server.script(Status(307, headers={"Location": "?moved"}), Answer("here now"))
        assert ask(model, QUESTION).content == "here now"

    def test_an_error_page_is_mapped_by_its_status(self, model: Model, server: ProviderServer) -> None:
        """The status of an HTML error page, such as a proxy's, determines the error."""
        server.script(Raw(b"<html>Bad gateway</html>", "text/html", status=502))
        with pytest.raises(ProviderError, match="status 502") as caught:
            ask(model, QUESTION)
        assert caught.value.transient

    @pytest.mark.parametrize(
        ("headers", "expected"),
        [
            ({"Retry-After": "7"}, 7.0),
            ({"Retry-After": "0.5"}, 0.5),
            ({"Retry-After": "3600"}, 3600.0),
            ({"retry-after-ms": "1500", "Retry-After": "9"}, 1.5),
            ({}, None),
            ({"Retry-After": "soon"}, None),
            ({"Retry-After": "-3"}, None),
            ({"Retry-After": "nan"}, None),
            ({"Retry-After": "1e300"}, None),
            ({"Retry-After": "Wed, 99 Foo 2026 99:99:99 GMT"}, None),
        ],
    )
    @pytest.mark.parametrize("status", [429, 503])
    def test_reads_how_long_to_wait(
        self, model: Model, server: ProviderServer, status: int, headers: dict[str, str], expected: float | None
    ) -> None:
        """The error's `retry_after_s` is the valid delay in the response's headers. An invalid delay is ignored."""
        server.script(Status(status, headers=headers))
        with pytest.raises((RateLimited, ProviderError)) as caught:
            ask(model, QUESTION)
        assert caught.value.retry_after_s == expected

    def test_reads_a_date_to_wait_for(self, model: Model, server: ProviderServer) -> None:
        """If `Retry-After` is a date, the error's `retry_after_s` is the number of seconds until that date."""
        then = SystemClock().now() + timedelta(seconds=600)
        server.script(Status(429, headers={"Retry-After": format_datetime(then, usegmt=True)}))
        with pytest.raises(RateLimited) as caught:
            ask(model, QUESTION)
        assert caught.value.retry_after_s is not None
        assert 500 < caught.value.retry_after_s <= 600

    @pytest.mark.parametrize(
        "step",
        [
            pytest.param(Status(503, "overloaded"), id="refused at once"),
            pytest.param(Broken(Answer("half of it"), 3, Status(503, "overloaded")), id="an error in mid-stream"),
            pytest.param(Broken(Answer("half of it"), 3, "close"), id="closed in mid-stream"),
            pytest.param(Broken(Answer("half of it"), 3, b""), id="ended in mid-stream"),
        ],
    )
    def test_logs_the_request_id_of_a_failure(
        self, model: Model, server: ProviderServer, step: Step, caplog: pytest.LogCaptureFixture
    ) -> None:
        """The log and the error's notes contain the provider's request id. The error's message does not contain it."""
        server.script(step)
        with caplog.at_level(logging.WARNING), pytest.raises(PerdureError) as caught:
            ask(model, QUESTION)
        assert model.name in caplog.text
        assert "request id req_1" in caplog.text
        assert "request id req_1" in caught.value.__notes__[0]
        assert "req_1" not in caught.value.message

    def test_logs_the_request_id_of_a_reply(
        self, model: Model, server: ProviderServer, caplog: pytest.LogCaptureFixture
    ) -> None:
        """The request id of a successful reply is logged."""
        server.script(Answer("an odd one"))
        with caplog.at_level(logging.DEBUG, logger="perdure"):
            ask(model, QUESTION)
        assert f"{model.name} answered: request id req_1" in caplog.messages

    def test_logs_no_control_characters_of_a_server(
        self, model: Model, server: ProviderServer, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A terminal that shows the log would obey the escape sequences in a server's request id or error code."""
        monkeypatch.setattr(type(server), "request_id", "req\x1b]0;owned\x07\x9b31m")
        server.script(Answer("an odd one"), Status(400, "bad\x1b[2J\x85code"))
        with caplog.at_level(logging.DEBUG, logger="perdure"):
            ask(model, QUESTION)
            with pytest.raises(PerdureError) as caught:
                ask(model, QUESTION)
        for text in (*caplog.messages, *caught.value.__notes__):
            assert text.isprintable(), text
        assert "req]0;owned31m" in caplog.text

    def test_a_refused_connection_is_a_transient_failure(self, model: Model, server: ProviderServer) -> None:
        """A refused connection is a transient failure of the provider."""
        server.stop()
        with pytest.raises(ProviderError) as caught:
            ask(model, QUESTION)
        assert caught.value.transient

    # --- deadlines and aborts

    @pytest.mark.parametrize("step", [*SILENT, SLOW])
    def test_the_deadline_holds(self, model: Model, server: ProviderServer, step: Step) -> None:
        """The deadline applies to the whole call. Bytes that arrive slowly do not extend it."""
        server.script(step)
        began = time.monotonic()
        with pytest.raises(DeadlineExceeded):
            ask(model, QUESTION, call=new_call(timeout_s=0.3))
        assert 0.29 < time.monotonic() - began < AT_ONCE_S

    @pytest.mark.parametrize("step", SILENT)
    def test_an_abort_wakes_the_thread(
        self, model: Model, server: ProviderServer, step: Step, caplog: pytest.LogCaptureFixture
    ) -> None:
        """An abort immediately ends the wait for an unresponsive provider, and no warning is logged."""
        server.script(step)
        with caplog.at_level(logging.WARNING):
            self._aborted_at_once(model, lambda: server.wait_for_requests(1))
        assert caplog.text == ""

    def test_a_call_aborted_in_mid_stream_streams_no_more_text(self, model: Model, server: ProviderServer) -> None:
        """An abort in the middle of a stream ends the call, and no more text is passed to the listener."""
        server.script(Broken(Answer("one two three"), 4, "hang"))
        streamed: list[str] = []
        began = threading.Event()

        def listen(text: str) -> None:
            streamed.append(text)
            began.set()

        self._aborted_at_once(model, lambda: _happens(began), listen)
        assert "one two three".startswith("".join(streamed))

    def _aborted_at_once(
        self, model: Model, until_it_waits: Callable[[], None], listen: Callable[[str], None] | None = None
    ) -> None:
        call = ModelCall(SystemClock(), 60.0, listen)
        with ThreadPoolExecutor(1) as pool:
            waiting: Future[ModelReply] = pool.submit(ask, model, QUESTION, call=call)
            until_it_waits()
            began = time.monotonic()
            call.abort()
            assert isinstance(waiting.exception(timeout=30), CallAborted)
            assert time.monotonic() - began < AT_ONCE_S


def _happens(event: threading.Event) -> None:
    assert event.wait(30)
