"""Options that several commands of this package share."""

from __future__ import annotations

from typing import Annotated

import typer

LOOPBACK = "127.0.0.1"

Host = Annotated[str, typer.Option(help="Address to listen on; any but loopback needs PERDURE_API_KEYS.")]
Port = Annotated[int, typer.Option(min=1, max=65535, help="Port of the gateway.")]
