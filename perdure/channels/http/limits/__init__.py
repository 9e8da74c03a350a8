"""Limits of one gateway process.

throttle.py  limits requests with wrong keys, by address
reading.py   limits how long the gateway waits for a client that does not read
shares.py    limits what one user, or one address, holds open, and the memory for responses
"""
