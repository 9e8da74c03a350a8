"""Processes of embedded servers: their account, their programs, locks, sockets, and their start."""
