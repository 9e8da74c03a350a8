"""An invented next release of perdure for tests of rolling upgrades. It adds one migration to the current ones."""

from __future__ import annotations

import shutil
from pathlib import Path

from alembic.config import Config
from sqlalchemy.engine import URL

from perdure.database.compatibility import revisions
from perdure.database.migrate import config
from tests.repository.source import ROOT

HEAD = revisions()[-1]


def next_release(url: str | URL, directory: Path, *, readable_from: str, revision: str = "next") -> Config:
    """The Alembic configuration of the next release, whose last migration is `revision`."""
    scripts = directory / revision
    shutil.copytree(ROOT / "alembic", scripts, ignore=shutil.ignore_patterns("__pycache__"))
    (scripts / "versions" / f"{revision}.py").write_text(
        f"""
from alembic import op
revision, down_revision, branch_labels, depends_on = {revision!r}, {HEAD!r}, None, None
readable_from = {readable_from!r}

def upgrade():
    op.execute("ALTER TABLE users ADD COLUMN nickname text")

def downgrade():
    op.execute("ALTER TABLE users DROP COLUMN nickname")
"""
    )
    made = config(url)
    made.set_main_option("script_location", str(scripts))
    return made
