"""The web chat in a real browser, over real processes."""
