"""`openai:NAME` and `ENDPOINT:NAME`: the embeddings API of OpenAI or a compatible server.

As with models, a call can be aborted, and all requests of a call share its deadline.
"""

from __future__ import annotations

import base64
import binascii
import json
import sys
from array import array
from collections.abc import Mapping, Sequence
from typing import Any

from perdure.clock import Clock
from perdure.errors import InvalidResponse
from perdure.models.embedders.protocol import LearnedDimensions, Vector, in_batches
from perdure.models.endpoints import OPENAI
from perdure.models.protocol import ModelCall
from perdure.models.providers.endpoint import Endpoint, endpoint_of
from perdure.models.providers.json_values import as_array, as_object
from perdure.models.providers.model import Client
from perdure.text.untrusted import first_line, storable

MAX_BYTES = 8_191
"""Maximum bytes of UTF-8 sent per text. The provider accepts 8,191 tokens, and each token has at least one byte."""

_SHOWN_CHARS = 100

BATCH = 32
"""Texts per request: within the provider's limit of 300,000 tokens and the limits of compatible servers."""


class OpenAIEmbedder:
    """One embedding model of one server. Threads may share it."""

    def __init__(self, model: str, clock: Clock, timeout_s: float, endpoint: Endpoint | None = None) -> None:
        """Without `endpoint`, read the server's address and key from the variables of OpenAI.

        Raises:
            SettingsError: `OPENAI_API_KEY` is missing, or `OPENAI_BASE_URL` is not a URL.
        """
        self._model = model
        self._clock = clock
        self._timeout_s = timeout_s
        self._dimensions = LearnedDimensions()
        self._endpoint = endpoint or endpoint_of(OPENAI, "PERDURE_EMBEDDER", f"openai:{model}")
        self._client = Client(self._endpoint, self.name, clock)

    @property
    def name(self) -> str:
        return f"{self._endpoint.name}:{self._model}"

    @property
    def dimensions(self) -> int | None:
        return self._dimensions.dimensions

    def embed(self, texts: Sequence[str], call: ModelCall | None = None) -> list[Vector]:
        """One vector for each text. Raises the errors of `Embedder.embed`."""
        call = call or ModelCall(self._clock, self._timeout_s)
        return [vector for batch in in_batches(texts, BATCH) for vector in self._request(batch, call)]

    def _request(self, texts: Sequence[str], call: ModelCall) -> list[Vector]:
        body = {"model": self._model, "input": [_sendable(each) for each in texts], "encoding_format": "float"}
        with self._client.calling(call) as exchange, self._client.post("/embeddings", body, exchange) as response:
            return self._vectors(json.loads(response.read()), len(texts))

    def _vectors(self, answer: object, count: int) -> list[Vector]:
        items = [as_object(each) for each in as_array(as_object(answer).get("data"))]
        if len(items) != count:
            raise InvalidResponse(f"The embedder's server sent {len(items)} vectors for {count} texts.")
        given = [each.get("index") for each in items]
        if all(index is None for index in given):  # some servers send no index: the order is that of the texts
            given = list(range(count))
        by_index = {index: each for index, each in zip(given, items, strict=True) if type(index) is int}
        if sorted(by_index) != list(range(count)):
            raise InvalidResponse(f"The embedder's server sent vectors with the indexes {_shown(given)}.")
        return [self._dimensions.check(_values(by_index[at])) for at in range(count)]


def _values(item: Mapping[str, Any]) -> object:
    """The numbers of a vector, which some servers send as base64 of four-byte floats although a list is asked for.

    Raises:
        InvalidResponse: the base64 is malformed.
    """
    given = item.get("embedding")
    if not isinstance(given, str):
        return given
    try:
        values = array("f", base64.b64decode(given, validate=True))
    except (binascii.Error, ValueError) as error:
        raise InvalidResponse(f"The embedder's server sent the text {_shown(given)} for a vector.") from error
    if sys.byteorder == "big":
        values.byteswap()
    return values.tolist()


def _shown(value: object) -> str:
    return first_line(repr(value), _SHOWN_CHARS)


def _sendable(text: str) -> str:
    """`text` within the provider's limits: at most `MAX_BYTES`, and not blank."""
    cut = storable(text).encode()[:MAX_BYTES].decode(errors="ignore")
    return cut if cut.strip() else "-"
