"""Erasure and export of a user's data, the list of the tables with users' data, and a user's linked identities.

Called by routes and commands. The sweeper runs the second pass of an erasure.
"""
