"""Accepting messages: validated, rate-limited and stored. Called by the channels, the commands and imports."""
