"""Accepting messages: validation, rate limits and storage.

Called by the channels, the command line, the gateway, and imports of snapshots.

accept.py            accepts a message
incoming.py          parses and validates a message
rate_limit.py        limits the messages that one user may send
route_unrouted.py    creates turns for messages that applications inserted in their own transactions
fire_schedules.py    sends a message whenever a user's schedule is due
"""
