"""Events of running turns for streaming clients: written by workers to Redis, read by gateways.

event.py        ids and kinds, and the channels that announce events
writer.py       the worker's side: batches a turn's provisional events into its Redis stream
listening.py which turns have listeners, for the workers

Events in Redis are provisional and may be lost: PostgreSQL has every committed message (`perdure.turns.committed`).
`docs/streaming.md` explains the protocol.
"""
