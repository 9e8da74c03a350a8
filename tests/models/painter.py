"""A model of pydantic-ai that streams replies with images."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

from pydantic_ai.messages import FilePart, ModelMessage, ModelResponse, ModelResponsePart, ModelResponseStreamEvent
from pydantic_ai.models import ModelRequestParameters, StreamedResponse
from pydantic_ai.models.test import TestModel, TestStreamedResponse
from pydantic_ai.settings import ModelSettings


class _Streamed(TestStreamedResponse):
    def _map_part(self, index: int, part: ModelResponsePart) -> Iterator[ModelResponseStreamEvent]:
        if isinstance(part, FilePart):
            yield self._parts_manager.handle_part(vendor_part_id=index, part=part)
        else:
            yield from super()._map_part(index, part)


class Painter(TestModel):
    """Replies with its lines, and records what it receives."""

    def __init__(self, *lines: list[ModelResponsePart]) -> None:
        super().__init__()
        self.lines = list(lines)
        self.seen: list[list[ModelMessage]] = []

    @asynccontextmanager
    async def request_stream(
        self,
        messages: list[ModelMessage],
        model_settings: ModelSettings | None,
        model_request_parameters: ModelRequestParameters,
        run_context: Any = None,
    ) -> AsyncIterator[StreamedResponse]:
        """Stream the next line."""
        del model_settings, run_context
        self.seen.append(list(messages))
        yield _Streamed(
            model_request_parameters=model_request_parameters,
            _model_name="painter",
            _structured_response=ModelResponse(parts=self.lines.pop(0)),
            _messages=messages,
            _provider_name="test",
        )
