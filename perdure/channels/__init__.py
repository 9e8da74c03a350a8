"""Channels: accept messages and deliver replies.

http/           the HTTP gateway; `perdure gateway` serves it
chat/           chat services: the channel protocol, Telegram, Discord, Slack
cli.py          conversations in a terminal, for `perdure chat` and `perdure send`
activity.py     typing and presence events, for layer 0 of memory
callback.py     replies and notices POSTed to a URL, for the workers' outbox and the CaseBank
notices.py      the context of CaseBank runs, with notices to `PERDURE_CASEBANK__NOTIFY_URL`
queries.py      the query of activity.py
"""

WEB = "web"
"""The channel of the web chat and its WebSocket."""

CLI = "cli"
"""The channel of `perdure chat`, and of `perdure send` unless it names another."""
