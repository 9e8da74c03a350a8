"""Each migration declares the oldest release that can use its tables. Rolling upgrades rely on this declaration."""

from __future__ import annotations

from pathlib import Path

from alembic.script import ScriptDirectory

from perdure.database.compatibility import revisions, scripts


def test_each_migration_declares_the_oldest_release_that_can_use_the_tables() -> None:
    """A migration's `readable_from` is not newer than the migration.

    Nor is it older than the previous migration's `readable_from`.
    """
    walked = list(ScriptDirectory(str(scripts())).walk_revisions())[::-1]
    names = [each.revision for each in walked]
    declared = {each.revision: str(getattr(each.module, "readable_from", None)) for each in walked}
    assert [name for name in names if declared[name] not in names[: names.index(name) + 1]] == []
    ages = [names.index(declared[name]) for name in names]
    assert ages == sorted(ages)


def test_files_are_named_by_their_revisions() -> None:
    """A process that checks the schema reads the revisions from the names of the files. It does not import Alembic."""
    walked = ScriptDirectory(str(scripts())).walk_revisions()
    assert list(revisions()) == [each.revision for each in walked][::-1]


def test_a_new_migration_declares_itself() -> None:
    """By default, a new migration declares that releases without this migration cannot use the schema."""
    assert "readable_from = ${repr(up_revision)}" in Path(scripts(), "script.py.mako").read_text(encoding="utf-8")
