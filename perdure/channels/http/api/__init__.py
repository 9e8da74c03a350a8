"""The routes of the HTTP API, one module per resource. `perdure.channels.http.app` includes them."""
