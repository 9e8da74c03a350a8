"""Processes of embedded servers: their account, their programs, locks, sockets, and how they are started."""
