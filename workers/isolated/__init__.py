"""Turns that run in a child process of their own."""
