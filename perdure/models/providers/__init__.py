"""Model providers over their SDKs: wire formats, connections, errors."""
