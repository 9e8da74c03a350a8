"""`offline`: the built-in model. Deterministic, without network and without language understanding.

It goes through the same loop as a real model, so that the whole system can be tried, tested
and measured with nothing but this package: it calls tools, answers from their results,
quotes what was said earlier, makes extracts and extracts memories. It follows rules and says
so; it never pretends to understand.
"""

from perdure.models.offline.model import OfflineModel

__all__ = ["OfflineModel"]
