"""Channels: how messages come in and replies go out."""
