"""Snapshots: the state of a running session, stored so that it survives a crash.

`snapshot` defines `AgentSnapshot` and `codec` its JSON. `store` is the protocol; `postgres`, `redis`, `sqlite` and
`file` implement it, and `resolve` chooses one. `exchange` exports and imports snapshots, `pending` adds the queued
messages, `deletion` deletes the snapshots of a session that ends. `turns.run.snapshot` saves and loads them.
"""
