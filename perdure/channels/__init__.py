"""Channels: accept messages and deliver replies.

http/           the HTTP gateway; `perdure gateway` serves it
chat/           chat services: the channel protocol, Discord, Slack
cli.py          conversations in a terminal, for `perdure chat` and `perdure send`
callback.py     replies and notices POSTed to a URL, for the workers' outbox and the CaseBank
notices.py      the CaseBank of a process, whose notices go to `PERDURE_CASEBANK__NOTIFY_URL`
"""

CLI = "cli"
"""The channel of `perdure chat`, and of `perdure send` unless it names another."""
