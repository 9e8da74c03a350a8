"""The recall benchmark reads data sets in LoCoMo's layout, including the irregularities of LoCoMo's own file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import recall
from perdure.database.engine import Database
from tests.memory.locomo import locomo


def test_irregular_evidence_is_read(database: Database) -> None:
    """The benchmark reads each form of evidence. It skips questions whose evidence names no existing line."""
    samples = locomo(samples=2, sessions=3, lines=10)
    section = recall.evaluate(database.url, samples, "hash:64", [1, 5, 20], "made.json")
    numbers = {row[0]: int(row[1]) for row in section.rows}
    assert numbers == {"multi-hop": 6, "temporal": 2, "single-hop": 12, "adversarial": 2, "all": 22}
    figures = section.figures
    assert figures["single-hop any@1"] == 1.0, "each has a number that no other line has"
    assert figures["multi-hop any@5"] == figures["multi-hop all@20"] == 1.0
    assert figures["multi-hop all@1"] == 0.0, "one result cannot contain two lines"
    for name in numbers:
        for fewer, more in ((1, 5), (5, 20)):
            assert figures[f"{name} any@{fewer}"] <= figures[f"{name} any@{more}"]
            assert figures[f"{name} all@{fewer}"] <= figures[f"{name} all@{more}"]
            assert figures[f"{name} all@{more}"] <= figures[f"{name} any@{more}"]
        assert (
            figures[f"{name} all@20"] <= figures[f"{name} all in 4096 tokens"] <= figures[f"{name} any in 4096 tokens"]
        )
    assert 0 < figures["p50_ms"] <= figures["p95_ms"] <= figures["p99_ms"]


def test_long_messages_do_not_fit_the_tokens(database: Database) -> None:
    """Of messages with 3,000 tokens each, only the first one found fits."""
    samples = locomo(samples=1, sessions=2, lines=10)
    for sample in samples:
        for key in ("session_1", "session_2"):
            for line in sample["conversation"][key]:
                line["text"] += " and so on" * 900
    figures = recall.evaluate(database.url, samples, "hash:64", [1, 20], "made.json").figures
    assert figures["multi-hop all in 4096 tokens"] == figures["multi-hop all@1"] == 0.0
    assert figures["multi-hop any in 4096 tokens"] == figures["multi-hop all@20"] == 1.0


def test_lines_have_the_speaker_the_caption_and_the_time() -> None:
    """`lines_of` returns lines in chronological order, with their speakers and the captions of their pictures."""
    [sample] = locomo(samples=1, sessions=2, lines=10)
    lines = recall.lines_of(sample)
    assert [line["message_id"] for line in lines] == [f"D{session}:{n}" for session in (1, 2) for n in range(1, 11)]
    assert lines[0]["content"] == "[a picture: a dog on a beach]"
    assert {line["author"] for line in lines} == {sample["conversation"][key] for key in ("speaker_a", "speaker_b")}
    assert [line["occurred_at"] for line in lines] == sorted(line["occurred_at"] for line in lines)


@pytest.mark.parametrize("content", ["{", "[1]", '[{"sample_id": "a"}]', '[{"conversation": {"session_1": []}}]', "7"])
def test_a_malformed_file_is_reported(
    content: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The benchmark reports a malformed data set before it starts any server."""
    path = tmp_path / "set.json"
    path.write_text(content)
    monkeypatch.setattr("sys.argv", ["recall", str(path)])
    assert recall.main() == 1
    assert "is not a data set in LoCoMo's layout" in capsys.readouterr().err


@pytest.mark.parametrize(
    "file", [recall.SHIPPED, recall.SHIPPED.with_name("conversations.json")], ids=lambda file: file.stem
)
def test_a_shipped_set_is_valid(file: Path) -> None:
    """Every question of a bundled data set has evidence, which names existing lines."""
    for sample in json.loads(file.read_text(encoding="utf-8")):
        there = {line["message_id"] for line in recall.lines_of(sample)}
        assert all(set() < recall.evidence_of(question) <= there for question in sample["qa"])
