"""The system message of a turn: the agent's instructions, recalled memories and cases. Called by the step loop."""
