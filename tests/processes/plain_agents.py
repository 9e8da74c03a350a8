"""An agent without tools, in a worker whose intervals are those of the product."""

from __future__ import annotations

from perdure import Agent

tester = Agent("tester", "You are under test.")
