"""Tests of Discord and Slack: the real client libraries connect to imitations of the services on loopback."""
