"""A worker's consumer: its limits, its pauses, and its handling of messages that it cannot process."""
