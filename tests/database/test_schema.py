"""perdure's tables are in a PostgreSQL schema of their own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from sqlalchemy import Engine, text
from sqlalchemy.engine import URL

from perdure.casebank import search
from perdure.database.compatibility import require
from perdure.database.engine import Database, Statement
from perdure.database.migrate import migrate
from perdure.errors import IncompatibleDatabase
from tests.databases import Databases, engine_of

ODD = 'The "agents" of \\ café; '
"""A schema name that must be quoted in SQL and in the startup options of a connection."""

THEIRS = """
    CREATE TABLE alembic_version (version_num varchar(32) PRIMARY KEY);
    INSERT INTO alembic_version VALUES ('0012');
    CREATE TABLE users (id serial PRIMARY KEY, email text);
    INSERT INTO users (email) VALUES ('ana@example.com');
    CREATE TABLE sessions (session_id uuid PRIMARY KEY, state text);
    CREATE TABLE messages (id serial PRIMARY KEY, content text);
    CREATE FUNCTION perdure_now() RETURNS text LANGUAGE sql AS $$ SELECT 'theirs' $$;
"""

SHAPE = """
    SELECT 'column', c.relname, a.attname, format_type(a.atttypid, a.atttypmod), col_description(c.oid, a.attnum)
    FROM pg_class AS c JOIN pg_attribute AS a ON a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped
    WHERE c.relnamespace = to_regnamespace(:schema) AND c.relkind IN ('r', 'S', 'i')
    UNION ALL SELECT 'constraint', conrelid::regclass::text, conname, contype::text, NULL FROM pg_constraint
    WHERE connamespace = to_regnamespace(:schema)
    UNION ALL SELECT 'function', proname, prosrc, NULL, NULL FROM pg_proc WHERE pronamespace = to_regnamespace(:schema)
    ORDER BY 1, 2, 3, 4, 5
"""

ADD_USER = Statement("test.add_user", "INSERT INTO users (user_id, created_at) VALUES (%(user_id)s, perdure_now())")
USERS = Statement("test.users", "SELECT user_id FROM users ORDER BY 1", writes=False)


@pytest.fixture
def url(databases: Databases) -> Iterator[URL]:
    """The URL of an empty database, with the administrator's role: the tests install extensions and create roles."""
    with databases.empty(bare=True) as made:
        yield made


@pytest.fixture
def engine(url: URL) -> Iterator[Engine]:
    """An engine that connects as the database's owner."""
    made = engine_of(url, "public", isolation_level="AUTOCOMMIT")
    yield made
    made.dispose()


@pytest.fixture
def opened() -> Iterator[Any]:
    """A function that opens a `Database`. The fixture closes every opened `Database` after the test."""
    made: list[Database] = []

    def open_one(url: URL, **options: Any) -> Database:
        made.append(Database(url, **options))
        return made[-1]

    yield open_one
    for each in made:
        each.close()


def run(engine: Engine, sql: str, **parameters: Any) -> Any:
    """Run a statement as the database's owner. Returns its rows."""
    with engine.connect() as connection:
        result = connection.execute(text(sql), parameters)
        return [tuple(row) for row in result] if result.returns_rows else []


def shape(engine: Engine, schema: str) -> Any:
    """The columns, constraints and functions of a schema. The result does not contain the schema's name."""
    found = run(engine, SHAPE, schema=f'"{schema}"')
    return [(row[0], row[1].removeprefix(f"{schema}."), *row[2:]) for row in found]


@pytest.mark.long
def test_another_applications_tables_are_left_alone(url: URL, engine: Engine, opened: Any) -> None:
    """A migration does not change an application's own `users`, `sessions`, `messages` and `alembic_version`."""
    run(engine, THEIRS)
    before = shape(engine, "public")
    migrate(url)
    migrate(url)
    require(opened(url))
    assert [row for row in shape(engine, "public") if row in before] == before
    assert run(engine, "SELECT email FROM public.users") == [("ana@example.com",)]
    assert run(engine, "SELECT version_num FROM public.alembic_version") == [("0012",)]


@pytest.mark.parametrize("prepare", [True, False])
def test_statements_do_not_depend_on_the_roles_search_path(
    url: URL, engine: Engine, opened: Any, *, prepare: bool
) -> None:
    """Statements use perdure's tables even if the database's `search_path` names the application's schema."""
    run(engine, THEIRS)
    run(engine, f"ALTER DATABASE \"{url.database}\" SET search_path = 'public'")
    migrate(url)
    database = opened(url, prepare=prepare)
    database.run(ADD_USER, {"user_id": "ana"})
    assert [row.user_id for row in database.run(USERS, {})] == ["ana"]
    assert run(engine, "SELECT user_id FROM perdure.users") == [("ana",)]


@pytest.mark.long
@pytest.mark.parametrize("prepare", [True, False])
def test_a_name_that_needs_quoting(url: URL, engine: Engine, opened: Any, *, prepare: bool) -> None:
    """A schema name with quotation marks, spaces, backslashes and capitals reaches the server unchanged."""
    migrate(url, schema=ODD)
    database = opened(url, schema=ODD, prepare=prepare)
    require(database)
    database.run(ADD_USER, {"user_id": "ana"})
    assert search.build_indexes(database) == []
    database.define("ANALYZE @schema.users")
    assert run(engine, "SELECT nspname FROM pg_namespace WHERE nspname = :name", name=ODD) == [(ODD,)]


@pytest.mark.exhaustive
@pytest.mark.parametrize("prepare", [True, False])
def test_the_extension_in_a_schema_of_its_own(url: URL, engine: Engine, opened: Any, *, prepare: bool) -> None:
    """Vectors are stored, compared and indexed even if pgvector is installed in a schema of its own."""
    run(engine, 'CREATE SCHEMA "Shared extensions"')
    run(engine, 'CREATE EXTENSION vector SCHEMA "Shared extensions"')
    migrate(url)
    database = opened(url, prepare=prepare)
    run(
        engine,
        "INSERT INTO perdure.cases (case_id, query, response_text, query_vector, embedder, created_at) "
        "SELECT n, 'q', 'a', ('[1,' || n || ']')::\"Shared extensions\".vector, 'hash:2', now() "
        "FROM generate_series(1, 20) AS n",
    )
    assert [each.case_id for each in search.search(database, [1, 7], "hash:2", 1)] == ["7"]
    assert search.build_indexes(database, index_from=10) == ["cases_shared_nearest_2_idx"]
    assert [each.case_id for each in search.search(database, [1, 7], "hash:2", 1)] == ["7"]


@pytest.mark.exhaustive
def test_a_role_that_may_not_create_a_schema(url: URL, engine: Engine) -> None:
    """If the role may not create a schema, the error shows the statement that an administrator must run."""
    run(engine, "CREATE EXTENSION vector")
    run(engine, "DROP ROLE IF EXISTS plain_migrator")
    run(engine, "CREATE ROLE plain_migrator LOGIN")
    try:
        theirs = url.update_query_dict({"options": "-c role=plain_migrator"})
        with pytest.raises(IncompatibleDatabase) as caught:
            migrate(theirs)
        statement = 'CREATE SCHEMA "perdure" AUTHORIZATION "plain_migrator"'
        assert f"`{statement}`" in caught.value.message
        run(engine, statement)
        migrate(theirs)
        assert run(engine, "SELECT tableowner FROM pg_tables WHERE schemaname = 'perdure' AND tablename = 'users'") == [
            ("plain_migrator",)
        ]
    finally:
        run(engine, "DROP OWNED BY plain_migrator CASCADE")
        run(engine, "DROP ROLE plain_migrator")


@pytest.mark.parametrize("lacking", ["CREATE on the schema", "the extension"])
def test_a_role_that_lacks_a_right(url: URL, engine: Engine, lacking: str) -> None:
    """If the role lacks a right, the error names the rights that the migration needs."""
    run(engine, "DROP ROLE IF EXISTS poor_migrator")
    run(engine, "CREATE ROLE poor_migrator LOGIN")
    try:
        if lacking == "the extension":
            run(engine, "CREATE SCHEMA perdure AUTHORIZATION poor_migrator")
        else:
            run(engine, "CREATE EXTENSION vector")
            run(engine, "CREATE SCHEMA perdure")
            run(engine, "GRANT USAGE ON SCHEMA perdure TO poor_migrator")
        with pytest.raises(IncompatibleDatabase, match=r"lacks a right: .*permission denied.*CREATE EXTENSION vector"):
            migrate(url.update_query_dict({"options": "-c role=poor_migrator"}))
    finally:
        run(engine, "DROP OWNED BY poor_migrator CASCADE")
        run(engine, "DROP ROLE poor_migrator")


@pytest.mark.long
def test_two_installations_do_not_share_locks(url: URL, opened: Any) -> None:
    """Two installations in one database have separate locks, so each can listen to its own chat services."""
    for schema in ("perdure", "staging"):
        migrate(url, schema=schema)
    first, second = opened(url), opened(url, schema="staging")
    with first.lock("channel") as mine, second.lock("channel") as theirs:
        assert (mine, theirs) == (True, True)
        with opened(url).lock("channel") as again:
            assert not again


@pytest.mark.long
@pytest.mark.parametrize("prepare", [True, False])
def test_a_search_path_in_the_url_has_no_effect(url: URL, opened: Any, *, prepare: bool) -> None:
    """A `search_path` in the database URL has no effect on perdure's statements."""
    migrate(url)
    require(opened(url.update_query_dict({"options": "-c search_path=public"}), prepare=prepare))


def test_a_schema_with_another_applications_tables_is_refused(url: URL, engine: Engine) -> None:
    """A schema that contains another application's tables is refused.

    The error names one of these tables and the setting `PERDURE_DATABASE_SCHEMA`.
    """
    run(engine, "CREATE TABLE public.users (id int)")
    with pytest.raises(IncompatibleDatabase, match=r"'public' .* has a table 'users' that is not perdure's: set PERD"):
        migrate(url, schema="public")
