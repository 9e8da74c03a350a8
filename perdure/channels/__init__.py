"""Channels accept messages from users and deliver the replies.

http/           the HTTP gateway; `perdure gateway` serves it
chat/           chat services: the channel protocol, Telegram, Discord, Slack
cli.py          conversations in a terminal, for `perdure chat` and `perdure send`
activity.py     typing and presence events of users (layer 0 of memory)
callback.py     POSTs replies from the outbox, and notices of the CaseBank, to URLs
notices.py      the `RunContext` of CaseBank runs, which POSTs notices to `PERDURE_CASEBANK__NOTIFY_URL`
queries.py      the SQL query of activity.py
"""

WEB = "web"
"""The channel of the web chat and its WebSocket."""

CLI = "cli"
"""The channel of `perdure chat`, and the default channel of `perdure send`."""
