"""The response bodies of `/v1/files`."""

from __future__ import annotations

from typing import Literal
from uuid import UUID

from perdure.channels.http.schemas.answer import FILE_ID, Answer, examples

_STORED = {
    "file_id": FILE_ID,
    "media_type": "image/png",
    "size": 81_204,
    "sha256": "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08",
}


class StoredFile(Answer):
    """A stored file. `media_type` is what its content shows, and `size` its bytes."""

    model_config = examples(_STORED)

    file_id: UUID
    media_type: str
    size: int
    sha256: str


class StoredForm(StoredFile):
    """A file that was uploaded as a form, also with the members of OpenAI's file object. `created_at` is in seconds."""

    model_config = examples(
        {
            **_STORED,
            "id": FILE_ID,
            "object": "file",
            "bytes": 81_204,
            "created_at": 1_772_443_800,
            "filename": "cat.png",
            "purpose": "user_data",
            "status": "processed",
        }
    )

    id: str
    object: Literal["file"] = "file"
    bytes: int
    created_at: int
    filename: str
    purpose: str
    status: Literal["processed"] = "processed"
