"""Outgoing requests to addresses that users or models supply: allowed destinations, DNS, signatures."""
