"""Chat services: each implements the channel protocol in one module or package, and all share the other modules.

protocol.py     the channel protocol: the events that a channel reports, the places that replies go to
ingress.py      turns events into accepted messages, decisions and commands
buttons.py      tokens of approval buttons: bound to the call, the chat and the person
replies.py      sends the replies of settled turns and the requests for approval, for the outbox
splitting.py    parts of a long text, with code blocks closed and opened again
configured.py   the channels that the settings enable
listening.py    runs the channels that connect to their service, for `perdure channels`
indicators.py   keeps the bot's typing indicator on while a turn runs
queries.py      the SQL for edits, deletions, known conversations and places
discord/        Discord
slack.py        Slack
telegram.py     Telegram
"""
