"""Tool calls: the ledger of intents and results, and approvals."""
