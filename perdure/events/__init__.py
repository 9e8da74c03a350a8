"""Events of running turns for streaming clients: written by workers to Redis, read by gateways.

event.py        ids and kinds, and the channels that announce events
writer.py       writes turns' provisional events to Redis streams, for workers
listening.py    tracks which turns have listeners, for workers

Events in Redis are provisional and may be lost: PostgreSQL has every committed message (`perdure.turns.committed`).
`docs/streaming.md` explains the protocol.
"""
