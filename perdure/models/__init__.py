"""Models: the protocol that the step loop speaks, and the providers behind it."""
