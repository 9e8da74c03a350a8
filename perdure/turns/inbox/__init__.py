"""Accepting messages: validated, rate-limited and stored. Called by the channels, the commands and imports.

accept.py            accepts a message; incoming.py: what a message is; rate_limit.py
route_unrouted.py    makes turns of messages that applications inserted in their own transactions
fire_schedules.py    makes messages of the due slots of users' schedules
"""
