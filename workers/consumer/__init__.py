"""A worker's consumer: what it consumes, when it pauses, and messages that it cannot run."""
