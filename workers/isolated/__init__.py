"""Turns that run in a child process."""
