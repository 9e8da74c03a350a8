"""Warm shutdown: its phases, their time limits, and the standby of a drained fleet."""
