"""Files of messages: images, PDFs, texts and others, each content stored once for each tenant.

A file is taken in before its message is accepted, or uploaded earlier. The commit that accepts the message refers to
it. A file that no message has is deleted after a day; a content that no file has is deleted with its last file.

parts.py      the parts of a message as senders give them, and the files of a message as they are stored and described
results.py    files that tools return
kinds.py      what a content is, as its first bytes show; refuses images and archives that would grow too large
spool.py      a content on its way in: counted, hashed, in a temporary file
fetching.py   a content from a URL of the public Internet
objects.py    contents in a directory or a bucket, through fsspec
store.py      `Files`: stores, uses, reads and deletes files
"""
