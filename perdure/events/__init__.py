"""Events of running turns for streaming clients. Workers write the events to Redis, and gateways read them.

A process that receives messages from chats reads the progress of tools among them.

event.py        ids and kinds of events, and the Redis channels that announce events
writer.py       writes turns' provisional events to Redis streams, for workers
listening.py    tracks which turns have listeners, for workers
progress.py     reads the progress of turns, for chats

Events in Redis are provisional and may be lost: PostgreSQL has every committed message (`perdure.turns.committed`).
`docs/streaming.md` explains the protocol.
"""
