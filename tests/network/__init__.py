"""Tests of the network: permitted addresses and queues, and TLS."""
