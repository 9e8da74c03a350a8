"""The channel `discord`.

channel.py   the channel: Discord's gateway, its interactions by webhook, replies
rest.py      hikari's REST client for callers that are not asynchronous
history.py   the messages that were sent while no process listened
"""
