"""Creates the channels that the settings enable. A channel's library is imported only if the channel is enabled."""

from __future__ import annotations

from pydantic import SecretStr

from perdure.channels.services.protocol import Channel
from perdure.clock import Clock
from perdure.errors import SettingsError
from perdure.settings import Settings


def names(settings: Settings) -> list[str]:
    tokens = {
        "discord": settings.discord.token,
        "slack": settings.slack.token,
        "telegram": settings.telegram.token,
    }
    return [name for name, token in tokens.items() if token is not None]


def listens(settings: Settings) -> bool:
    return (
        settings.discord.token is not None
        or (settings.slack.token is not None and settings.slack.app_token is not None)
        or (settings.telegram.token is not None and settings.telegram.webhook_secret is None)
    )


def channels(settings: Settings, clock: Clock) -> dict[str, Channel]:
    """Create the configured channels, keyed by name. The caller connects and closes them.

    Raises:
        SettingsError: a setting is malformed, or a channel's library is not installed.
    """
    made: dict[str, Channel] = {}
    for name in names(settings):
        try:
            made[name] = _MAKERS[name](settings, clock)
        except ImportError as error:
            raise SettingsError(
                f"PERDURE_{name.upper()}__TOKEN is set, but the channel's library is missing ({error.name}): "
                f"install perdure[{name}]"
            ) from error
    return made


def _discord(settings: Settings, clock: Clock) -> Channel:
    from perdure.channels.services.discord.channel import Discord  # noqa: PLC0415 (an extra)

    given = settings.discord
    return Discord(str(_plain(given.token)), given.public_key, given.api_url, clock)


def _slack(settings: Settings, clock: Clock) -> Channel:
    from perdure.channels.services.slack import Slack  # noqa: PLC0415 (an extra)

    given = settings.slack
    app_token, secret = _plain(given.app_token), _plain(given.signing_secret)
    return Slack(str(_plain(given.token)), secret, app_token, given.api_url, clock)


def _telegram(settings: Settings, clock: Clock) -> Channel:  # noqa: ARG001 (Telegram's requests have no timestamp)
    from perdure.channels.services.telegram import Telegram  # noqa: PLC0415 (an extra)

    given = settings.telegram
    return Telegram(str(_plain(given.token)), _plain(given.webhook_secret), given.api_url)


_MAKERS = {"discord": _discord, "slack": _slack, "telegram": _telegram}


def _plain(secret: SecretStr | None) -> str | None:
    return None if secret is None else secret.get_secret_value()
