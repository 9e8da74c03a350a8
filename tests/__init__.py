"""The tests: real servers, real processes, a clock that tests move."""
