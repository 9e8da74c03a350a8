"""Discord and Slack, with the real libraries over loopback."""
