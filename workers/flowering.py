"""Flower's own settings: `FLOWER_*` variables, `flowerconfig.py` and options of its command.

Flower reads them itself. Its pages show tasks with their arguments and can shut workers down, so without
authentication they stay on loopback, however Flower is started.
"""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
from celery import Celery
from celery.signals import import_modules

from perdure.errors import SettingsError
from workers.exiting import exit_unless_startable

LOOPBACK = "127.0.0.1"
_PREFIX = "FLOWER_"
_LAST_PORT = 65_535


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
    port = os.environ.get(f"{_PREFIX}PORT")
    if port is not None and not 1 <= int(port) <= _LAST_PORT:
        raise SettingsError(f"{_PREFIX}PORT is {port!r}: accepted: 1 to {_LAST_PORT}")
    conf = os.environ.get(f"{_PREFIX}CONF")
    if conf is not None and not Path(conf).is_file():
        raise SettingsError(f"{_PREFIX}CONF is {conf!r}: accepted: the path of a file in Python")


def require_authentication(address: str) -> None:
    """Check `address` before Flower starts, unless a configuration file may have the credentials.

    Raises:
        SettingsError: `address` is not loopback, and no variable has credentials.
    """
    if not Path(os.environ.get(f"{_PREFIX}CONF", "flowerconfig.py")).is_file():
        pairs = os.environ.get(f"{_PREFIX}BASIC_AUTH", "")
        _check_address(address, pairs.split(",") if pairs else [], os.environ.get(f"{_PREFIX}AUTH", ""))


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

    if options.unix_socket:
        return
    if not options.address and not _authenticates(options.basic_auth, options.auth):
        options.address = LOOPBACK
    with exit_unless_startable():
        _check_address(options.address, options.basic_auth, options.auth)


def _check_address(address: str, basic_auth: Sequence[str], auth: str) -> None:
    if not _is_loopback(address) and not _authenticates(basic_auth, auth):
        raise SettingsError(
            f"FLOWER_BASIC_AUTH is not set to USER:PASSWORD and the address to bind is {address!r}: set "
            f"FLOWER_BASIC_AUTH (or Flower's other authentication, FLOWER_AUTH), or bind {LOOPBACK}"
        )


def _authenticates(basic_auth: Sequence[str], auth: str) -> bool:
    """Whether Flower asks for credentials. Any of the pairs opens it, so one without a password counts as none."""
    if basic_auth:
        return all(pair.partition(":")[2] for pair in basic_auth)
    return bool(auth)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _check(variable: str, value: str, accepted: str, convert: Any) -> None:
    try:
        convert()
    except (ValueError, TypeError) as error:
        raise SettingsError(f"{variable} is {value!r}: {error}; accepted: {accepted}") from None
