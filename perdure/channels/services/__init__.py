"""Chat services: each service implements the channel protocol in one module or package.

The other modules serve all services.

protocol.py     the channel protocol: the events and methods of a channel
ingress.py      handles events: messages, commands and pressed approval buttons
buttons.py      tokens of approval buttons, each valid for one call, chat and person
replies.py      sends replies and approval requests from the outbox
quotations.py   quotes the messages that a message replies to or forwards
splitting.py    splits a long text into several messages
configured.py   the channels that the settings enable
listening.py    runs the channels that receive events without a webhook, for `perdure channels`
indicators.py   keeps the bot's typing indicator on while a turn runs, and reads the progress of its tools
notes.py        shows this progress in one message of the chat, which changes in place
queries.py      the SQL statements of these modules
discord/        Discord
slack.py        Slack
telegram.py     Telegram
"""
