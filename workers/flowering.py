"""Flower's own settings: `FLOWER_*` variables, `flowerconfig.py` and options of its command.

Flower reads them itself. Its pages show tasks with their arguments and can shut workers down, so without
authentication they stay on loopback, however Flower is started.
"""

from __future__ import annotations

import ipaddress
import os
from pathlib import Path
from typing import Any

import click
from celery import Celery
from celery.signals import import_modules

from perdure.errors import SettingsError
from workers.exiting import exit_unless_startable

LOOPBACK = "127.0.0.1"
_PREFIX = "FLOWER_"


def command() -> str | None:
    """The subcommand of `celery` that this process runs; None if it is another program."""
    context = click.get_current_context(silent=True)
    while context is not None and context.parent is not None:
        context = context.parent
    return None if context is None else context.invoked_subcommand


def check_environment() -> None:
    """Check each `FLOWER_*` variable that Flower knows, as Flower reads it. An empty one counts as unset.

    Raises:
        SettingsError: a value is wrong; the message names the variable, the value and what is accepted.
    """
    from flower.options import default_options  # noqa: PLC0415 (of use to Flower alone)
    from flower.utils import strtobool  # noqa: PLC0415 (the same)

    for variable in [name for name in os.environ if name.startswith(_PREFIX)]:
        value, name = os.environ[variable], variable.removeprefix(_PREFIX).lower()
        if not value:
            del os.environ[variable]
        elif name in default_options:
            option = default_options._options[default_options._normalize_name(name)]  # noqa: SLF001 (as Flower does)
            convert = strtobool if option.type is bool else option.type
            for part in value.split(",") if option.multiple else [value]:
                _check(variable, value, option.type.__name__, lambda part=part, convert=convert: convert(part))
    conf = os.environ.get(f"{_PREFIX}CONF")
    if conf is not None and not Path(conf).is_file():
        raise SettingsError(f"{_PREFIX}CONF is {conf!r}: accepted: the path of a file in Python")


def follow(app: Celery) -> None:
    """Apply `_stay_on_loopback` to a Flower that runs with `app`.

    Flower imports the application's tasks after it has read all its options and before it listens.
    """
    import_modules.connect(_stay_on_loopback, sender=app, weak=False)


def _stay_on_loopback(**_: Any) -> None:
    """Bind loopback where no address is given; exit with status 2 where another one is, without authentication."""
    if command() != "flower":
        return
    from flower.options import options  # noqa: PLC0415 (of use to Flower alone)

    if options.unix_socket or _authenticates(options):
        return
    if not options.address:
        options.address = LOOPBACK
    with exit_unless_startable():
        if not is_loopback(options.address):
            raise SettingsError(
                f"FLOWER_BASIC_AUTH is not set and the address to bind is {options.address!r}: set FLOWER_BASIC_AUTH "
                "to USER:PASSWORD (or Flower's other authentication, FLOWER_AUTH), or bind 127.0.0.1"
            )


def is_loopback(host: str) -> bool:
    """Whether `host` is an address of this machine that no other one reaches."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _authenticates(options: Any) -> bool:
    """Whether Flower asks for credentials. Any of the pairs opens it, so one without a password counts as none."""
    if options.basic_auth:
        return all(pair.partition(":")[2] for pair in options.basic_auth)
    return bool(options.auth)


def _check(variable: str, value: str, accepted: str, convert: Any) -> None:
    try:
        convert()
    except (ValueError, TypeError) as error:
        raise SettingsError(f"{variable} is {value!r}: {error}; accepted: {accepted}") from None
