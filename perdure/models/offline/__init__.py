"""`offline`: the built-in model. Deterministic, without network and without language understanding.

Turns call it exactly as they call a language model. The whole system can therefore be tried, tested and measured
offline. The offline model follows rules: it calls tools, replies with their results, quotes earlier messages, writes
extractive summaries and extracts memories.
"""

from perdure.models.offline.model import OfflineModel

__all__ = ["OfflineModel"]
