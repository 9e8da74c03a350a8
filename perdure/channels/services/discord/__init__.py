"""The channel `discord`.

channel.py   the channel: events of Discord's gateway, interactions, replies
rest.py      hikari's REST client for synchronous callers
history.py   reads the messages that were sent while no process listened
"""
