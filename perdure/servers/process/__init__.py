"""The processes of the embedded servers: their accounts, programs, locks, sockets and launch."""
