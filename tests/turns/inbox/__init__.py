"""Tests of the inbox: accepting, routing and limiting messages, and the schedules that send them."""
