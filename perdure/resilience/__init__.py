"""Calls that fail well: a breaker around retries around the call, and then somebody else's answer."""
