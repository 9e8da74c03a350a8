"""Chat services: each is one file against the channel protocol, and all share the rest.

protocol.py     what a channel is: the events that it reports, the places that replies go to
ingress.py      turns events into accepted messages, decisions and commands
buttons.py      tokens of approval buttons: bound to the call, the chat and the person
replies.py      sends the replies of settled turns and the requests for approval, for the outbox
splitting.py    parts of a long text, with code blocks closed and opened again
configured.py   the channels that the settings switch on
listening.py    runs the channels that connect to their service, for `perdure channels`
indicators.py   keeps the bot's typing indicator on while a turn runs
queries.py      the statements of edits, deletions, known conversations and places
discord/        Discord
slack.py        Slack
telegram.py     Telegram
"""
