"""Accepting messages: parsing, rate limits, and the row that makes a message accepted.

Called by the channels and the commands.
"""
