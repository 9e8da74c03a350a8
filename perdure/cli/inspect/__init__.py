"""Commands that show and change stored things: turns, sessions, memory, cases, schedules, breakers."""
