"""Memory: users' earlier messages and the memories extracted from them.

recall/             searches messages and memories, and reads a user's past for a prompt
consolidation/      extracts memories from ended sessions
redis/              the short-lived memory in Redis: the event stream and working memory
embedding.py        computes the vectors of messages and memories
decay.py            lowers the values of memories over time
hot_memories.py     ranks the memories that are recalled most often
import_export.py    imports and exports conversations

Turns, tools, tasks, routes and commands call this package. The durable state of a turn is in `turns` and `snapshots`.
"""
