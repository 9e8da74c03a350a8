"""Where `celery -A workers worker|beat|inspect|flower` finds the application."""

from __future__ import annotations

from perdure.settings import Settings
from schedules.beat import give_to_beat
from workers import beating
from workers import control as _control  # noqa: F401 (`celery inspect` knows a command once it is imported)
from workers.application import make_app
from workers.assembly import addresses
from workers.lifecycle import follow

_settings = Settings.load()
_addresses = addresses(_settings)
app = make_app(_settings, _addresses)
follow(app, _settings, _addresses)
beating.follow(_settings.shutdown, _addresses.database_url)
give_to_beat(app, _settings)
