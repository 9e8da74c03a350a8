"""The shutdown of workers and beat, the drain of all workers, and the exit of a process that cannot start."""
