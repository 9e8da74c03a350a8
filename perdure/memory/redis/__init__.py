"""Memory in Redis: the event stream and working memory. If Redis loses its data, no message is lost.

Called when a prompt is assembled, a turn settles, a session ends, a channel reports typing, a user is exported or
erased, or a worker shuts down.

Reading or deleting raises `Unavailable` if Redis cannot be reached.
"""
