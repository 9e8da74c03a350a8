"""Checks Flower's own settings, and makes Flower require a password.

Flower itself reads these settings: `FLOWER_*` variables, `flowerconfig.py` and options of its command. Its pages can
shut workers down, so this module makes it require a password unless `PERDURE_FLOWER__AUTH` is `none`. If the operator
configures no password, a Flower on loopback requires a generated one, which is stored under the data directory.
`perdure.workers.flower.guard` restricts the host names.
"""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Sequence
from contextvars import ContextVar
from functools import partial
from pathlib import Path
from typing import Any

import click
from celery import Celery
from celery.signals import import_modules

from perdure.access.generated_secrets import made_once
from perdure.errors import SettingsError
from perdure.settings import FlowerAuth, Settings
from perdure.workers.flower.guard import guard, is_loopback
from perdure.workers.shutdown.start_failure import exit_unless_startable

log = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"
USER = "perdure"
"""The user name for the generated password."""

_PASSWORD_FILE = "flower.password"  # noqa: S105 (a file's name)
_LETTERS = "abcdefghijkmnpqrstuvwxyz23456789"
_PREFIX = "FLOWER_"
_LAST_PORT = 65_535


STARTED: ContextVar[str | None] = ContextVar("STARTED", default=None)
"""The Celery subcommand that the `perdure` CLI runs; `None` under the program `celery`.

Until the subcommand starts, the function `command` cannot find it: `command` reads Click's contexts, and typer has
contexts of its own.
"""


def command() -> str | None:
    """The subcommand of `celery` that this process runs; `None` in a program other than `celery`."""
    context = click.get_current_context(silent=True)
    while context is not None and context.parent is not None:
        context = context.parent
    return None if context is None else context.invoked_subcommand


def check_environment() -> None:
    """Check each `FLOWER_*` variable that Flower reads. Removes empty variables from the environment.

    Raises:
        SettingsError: a value is invalid. The message names the variable, the value and the accepted values.
    """
    from flower.options import default_options  # noqa: PLC0415 (only Flower needs it)
    from flower.utils import strtobool  # noqa: PLC0415 (as above)

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
    """Check that a Flower bound to `address` requires credentials. Does nothing if a configuration file exists.

    Raises:
        SettingsError: `address` is not loopback, and the `FLOWER_*` variables have no credentials.
    """
    if config_file() is None:
        pairs = os.environ.get(f"{_PREFIX}BASIC_AUTH", "")
        _check_address(address, pairs.split(",") if pairs else [], os.environ.get(f"{_PREFIX}AUTH", ""))


def follow(app: Celery, settings: Settings) -> None:
    """If Flower runs with `app`, make it require credentials, and guard its host names.

    The credentials are set when Flower imports the tasks of `app`: after it has read its options, before it listens.
    """
    import_modules.connect(partial(_require, settings), sender=app, weak=False)
    if command() == "flower":  # else `perdure flower` calls `guard` itself
        guard(settings.flower.hosts)


def config_file() -> Path | None:
    """The Python file from which Flower reads options in addition to the variables; `None` if no such file exists."""
    path = Path(os.environ.get(f"{_PREFIX}CONF", "flowerconfig.py"))
    return path if path.is_file() else None


def own_credentials(settings: Settings) -> tuple[str, str] | None:
    """The user and the generated password; `None` if a variable configures authentication, or a setting disables it."""
    configured = os.environ.get(f"{_PREFIX}BASIC_AUTH") or os.environ.get(f"{_PREFIX}AUTH")
    if configured or settings.flower.auth is FlowerAuth.NONE:
        return None
    return USER, _generated(settings)


def _require(settings: Settings, **_: Any) -> None:
    """If no credentials are configured, make Flower require the generated password and bind loopback.

    A configured address is kept. If `PERDURE_FLOWER__AUTH` is `none`, no password is set.

    Exits with status 2 if the configured address is not loopback and no credentials are configured. Also exits with
    status 2 if a configured user has no password.
    """
    if command() != "flower":
        return
    # Flower warns of each inspection that no worker answers, so of four whenever it starts before the workers.
    logging.getLogger("flower.inspector").setLevel(logging.ERROR)
    from flower.options import options  # noqa: PLC0415 (only Flower needs it)

    own = _authenticates(options.basic_auth, options.auth)
    with exit_unless_startable():
        if not options.unix_socket:
            if not options.address and not own:
                options.address = LOOPBACK
            _check_address(options.address, options.basic_auth, options.auth)
        if options.basic_auth and not own:
            raise SettingsError("FLOWER_BASIC_AUTH has a user without a password; accepted: USER:PASSWORD,...")
        if not own and settings.flower.auth is FlowerAuth.PASSWORD:
            options.basic_auth = [f"{USER}:{_generated(settings)}"]
            log.info("Flower requires the user %s and the password in %s", USER, settings.data_dir / _PASSWORD_FILE)


def _generated(settings: Settings) -> str:
    return made_once(settings.data_dir / _PASSWORD_FILE, _password, f"{_PREFIX}BASIC_AUTH")


def _password() -> str:
    """A password of about a hundred random bits, in five groups of four characters."""
    return "-".join("".join(secrets.choice(_LETTERS) for _ in range(4)) for _ in range(5))


def _check_address(address: str, basic_auth: Sequence[str], auth: str) -> None:
    if not is_loopback(address) and not _authenticates(basic_auth, auth):
        raise SettingsError(
            f"FLOWER_BASIC_AUTH is not set to USER:PASSWORD and the address to bind is {address!r}: set "
            f"FLOWER_BASIC_AUTH (or Flower's other authentication, FLOWER_AUTH), or bind {LOOPBACK}"
        )


def _authenticates(basic_auth: Sequence[str], auth: str) -> bool:
    """Whether the options require credentials. Each user in `basic_auth` can log in, so each needs a password."""
    if basic_auth:
        return all(pair.partition(":")[2] for pair in basic_auth)
    return bool(auth)


def _check(variable: str, value: str, accepted: str, convert: Any) -> None:
    try:
        convert()
    except (ValueError, TypeError) as error:
        raise SettingsError(f"{variable} is {value!r}: {error}; accepted: {accepted}") from None
