"""Outgoing requests and replies: the URLs and queues that are allowed, DNS look-ups, and webhook signatures."""
