"""The response body of `/v1/files`."""

from __future__ import annotations

from uuid import UUID

from perdure.channels.http.schemas.answer import FILE_ID, Answer, examples


class StoredFile(Answer):
    """A stored file. `media_type` is what its content shows, and `size` its bytes."""

    model_config = examples(
        {
            "file_id": FILE_ID,
            "media_type": "image/png",
            "size": 81_204,
            "sha256": "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08",
        }
    )

    file_id: UUID
    media_type: str
    size: int
    sha256: str
