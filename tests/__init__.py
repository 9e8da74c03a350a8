"""The tests use real servers, real processes, and a clock that a test can advance."""
