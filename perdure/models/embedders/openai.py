"""`openai:NAME`: the embeddings endpoint of OpenAI or a compatible server, through the official SDK.

As with models, a call can be aborted, all requests of a call share its deadline, and the SDK's retries are off.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence

from perdure.clock import Clock
from perdure.errors import InvalidResponse
from perdure.models.embedders.protocol import LearnedDimensions, Vector, in_batches
from perdure.models.protocol import ModelCall
from perdure.models.providers.json_values import as_array, as_object
from perdure.models.providers.openai import calling, client, options_of
from perdure.text.untrusted import storable

MAX_BYTES = 8_191
"""Maximum bytes of UTF-8 sent per text. The provider accepts 8,191 tokens, and each token has at least one byte."""

BATCH = 32
"""Texts per request: within the provider's limit of 300,000 tokens and the limits of compatible servers."""


class OpenAIEmbedder:
    """One embedding model of one server. Threads may share it."""

    def __init__(self, model: str, clock: Clock, timeout_s: float) -> None:
        """Read the server's address and key from the environment, as the SDK does.

        Raises:
            SettingsError: `OPENAI_API_KEY` is missing, or `OPENAI_BASE_URL` is not a URL.
        """
        self._model = model
        self._clock = clock
        self._timeout_s = timeout_s
        self._dimensions = LearnedDimensions()
        self._client = client("PERDURE_EMBEDDER", self.name)
        self._close = weakref.finalize(self, self._client.close)

    @property
    def name(self) -> str:
        return f"openai:{self._model}"

    @property
    def dimensions(self) -> int | None:
        return self._dimensions.dimensions

    def embed(self, texts: Sequence[str], call: ModelCall | None = None) -> list[Vector]:
        """One vector for each text. Raises the errors of `Embedder.embed`."""
        call = call or ModelCall(self._clock, self._timeout_s)
        return [vector for batch in in_batches(texts, BATCH) for vector in self._request(batch, call)]

    def _request(self, texts: Sequence[str], call: ModelCall) -> list[Vector]:
        body = {"model": self._model, "input": [_sendable(each) for each in texts], "encoding_format": "float"}
        with calling(self.name, call, self._clock):
            answer: object = self._client.post("/embeddings", body=body, cast_to=object, options=options_of(call))
            return self._vectors(answer, len(texts))

    def _vectors(self, answer: object, count: int) -> list[Vector]:
        items = [as_object(each) for each in as_array(as_object(answer).get("data"))]
        by_index = {each["index"]: each for each in items if isinstance(each.get("index"), int)}
        if len(items) != count or sorted(by_index) != list(range(count)):
            raise InvalidResponse("The embedder's server did not send one vector for each text.")
        return [self._dimensions.check(by_index[at].get("embedding")) for at in range(count)]


def _sendable(text: str) -> str:
    """`text` within the provider's limits: at most `MAX_BYTES`, and not blank."""
    cut = storable(text).encode()[:MAX_BYTES].decode(errors="ignore")
    return cut if cut.strip() else "-"
