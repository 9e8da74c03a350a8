"""Sessions: the conversation that turns belong to, its states, and how it is found."""
