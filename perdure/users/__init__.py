"""A user's data as a whole: erasing it, exporting it, and the list of tables that hold it."""
