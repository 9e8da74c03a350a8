"""Each embedder passes `EmbedderSuite`. Further tests cover the cache of embeddings and the selection by name."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.metadata import EntryPoint, EntryPoints
from operator import mul
from types import ModuleType
from typing import Any

import pytest

from perdure.clock import Clock, SystemClock
from perdure.errors import InvalidResponse, ProviderError, SettingsError
from perdure.models.embedders import resolve as resolving
from perdure.models.embedders import sentence_transformers, wordllama
from perdure.models.embedders.cache import CachedEmbedder
from perdure.models.embedders.hashing import HashEmbedder
from perdure.models.embedders.openai import OpenAIEmbedder
from perdure.models.embedders.protocol import Embedder, Vector, unit
from perdure.models.embedders.resolve import check, resolve
from perdure.models.protocol import ModelCall
from perdure.settings import Settings
from perdure.testing.suites.embedders import EmbedderSuite
from tests.models.openai_server import OpenAIServer, embedding_of


class Encoded(list[list[float]]):
    """A stand-in for the array that `SentenceTransformer.encode` returns."""

    def tolist(self) -> list[list[float]]:
        return list(self)


class Transformer:
    """A stand-in for `sentence_transformers.SentenceTransformer`, with the method that the embedder calls."""

    def __init__(self, model: str) -> None:
        if model == "missing":
            raise OSError("missing is not a local folder")
        self.model = model
        self.batches: list[int] = []

    def encode(self, inputs: list[str], *, batch_size: int, show_progress_bar: bool) -> Encoded:
        assert not show_progress_bar
        if self.model == "huge":
            raise RuntimeError("out of memory")
        self.batches.append(len(inputs))
        return Encoded(embedding_of(each or "-", 5) for each in inputs)


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> None:
    """A substitute for the library `sentence_transformers`, which needs PyTorch and is not installed for tests."""
    module = ModuleType("sentence_transformers")
    module.SentenceTransformer = Transformer  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "sentence_transformers", module)


@pytest.fixture
def environment(server: OpenAIServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Set the environment variables with which OpenAI clients call the test server."""
    monkeypatch.setenv("OPENAI_BASE_URL", server.base_url)
    monkeypatch.setenv("OPENAI_API_KEY", "sk-of-the-tests")


class TestHash(EmbedderSuite):
    @pytest.fixture
    def embedder(self) -> Embedder:
        return HashEmbedder(384)


class TestOpenAI(EmbedderSuite):
    @pytest.fixture
    def embedder(self, environment: None) -> Embedder:
        return OpenAIEmbedder("small", SystemClock(), 30.0)


class TestSentenceTransformers(EmbedderSuite):
    @pytest.fixture
    def embedder(self, library: None) -> Embedder:
        return sentence_transformers.load("mini", SystemClock(), 30.0)


@pytest.mark.long
class TestWordLlama(EmbedderSuite):
    """The library itself, with the weights of its package. `make test` does not install it."""

    @pytest.fixture
    def embedder(self) -> Embedder:
        return wordllama.load("256", SystemClock(), 30.0)


class TestCached(EmbedderSuite):
    @pytest.fixture
    def embedder(self) -> Embedder:
        return resolve("hash:64", Settings(), SystemClock())


# --- the cache


class Counting:
    """An embedder that records the texts it embeds."""

    name = "counting"
    dimensions = 2

    def __init__(self) -> None:
        self.embedded: list[list[str]] = []

    def embed(self, texts: Sequence[str], call: ModelCall | None = None) -> list[Vector]:
        self.embedded.append(list(texts))
        return [[0.6, 0.8] for _ in texts]


def test_a_text_is_embedded_once_while_it_is_cached() -> None:
    """A cached text is not embedded again, because every step of a turn searches with the same question."""
    embedder = Counting()
    cached = CachedEmbedder(embedder)
    cached.embed(["a", "b", "a"])
    cached.embed(["b", "c"])
    cached.embed(["a"])
    assert embedder.embedded == [["a", "b"], ["c"]]


def test_the_least_recently_used_text_is_dropped_first() -> None:
    """The cache is bounded, and drops the least recently used text first."""
    embedder = Counting()
    cached = CachedEmbedder(embedder, max_floats=4)
    for text in ("a", "b", "a", "c", "a", "b"):
        cached.embed([text])
    assert embedder.embedded == [["a"], ["b"], ["c"], ["b"]]


def test_more_texts_than_the_cache_holds_get_their_vectors() -> None:
    """A call with more texts than the cache holds returns a vector for each text."""
    assert len(CachedEmbedder(Counting(), max_floats=4).embed([str(number) for number in range(9)])) == 9


def test_a_cached_text_does_not_reach_the_guard() -> None:
    """The cache comes before the circuit breaker, so an open breaker does not refuse a cached text."""
    embedder = Counting()
    guarded = resolve("hash:64", Settings(), SystemClock(), guard=lambda _: embedder)
    guarded.embed(["a"])
    guarded.embed(["a"])
    assert embedder.embedded == [["a"]]


# --- sentence-transformers


def test_says_which_extra_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the library is not installed, the error says which extra to install."""
    monkeypatch.setitem(sys.modules, "sentence_transformers", None)
    with pytest.raises(SettingsError, match=r"PERDURE_EMBEDDER is .*pip install 'perdure\[sentence-transformers\]'"):
        resolve("sentence-transformers:all-MiniLM-L6-v2", Settings(), SystemClock())


def test_says_which_model_cannot_be_loaded(library: None) -> None:
    """If the library cannot load the model, the error names the model and the reason."""
    with pytest.raises(SettingsError, match=r"sentence-transformers:missing.*not a local folder"):
        resolve("sentence-transformers:missing", Settings(), SystemClock())


def test_a_failing_library_is_a_provider_error(library: None) -> None:
    """The library's errors become `ProviderError`."""
    with pytest.raises(ProviderError):
        resolve("sentence-transformers:huge", Settings(), SystemClock()).embed(["x"])


def test_refuses_vectors_without_a_direction(library: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A vector with NaN is refused, because it would make searches in an index unreliable."""
    broken = [float("nan"), 1.0]
    monkeypatch.setattr(Transformer, "encode", lambda *_, **__: Encoded([broken]))
    with pytest.raises(InvalidResponse):
        resolve("sentence-transformers:mini", Settings(), SystemClock()).embed(["x"])


# --- WordLlama


@pytest.mark.long
def test_near_meanings_have_near_vectors() -> None:
    """Texts without a word in common are near if they mean the same. Fewer dimensions are the first ones."""
    embedder = resolve("wordllama:256", Settings(), SystemClock())
    job, work, weather = embedder.embed(["I got a new job.", "She was hired as an employee.", "It rains in autumn."])
    assert sum(map(mul, job, work)) > 2 * sum(map(mul, job, weather))
    [small] = resolve("wordllama:64", Settings(), SystemClock()).embed(["I got a new job."])
    assert small == pytest.approx(unit(job[:64]), abs=1e-5)


def test_says_that_wordllama_is_an_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error says which extra to install."""
    monkeypatch.setitem(sys.modules, "wordllama", None)
    with pytest.raises(SettingsError, match=r"'wordllama:256': it needs .*pip install 'perdure\[wordllama\]'"):
        resolve("wordllama:256", Settings(), SystemClock())


@pytest.mark.parametrize("name", ["wordllama:384", "wordllama:0256", "wordllama:small"])
def test_wordllama_has_three_sizes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other sizes stop the program at its start, and are named with the accepted ones."""
    monkeypatch.setattr(resolving, "find_spec", lambda _: True)
    for use in (resolve, check):
        with pytest.raises(SettingsError, match=f"'{name}': accepted: wordllama:64, wordllama:128, wordllama:256"):
            use(name, Settings(), SystemClock())


# --- named endpoints


def test_a_named_endpoint_embeds(server: OpenAIServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """`vllm:NAME` is an embedder of the server of `PERDURE_ENDPOINTS__VLLM__URL`, with its key."""
    monkeypatch.setenv("OPENAI_BASE_URL", "http://127.0.0.1:1")
    settings = Settings.model_validate({"endpoints": {"vllm": {"url": server.base_url, "key": "sk-of-vllm"}}})
    embedder = resolve("VLLM:bge", settings, SystemClock())
    embedder.embed(["a text"])
    assert embedder.name == "vllm:bge"
    assert server.requests[0]["model"] == "bge"
    assert server.headers[0]["authorization"] == "Bearer sk-of-vllm"


def test_an_endpoint_without_embeddings_is_refused() -> None:
    """Only Chat Completions has an API for embeddings."""
    settings = Settings.model_validate({"endpoints": {"claude": {"url": "http://127.0.0.1:1", "kind": "anthropic"}}})
    with pytest.raises(SettingsError, match="PERDURE_ENDPOINTS__CLAUDE__KIND is 'anthropic': accepted for an embedder"):
        resolving.check("claude:x", settings, SystemClock())


def test_an_endpoint_does_not_hide_another_embedder(installed: None) -> None:
    """An endpoint with the name of an installed embedder is refused."""
    settings = Settings.model_validate({"endpoints": {"acme": {"url": "http://127.0.0.1:1"}}})
    with pytest.raises(SettingsError, match="PERDURE_ENDPOINTS__ACME__URL"):
        resolving.check("hash:384", settings, SystemClock())


# --- resolution


def acme(model: str, settings: Settings, clock: Clock) -> Embedder:
    """The function that the entry point `acme` loads; returns a third party's embedder."""
    assert model == "large"
    return Counting()


def _load(point: EntryPoint) -> Any:
    if point.name == "broken":
        raise ModuleNotFoundError("No module named 'no_such_module'")
    return acme


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two installed packages with one entry point each. The module of the second entry point is missing."""
    points = [
        EntryPoint("acme", f"{__name__}:acme", resolving.ENTRY_POINT_GROUP),
        EntryPoint("broken", "no_such_module:embedder", resolving.ENTRY_POINT_GROUP),
    ]
    monkeypatch.setattr(resolving, "entry_points", lambda **_: EntryPoints(points))
    monkeypatch.setattr(EntryPoint, "load", _load)


@pytest.mark.parametrize("name", ["", "hash", "hash:", "openai:", "sentence-transformers", "word2vec:x", "Hash:384"])
def test_an_unknown_name_says_what_is_accepted(name: str) -> None:
    """An unknown name is refused. The error contains the setting, its value and the accepted values."""
    with pytest.raises(SettingsError) as caught:
        resolve(name, Settings(), SystemClock())
    assert str(caught.value).startswith(f"PERDURE_EMBEDDER is {name!r}: accepted: hash:384, openai:NAME")


@pytest.mark.parametrize(
    "dimensions", ["abc", "0", "63", "2001", "-384", "3.5", "\N{FULLWIDTH DIGIT NINE}", "1" * 5000]
)
def test_the_built_in_embedders_dimensions_are_bounded(dimensions: str) -> None:
    """Only 64 to 2000 dimensions are accepted. Fewer do not distinguish texts, and pgvector cannot index more."""
    with pytest.raises(SettingsError, match=r"PERDURE_EMBEDDER is 'hash:.*accepted: hash:N with N from 64 to 2000"):
        resolve(f"hash:{dimensions}", Settings(), SystemClock())


def test_the_default_is_built_in() -> None:
    """The default embedder is built in, so it works without a network and without extras."""
    embedder = resolve(Settings().embedder, Settings(), SystemClock())
    assert (embedder.name, embedder.dimensions) == ("hash:384", 384)


def test_names_the_missing_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the API key is missing, the error names `PERDURE_EMBEDDER` and not `PERDURE_MODEL`."""
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)
    with pytest.raises(SettingsError, match="OPENAI_API_KEY is not set and PERDURE_EMBEDDER is 'openai:small'"):
        resolve("openai:small", Settings(), SystemClock())


def test_a_third_party_adds_an_embedder_by_entry_point(installed: None) -> None:
    """An installed package can add an embedder."""
    assert resolve("acme:large", Settings(), SystemClock()).name == "counting"
    with pytest.raises(SettingsError, match="acme:NAME"):
        resolve("nope:x", Settings(), SystemClock())


def test_an_entry_point_that_cannot_be_loaded_says_why(installed: None) -> None:
    """If an entry point cannot be loaded, the error says why."""
    with pytest.raises(SettingsError, match="no_such_module"):
        resolve("broken:x", Settings(), SystemClock())
