"""The sections of a prompt that memory fills, each within its budget of tokens."""
