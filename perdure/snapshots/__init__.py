"""Snapshots: the stored state of a running session, from which the session resumes after a crash.

`snapshot` defines `AgentSnapshot`, and `codec` defines its JSON form. `store` defines the protocol of stores, which
`postgres`, `redis`, `sqlite` and `file` implement. `resolve` creates the store that the settings select. `exchange`
exports and imports snapshots. `pending` converts queued messages to events of a snapshot. `deletion` deletes the
snapshots of a session that ends. `turns.run.snapshot` saves and loads snapshots while turns run.
"""
