"""Messages accepted for sessions: parsed, rate-limited and stored; a restored snapshot's messages, too.

Called by the channels and the commands.
"""
