"""Streams of a turn's events to clients.

hub.py        wakes a gateway's streams and waiting requests when their turns change
follow.py     yields the events of one turn to one client, from any position
websocket.py  serves the WebSocket `GET /v1/ws`
sse.py        formats the server-sent events of `GET /v1/turns/{id}/events`

An open stream holds no thread and no database connection.
"""
