"""The memory sections of a prompt, each within its token budget. Called once a turn, by `turns.prompt`."""
