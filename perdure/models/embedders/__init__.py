"""Embedders: texts in, vectors out, so that what is alike in meaning can be found by being near."""
