"""The libraries that the web chat imports are those of their packages, unchanged, with all their licences."""

from __future__ import annotations

import hashlib
import json

from tests.programs import package
from tests.repository.source import ROOT, read

VENDORED = ROOT / "perdure" / "channels" / "http" / "pages" / "static" / "vendor"
FILE = "markdown-it.esm.min.mjs"
SHA256 = "d5432491790141da046b1197353705db03264f40b5727f3b4b591f5aba193e30"


def test_the_file_is_that_of_the_pinned_version() -> None:
    """Its SHA-256 changes only together with the version that `tests/javascript` pins."""
    content = (VENDORED / FILE).read_bytes()
    pinned = json.loads(read("tests/javascript/package.json"))["dependencies"]["markdown-it"]

    assert hashlib.sha256(content).hexdigest() == SHA256
    assert content.startswith(f"/*! markdown-it {pinned} ".encode())
    assert [path.name for path in sorted(VENDORED.iterdir())] == ["LICENSE.txt", FILE]


def test_the_file_is_that_of_the_package() -> None:
    """The package's file is vendored byte for byte."""
    assert (VENDORED / FILE).read_bytes() == (package("markdown-it") / "dist" / "browser" / FILE).read_bytes()


def test_each_library_in_the_file_has_its_licence() -> None:
    """The file contains the libraries that markdown-it depends on, but for that of its command line."""
    locked = json.loads(read("tests/javascript/package-lock.json"))["packages"]
    names = {"markdown-it", *locked["node_modules/markdown-it"]["dependencies"]} - {"argparse"}
    licences = (VENDORED / "LICENSE.txt").read_text(encoding="utf-8")

    for name in names:
        found = locked[f"node_modules/{name}"]
        assert f"{name} {found['version']} ({found['license']})" in licences
