"""An invented next release of perdure for tests of upgrades. It adds one migration to the current ones."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

from alembic.config import Config
from sqlalchemy.engine import URL

from perdure.database import compatibility
from perdure.database.compatibility import revisions
from perdure.database.migrate import config
from tests.repository.source import ROOT

HEAD = revisions()[-1]

_NICKNAMES = (
    'op.execute("ALTER TABLE users ADD COLUMN nickname text")',
    'op.execute("ALTER TABLE users DROP COLUMN nickname")',
)


def next_release(
    url: str | URL,
    directory: Path,
    *,
    readable_from: str = HEAD,
    revision: str = "next",
    steps: tuple[str, str] = _NICKNAMES,
) -> Config:
    """The Alembic configuration of the next release, whose last migration is `revision`.

    `steps`: the statements of the migration's `upgrade` and `downgrade`.
    """
    scripts = directory / revision
    shutil.copytree(ROOT / "alembic", scripts, ignore=shutil.ignore_patterns("__pycache__"))
    (scripts / "versions" / f"{revision}.py").write_text(
        f"""
from alembic import op
revision, down_revision, branch_labels, depends_on = {revision!r}, {HEAD!r}, None, None
readable_from = {readable_from!r}

def upgrade():
    {steps[0]}

def downgrade():
    {steps[1]}
"""
    )
    made = config(url)
    made.set_main_option("script_location", str(scripts))
    return made


@contextmanager
def upgraded(release: Config) -> Iterator[None]:
    """In the block, this process is one of `release`: `migrate` and `require` use its migrations."""
    scripts = Path(str(release.get_main_option("script_location")))
    with patch.object(compatibility, "scripts", lambda: scripts):
        revisions.cache_clear()
        try:
            yield
        finally:
            revisions.cache_clear()
