"""Lists the repository's files, except generated ones, and its Python modules."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]

# Generated files and directories, as listed in .gitignore.
_MADE = {
    ".git",
    ".venv",
    ".perdure",
    ".env",
    ".coverage",
    ".hypothesis",
    "build",
    "dist",
    "__pycache__",
    "node_modules",
}


def files() -> Iterator[Path]:
    """Each file of the source tree, except generated ones."""
    for folder, folders, names in os.walk(ROOT):
        folders[:] = [name for name in folders if name not in _MADE and not name.endswith("_cache")]
        yield from (Path(folder, name) for name in names if name not in _MADE)


def read(name: str) -> str:
    """The text of the file `name`, relative to the root."""
    return (ROOT / name).read_text(encoding="utf-8")


def modules() -> Iterator[tuple[str, Path]]:
    """The import name and the file of each module of `perdure`."""
    for path in sorted((ROOT / "perdure").rglob("*.py")):
        yield _dotted(path.relative_to(ROOT)), path
    for linked in ("workers", "tasks", "schedules"):
        for path in sorted((ROOT / linked).rglob("*.py")):
            yield _dotted("perdure" / path.relative_to(ROOT)), path


def _dotted(path: Path) -> str:
    return ".".join(path.with_suffix("").parts).removesuffix(".__init__")
