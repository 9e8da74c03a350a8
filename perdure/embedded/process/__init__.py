"""Processes of embedded servers: their accounts, programs, locks and sockets, and how they are launched."""
