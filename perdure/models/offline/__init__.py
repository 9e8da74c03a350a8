"""`offline`: the built-in model. Deterministic, without network and without language understanding.

It runs in the same loop as a language model, so that the whole system can be tried, tested and measured offline. It
follows rules: it calls tools, replies with their results, quotes earlier messages, writes extractive summaries and
extracts memories.
"""

from perdure.models.offline.model import OfflineModel

__all__ = ["OfflineModel"]
