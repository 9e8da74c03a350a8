"""`openai:` embeddings with a well-behaved and a faulty server."""

from __future__ import annotations

import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from perdure.clock import SystemClock
from perdure.errors import DeadlineExceeded, InvalidResponse, PerdureError, ProviderError, RateLimited
from perdure.models.embedders.openai import BATCH, MAX_BYTES, OpenAIEmbedder
from perdure.models.protocol import CallAborted
from perdure.testing.suites.models import new_call
from tests.bombs import gzip_bomb, peak
from tests.models.openai_server import Drip, OpenAIServer, Raw, Silence, Status, Step


@pytest.fixture
def embedder(server: OpenAIServer, monkeypatch: pytest.MonkeyPatch) -> OpenAIEmbedder:
    """An embedder that calls the test server."""
    monkeypatch.setenv("OPENAI_BASE_URL", server.base_url)
    monkeypatch.setenv("OPENAI_API_KEY", "sk-of-the-tests")
    return OpenAIEmbedder("small", SystemClock(), 30.0)


def answer(*vectors: Any, indices: list[Any] | None = None) -> Raw:
    """A response with `vectors`. Their indices are `indices`, by default 0, 1 and so on; ... leaves an index out."""
    numbered = zip(indices or range(len(vectors)), vectors, strict=True)
    data = [{"object": "embedding", "embedding": each, **({} if at is ... else {"index": at})} for at, each in numbered]
    return Raw(json.dumps({"object": "list", "data": data, "model": "small"}).encode(), "application/json")


def test_sends_texts_in_batches(embedder: OpenAIEmbedder, server: OpenAIServer) -> None:
    """Texts are sent in batches of at most `BATCH`, over one connection."""
    embedder.embed([f"text {number}" for number in range(2 * BATCH + 1)])
    assert [len(each["input"]) for each in server.requests] == [BATCH, BATCH, 1]
    assert server.requests[0]["model"] == "small"
    assert server.headers[0]["authorization"] == "Bearer sk-of-the-tests"
    assert server.connections == 1


@pytest.mark.parametrize("text", ["x" * 50_000, "한" * 5_000, "\N{GRINNING FACE}" * 5_000])
def test_sends_no_more_of_a_text_than_the_provider_accepts(
    embedder: OpenAIEmbedder, server: OpenAIServer, text: str
) -> None:
    """A text is cut to the provider's limit, because the provider refuses a batch with a longer text."""
    embedder.embed([text])
    (sent,) = server.requests[0]["input"]
    assert MAX_BYTES - 4 < len(sent.encode()) <= MAX_BYTES
    assert text.startswith(sent)


def test_learns_the_dimensions(embedder: OpenAIEmbedder, server: OpenAIServer) -> None:
    """The dimensions come from the first vector; later vectors of another size are refused."""
    known = [embedder.dimensions]
    server.script(answer([3, 4]))
    assert embedder.embed(["x"]) == [[0.6, 0.8]]
    known.append(embedder.dimensions)
    assert known == [None, 2]
    server.script(answer([1, 2, 3]))
    with pytest.raises(InvalidResponse, match="3 dimensions after vectors of 2"):
        embedder.embed(["y"])


@pytest.mark.parametrize(
    "step",
    [
        pytest.param(Raw(b"<html><body>It works!</body></html>", "text/html"), id="HTML with status 200"),
        pytest.param(Raw(b"", "application/json"), id="nothing"),
        pytest.param(Raw(b"\xff\xfe\x80", "application/json"), id="no UTF-8"),
        pytest.param(Raw(b"{not json", "application/json"), id="no JSON"),
        pytest.param(Raw(b"[" * 100_000, "application/json"), id="nested without end"),
        pytest.param(Raw(b"17", "application/json"), id="a number"),
        pytest.param(answer([1.0]), id="too few"),
        pytest.param(answer([1.0], [1.0], [1.0]), id="too many"),
        pytest.param(answer([1.0], [1.0], indices=[0, 0]), id="one index twice"),
        pytest.param(answer([1.0], [1.0], indices=[None, "a"]), id="text for an index"),
        pytest.param(answer([1.0], [1.0], indices=[0, ...]), id="one index"),
        pytest.param(answer([1.0], [1.0], indices=[False, True]), id="no numbers for indices"),
        pytest.param(answer([1.0], []), id="empty"),
        pytest.param(answer([1.0], None), id="null for a vector"),
        pytest.param(answer([1.0], "one"), id="text for a vector"),
        pytest.param(answer([1.0], "AACA"), id="base64 of three bytes"),
        pytest.param(answer([1.0], ""), id="base64 of nothing"),
        pytest.param(answer([1.0], ["1"]), id="text for a number"),
        pytest.param(answer([0.0, 0.0], [1.0, 0.0]), id="zeros"),
        pytest.param(answer([float("nan"), 1.0], [1.0, 0.0]), id="NaN"),
        pytest.param(answer([10**400, 1], [1, 1]), id="beyond all floats"),
    ],
)
def test_refuses_invalid_vectors(embedder: OpenAIEmbedder, server: OpenAIServer, step: Step) -> None:
    """A malformed response or an invalid vector fails the call with `InvalidResponse`."""
    server.script(step)
    with pytest.raises(InvalidResponse):
        embedder.embed(["one", "two"])


@pytest.mark.parametrize(
    ("vectors", "indices"),
    [
        pytest.param([[3, 4], [0, 2]], [None, None], id="null for each index"),
        pytest.param([[3, 4], [0, 2]], [..., ...], id="no index"),
        pytest.param([[0, 2], [3, 4]], [1, 0], id="another order"),
        pytest.param(["AABAQAAAgEA=", "AAAAAAAAAEA="], [0, 1], id="base64"),
        pytest.param(["AABAQAAAgEA=", [0, 2]], [..., ...], id="base64 without index"),
    ],
)
def test_accepts_what_is_clear(
    embedder: OpenAIEmbedder, server: OpenAIServer, vectors: list[Any], indices: list[Any]
) -> None:
    """Without indices, the order is that of the texts. A vector may be base64, though a list was asked for."""
    server.script(answer(*vectors, indices=indices))
    assert embedder.embed(["one", "two"]) == [[0.6, 0.8], [0.0, 1.0]]


@pytest.mark.parametrize(
    ("step", "shown"),
    [
        (answer([1.0]), "sent 1 vectors for 2 texts"),
        (answer([1.0], [1.0], indices=[0, 7]), "sent vectors with the indexes [0, 7]"),
        (answer([1.0], None), "sent nothing for a vector"),
        (answer([1.0], {"a": 1}), "sent {'a': 1} for a vector"),
        (answer([1.0], [1.0, "x"]), "sent a list with 'x' for a vector"),
        (answer([1.0], "one!"), "sent the text 'one!' for a vector"),
    ],
)
def test_says_what_came(embedder: OpenAIEmbedder, server: OpenAIServer, step: Step, shown: str) -> None:
    """The error contains what the server sent, shortened."""
    server.script(step)
    with pytest.raises(InvalidResponse) as caught:
        embedder.embed(["one", "two"])
    assert shown in caught.value.message


@pytest.mark.parametrize(
    ("step", "kind", "transient"),
    [
        (Status(401), ProviderError, False),
        (Status(404), ProviderError, False),
        (Status(429, headers={"Retry-After": "7"}), RateLimited, True),
        (Status(500), ProviderError, True),
        (Raw(b'{"data": [', "application/json", promised=1_000), ProviderError, True),
    ],
    ids=["401", "404", "429", "500", "closed in the middle"],
)
def test_maps_failures(
    embedder: OpenAIEmbedder, server: OpenAIServer, step: Step, kind: type[PerdureError], transient: bool
) -> None:
    """A failure raises the same error as the failure of a model call. The SDK does not retry."""
    server.script(step)
    with pytest.raises(kind) as caught:
        embedder.embed(["x"])
    assert caught.value.transient is transient
    assert caught.value.retry_after_s == (7.0 if kind is RateLimited else None)
    assert caught.value.__notes__[0].startswith("openai:small: ")
    assert len(server.requests) == 1, "the engine retries; the SDK must not"


@pytest.mark.parametrize("step", [Silence(), Drip()], ids=["says nothing", "drips"])
def test_the_deadline_holds(embedder: OpenAIEmbedder, server: OpenAIServer, step: Step) -> None:
    """One deadline applies to all requests of a call of `embed`."""
    server.script(answer(*[[1.0]] * BATCH), step)
    began = time.monotonic()
    with pytest.raises(DeadlineExceeded):
        embedder.embed([str(number) for number in range(BATCH + 1)], new_call(timeout_s=0.5))
    assert 0.49 < time.monotonic() - began < 5.0


def test_an_abort_wakes_the_thread(embedder: OpenAIEmbedder, server: OpenAIServer) -> None:
    """An abort ends the wait for an unresponsive provider."""
    server.script(Silence())
    call = new_call()
    ended = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(embedder.embed, ["x"], call)
        waiting.add_done_callback(lambda _: ended.set())
        server.wait_for_requests(1)
        call.abort()
        assert ended.wait(30)
    assert isinstance(waiting.exception(), CallAborted)


def test_refuses_a_compressed_answer_before_it_is_unpacked(embedder: OpenAIEmbedder, server: OpenAIServer) -> None:
    """A compressed response is refused, because the SDK would decompress it completely."""
    server.script(Raw(gzip_bomb(before=b'{"data": ['), "application/json", headers={"Content-Encoding": "gzip"}))
    with peak() as found, pytest.raises(InvalidResponse, match="compressed"):
        embedder.embed(["a text"])
    assert found.mib < 20
    assert server.headers[0]["accept-encoding"] == "identity"
