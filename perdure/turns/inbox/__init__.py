"""Accepting messages: validated, rate-limited and stored. Called by the channels, the commands and imports.

accept.py            accepts a message
incoming.py          parses and validates a message
rate_limit.py        limits the messages that one user may send
route_unrouted.py    makes turns of messages that applications inserted in their own transactions
fire_schedules.py    makes messages of the due slots of users' schedules
"""
