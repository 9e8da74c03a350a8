"""The pruning plan: which cases go, which stay, which are duplicates. Reads; never writes."""
