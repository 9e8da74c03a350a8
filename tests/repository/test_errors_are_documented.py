"""docs/errors.md lists the codes of `perdure.errors` with their HTTP statuses and whether they are transient."""

from __future__ import annotations

import re
from collections import defaultdict
from http import HTTPStatus

from perdure.channels.http.errors import CODES
from perdure.channels.http.openai.errors import REWOUND, STOPPING
from perdure.errors import Abandoned, InvalidRequest, PerdureError
from tests.repository.source import ROOT, read
from tests.repository.test_settings_are_documented import KNOWN

PAGE = read("docs/errors.md")
REPEAT = {True: "yes", False: "no", None: "by cause"}
ROWS = re.findall(r"^\| `(\w+)` \| ([\d, ]+) \| ([a-z ]+) \| (.+) \| (.+) \|$", PAGE, re.MULTILINE)


def _tree() -> list[type[PerdureError]]:
    tree: list[type[PerdureError]] = [PerdureError]
    for error in tree:
        tree += error.__subclasses__()
    return [each for each in tree if each.__module__ == PerdureError.__module__ and each is not Abandoned]


def test_each_code_has_a_row_with_its_statuses() -> None:
    """Each code has a row with its statuses, so that a client's author need not read the source."""
    statuses = defaultdict(set)
    for status, codes in {**CODES, HTTPStatus.METHOD_NOT_ALLOWED: (InvalidRequest.code,)}.items():
        for code in codes:
            statuses[code].add(int(status))

    documented = {code: {int(each) for each in listed.split(", ")} for code, listed, *_ in ROWS}
    assert documented == statuses
    assert len(ROWS) == len(documented)


def test_the_table_says_which_codes_are_transient() -> None:
    """If several error classes share a code, the table shows whether the most general class is transient."""
    general = {each.code: REPEAT[each.transient] for each in reversed(_tree())}

    assert {code: repeat for code, _, repeat, *_ in ROWS} == general


def test_the_rows_are_in_the_order_of_their_statuses() -> None:
    """Rows are sorted by status, so that a reader who knows only the status finds its codes together."""
    first = [int(listed.partition(",")[0]) for _, listed, *_ in ROWS]

    assert first == sorted(first)


def test_the_codes_of_streams_are_listed() -> None:
    """docs/errors.md lists the error codes of streams, although no exception class has these codes."""
    assert re.findall(r"^\| `([a-z_]+)` \|", PAGE, re.MULTILINE) == [REWOUND, STOPPING]


def test_the_pages_settings_and_links_exist() -> None:
    """The settings and link targets that docs/errors.md names exist."""
    assert set(re.findall(r"PERDURE_[A-Z_]*[A-Z]", PAGE)) <= KNOWN.keys()
    for file, anchor in re.findall(r"\]\(([\w-]+\.md)(?:#([\w-]+))?\)", PAGE):
        text = (ROOT / "docs" / file).read_text(encoding="utf-8")
        anchors = {re.sub(r"[^\w -]", "", each).lower().replace(" ", "-") for each in _headings(text)}
        assert not anchor or anchor in anchors, f"{file}#{anchor}"


def _headings(text: str) -> list[str]:
    return re.findall(r"^#+ (.+)$", text, re.MULTILINE)
