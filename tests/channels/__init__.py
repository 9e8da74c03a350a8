"""Tests of the channels: the HTTP gateway over real requests, callbacks to a real receiver, the CLI."""
