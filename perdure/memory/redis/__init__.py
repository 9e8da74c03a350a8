"""Memory in Redis: the event stream and working memory. Losing it loses no message.

Called when a turn settles, when a session ends and when a worker shuts down.
"""
