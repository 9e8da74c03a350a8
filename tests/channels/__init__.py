"""Tests of the channels: the HTTP gateway, callbacks, chat services and the command line."""
