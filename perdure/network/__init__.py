"""Outgoing requests to addresses that others name: what may be reached, DNS, signatures."""
