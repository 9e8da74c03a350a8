"""A user's data as a whole: erasure, export, and the list of tables that hold it.

Called by routes, commands and, for the second pass of an erasure, the sweeper.
"""
