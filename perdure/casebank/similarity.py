"""The least similarity at which a case enters a prompt, for each embedder; the setting overrides it.

The scale of cosines depends on the embedder: unrelated texts have about 0 with one, 0.8 with another. The values
for `hash` and all-MiniLM-L6-v2 were measured with the questions of `tests/casebank/questions.py`: no question comes
as near to a case of another topic. The others are conservative estimates; docs/casebank.md has the figures.
"""

from __future__ import annotations

from perdure.text.patterns import compiled

_DEFAULTS = (
    (compiled(r"hash:(\d{1,2}|1\d\d)$"), 0.6),
    (compiled(r"hash:\d+$"), 0.5),
    (compiled(r"sentence-transformers:(.*/)?all-MiniLM-L6-v2/?$", ignore_case=True), 0.6),
    (compiled(r"openai:(.*/)?text-embedding-3-(small|large)$"), 0.6),
)

_UNKNOWN = 0.85
"""For unknown embedders: with E5 or text-embedding-ada-002, unrelated texts reach 0.8."""


def least_similarity(embedder: str, setting: float | None) -> float:
    """The least cosine: the setting, else the default for the embedder of that name."""
    if setting is not None:
        return setting
    return next((least for pattern, least in _DEFAULTS if pattern.match(embedder)), _UNKNOWN)
