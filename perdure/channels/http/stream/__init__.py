"""Streams of a turn's events to clients.

hub.py        wakes this gateway's streams and waiting requests, from Redis, or from PostgreSQL while Redis fails
follow.py     the events of one turn for one client, from any position
websocket.py  the WebSocket `GET /v1/ws`
sse.py        server-sent events: `GET /v1/turns/{id}/events`

An open stream holds no thread and no database connection.
"""
