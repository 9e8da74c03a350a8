"""API keys, tenants, and the secrets that an installation generates for itself."""
