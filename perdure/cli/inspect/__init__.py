"""Commands that show and change stored data: turns, sessions, messages, memory, cases, schedules and others."""
