"""A worker's side of the broker: what it consumes, when it pauses, and messages that it cannot run."""
