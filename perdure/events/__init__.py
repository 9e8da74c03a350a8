"""Events of running turns for streaming clients. Workers write the events to Redis, and gateways read them.

event.py        ids and kinds of events, and the Redis channels that announce events
writer.py       writes turns' provisional events to Redis streams, for workers
listening.py    tracks which turns have listeners, for workers

Events in Redis are provisional and may be lost: PostgreSQL has every committed message (`perdure.turns.committed`).
`docs/streaming.md` explains the protocol.
"""
