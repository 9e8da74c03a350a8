"""Accepting messages: validation, rate limits, double-texting, and the row that makes a message durable."""
