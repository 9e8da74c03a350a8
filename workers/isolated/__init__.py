"""Runs turns in child processes, so that a crash harms no other turn."""
