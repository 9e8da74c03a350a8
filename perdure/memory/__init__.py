"""Memory: users' earlier messages and the memories extracted from them.

`recall` searches memory, `consolidation` extracts memories from ended sessions, `redis` holds the two short-lived
layers, `sections` fills the memory sections of a prompt. Other modules: vectors (`embedding`), `decay`, `hot_memories`,
and the import and export of conversations (`import_export`). Called by turns, tools, tasks, routes and commands.

The durable state of a turn is in `turns` and `snapshots`.
"""
