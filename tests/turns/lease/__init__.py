"""Tests of the lease: who claims a session, how long a claim lasts, and how it is shared, renewed and lost."""
