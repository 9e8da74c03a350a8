"""The channel `discord`.

channel.py   the channel: events of Discord's gateway, interactions, replies
rest.py      hikari's REST client for callers that are not asynchronous
history.py   the messages that were sent while no process listened
"""
