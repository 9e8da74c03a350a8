"""Events of running turns for streaming clients: written by workers to Redis, read by gateways.

event.py        ids, kinds and Redis keys
writer.py       the worker's side: batches a turn's provisional events into its Redis stream
listening.py    which turns have listeners, as the workers know it
committed.py    what PostgreSQL has of a turn: its committed messages and its state

Events in Redis are provisional and may be lost: PostgreSQL has every committed message. `docs/streaming.md` explains
the protocol.
"""
