"""Commands that show and change stored data: turns, sessions, memory, cases, schedules, breakers."""
