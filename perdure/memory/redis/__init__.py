"""The layers of memory in Redis: the stream and working memory. Losing them loses no message."""
