"""Failing calls: a breaker around retries around the call, and then other models' answers."""
