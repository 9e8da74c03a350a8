"""Who runs a session: claiming, renewing, fencing, parking, and a user's share of the workers."""
