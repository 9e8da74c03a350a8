"""Limits of one gateway process.

throttle.py  limits requests with wrong keys, by address
shares.py    limits what one user, or one address, holds open, and the memory for responses
"""
