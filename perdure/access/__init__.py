"""API keys, user tokens, tenants, and the secrets that an installation generates for itself."""
