"""The operator's console: pages at `/console` for the holder of an admin key.

access.py    signs in with an admin key, and verifies the session and its CSRF token
routes.py    the page, its files, the session, and under `/console/v1` the routes of the HTTP API

The page is in `perdure/channels/http/pages/static/console`. It uses the same routes as a program with an admin key,
under `/console/v1` instead of `/v1`: there a session takes the place of the key.
"""
