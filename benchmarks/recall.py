"""The share of the known evidence that recall finds for questions about conversations.

    python -m benchmarks.recall [FILE] [--embedder NAME] [--reranker NAME] [--k 5,10,20] [--json]
    make bench ARGS="--only recall"                                the bundled data set

FILE is a data set in the layout of LoCoMo (Maharana et al., 2024): a list of samples. A sample has these members:

- `sample_id`.
- `conversation`: for each session N, `session_N_date_time` and the list `session_N`. An item of the list is a line of
  the conversation, with `speaker`, `dia_id`, `text` and optionally `blip_caption`.
- `qa`: a list of questions with `question`, `evidence` and `category`.

The default is a data set of six long conversations with 300 questions, written for this project. The weights of recall
(`perdure.memory.recall.search`) are fitted on it. A smaller and easier set is in
`benchmarks/data/conversations.json`.

Each sample becomes a user. The benchmark imports the sample's messages as `perdure messages import` does. For each
question of the sample, the benchmark then runs the recall that agents use. For this recall, the current time is the
time of the sample's last message.

`any@k` is the share of questions for which the first k messages found contain some of the evidence. `all@k` is the
share of questions for which the first k messages found contain all of the evidence. `any` and `all` "in 4,096 tokens"
are the same for as many messages as have so many tokens in sum, at most 100, by perdure's own estimate: what a prompt
can hold.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from itertools import accumulate
from pathlib import Path
from typing import Any

from sqlalchemy.engine import URL

from benchmarks.report import Section, console
from benchmarks.setup import Setup
from perdure.access.tenants import UserKey
from perdure.clock import MovedClock, SystemClock
from perdure.database.engine import Database
from perdure.database.migrate import migrate
from perdure.memory.embedding import embed_sessions
from perdure.memory.import_export import import_messages
from perdure.memory.recall.reranking import resolve_reranker
from perdure.memory.recall.search import MAX_K, Layer, Recall, Recalled
from perdure.models.embedders.protocol import Embedder
from perdure.models.embedders.resolve import resolve
from perdure.models.resolve import Models
from perdure.servers.throwaway import servers
from perdure.settings import Settings
from perdure.text.tokens import estimate_tokens

NAME = "recall"

SHIPPED = Path(__file__).parent / "data" / "long_conversations.json"

_CATEGORIES = {1: "multi-hop", 2: "temporal", 3: "open-domain", 4: "single-hop", 5: "adversarial"}
_DATE_FORMATS = ("%I:%M %p on %d %B, %Y", "%Y-%m-%dT%H:%M:%S", "%Y-%m-%d %H:%M", "%Y-%m-%d")
_BETWEEN_LINES = timedelta(seconds=20)
_IDS = re.compile(r"D0*(\d+):0*(\d+)")
_EMBEDDER = "hash:384"
_KS = (5, 10, 20)
_TOKENS = 4_096


@dataclass(frozen=True, slots=True)
class Answered:
    """One question: its category, the ids of its evidence, the ids that recall found, and the milliseconds.

    The evidence is the messages that answer the question. The found ids are in order, best first. `fitting` are those
    that fit `_TOKENS` tokens, of a search for more messages, whose time does not count.
    """

    category: int
    evidence: frozenset[str]
    found: Sequence[str]
    ms: float
    fitting: frozenset[str]

    def any(self, k: int) -> bool:
        """Whether the first `k` messages found contain some of the evidence."""
        return not self.evidence.isdisjoint(self.found[:k])

    def all(self, k: int) -> bool:
        """Whether the first `k` messages found contain all of the evidence."""
        return self.evidence <= set(self.found[:k])

    @property
    def any_fits(self) -> bool:
        return not self.evidence.isdisjoint(self.fitting)

    @property
    def all_fit(self) -> bool:
        return self.evidence <= self.fitting


def measure(setup: Setup) -> Section:
    """Measure recall on the bundled data set with the built-in embedder; returns the section."""
    setup.progress("recall: importing conversations and searching for questions about them")
    samples = json.loads(SHIPPED.read_text(encoding="utf-8"))
    with setup.database("bench_recall") as url:
        return evaluate(url, samples, _EMBEDDER, _KS, SHIPPED.name)


def main() -> int:
    """Evaluate the file and print the result; returns the exit status, 1 if the file cannot be read or parsed."""
    given = _arguments()
    try:
        samples = json.loads(given.file.read_text(encoding="utf-8"))
        for sample in samples:
            lines_of(sample)
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        print(f"{given.file} is not a data set in LoCoMo's layout: {type(error).__name__}: {error}", file=sys.stderr)
        return 1
    with servers() as running:
        migrate(running.postgres.url)
        section = evaluate(
            running.postgres.url, samples, given.embedder, given.k, given.file.name, reranker=given.reranker
        )
    if given.json:
        print(json.dumps(section.document(), indent=2))
    else:
        section.show(console())
    return 0


def evaluate(
    url: str | URL,
    samples: Sequence[Mapping[str, Any]],
    embedder_name: str,
    ks: Sequence[int],
    file: str,
    *,
    reranker: str = "none",
) -> Section:
    """Import the conversations of `samples` into an empty database and recall their evidence; returns the section."""
    settings = Settings(_env_file=None, embedder=embedder_name)
    settings = settings.model_copy(update={"memory": settings.memory.model_copy(update={"reranker": reranker})})
    clock = MovedClock()
    embedder = resolve(settings.embedder, settings, clock)
    conversations = [lines_of(sample) for sample in samples]
    database = Database(url)
    for lines in conversations:
        _import(database, clock, embedder, lines)
    models = Models(settings, SystemClock())
    ordering = resolve_reranker(settings, lambda: models.get(settings.summary_model or settings.model))
    recall = Recall(database, embedder, settings.memory, clock, reranker=ordering)
    answered = [
        each
        for sample, lines in zip(samples, conversations, strict=True)
        for each in _ask(recall, sample, lines, max(ks))
    ]
    database.close()
    with_reranker = "" if ordering is None else f" and the reranker {reranker}"
    return _section(answered, ks, file, embedder.name + with_reranker, sum(map(len, conversations)))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.recall", description="Measure the share of the evidence that recall finds."
    )
    parser.add_argument(
        "file", type=Path, nargs="?", default=SHIPPED, metavar="FILE", help="a data set in LoCoMo's layout"
    )
    parser.add_argument("--embedder", default=_EMBEDDER, help="as in PERDURE_EMBEDDER")
    parser.add_argument("--reranker", default="none", help="as in PERDURE_MEMORY__RERANKER")
    parser.add_argument(
        "--k", type=lambda text: [int(part) for part in text.split(",")], default=_KS, help="such as 5,10,20"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    return parser.parse_args()


def lines_of(sample: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The messages of a sample in the format of a `perdure messages import` file."""
    conversation = sample["conversation"]
    numbers = sorted(int(key.split("_")[1]) for key in conversation if re.fullmatch(r"session_\d+", key))
    first = conversation.get("speaker_a") or conversation[f"session_{numbers[0]}"][0]["speaker"]
    lines = []
    for number in numbers:
        begun = _moment(conversation[f"session_{number}_date_time"])
        for position, line in enumerate(conversation[f"session_{number}"]):
            picture = f" [a picture: {line['blip_caption']}]" if line.get("blip_caption") else ""
            lines.append(
                {
                    "user_id": str(sample["sample_id"]),
                    "session": f"session {number}",
                    "message_id": line["dia_id"],
                    "role": "user" if line["speaker"] == first else "assistant",
                    "author": line["speaker"],
                    "content": (line["text"] + picture).strip() or "-",
                    "occurred_at": (begun + position * _BETWEEN_LINES).isoformat(),
                }
            )
    return lines


def _moment(text: str) -> datetime:
    for format_ in _DATE_FORMATS:
        try:
            return datetime.strptime(text.strip(), format_).replace(tzinfo=UTC)
        except ValueError:
            continue
    raise ValueError(f"{text!r} is not the time of a session; accepted: times such as '1:56 pm on 8 May, 2023'")


def _import(database: Database, clock: MovedClock, embedder: Embedder, lines: Sequence[Mapping[str, Any]]) -> None:
    for imported in import_messages(database, clock, "assistant", [json.dumps(line) for line in lines]):
        assert not imported.bad, imported.bad[0]
    filled = embed_sessions(database, embedder, imported.sessions)
    assert filled.error is None, filled.error


def _ask(recall: Recall, sample: Mapping[str, Any], lines: Sequence[Mapping[str, Any]], k: int) -> Iterator[Answered]:
    clock = MovedClock()
    clock.advance(max(datetime.fromisoformat(line["occurred_at"]) for line in lines) - clock.now())
    recall = replace(recall, clock=clock)
    known = {line["message_id"] for line in lines}
    for question in sample["qa"]:
        evidence = evidence_of(question) & known
        if not evidence:
            continue
        user, asked = UserKey(str(sample["sample_id"])), question["question"]
        begun = time.perf_counter()
        found = recall.search(user, asked, k, [Layer.EPISODIC], record=False)
        ms = (time.perf_counter() - begun) * 1000
        fitting = _fitting(recall.search(user, asked, MAX_K, [Layer.EPISODIC], record=False))
        yield Answered(int(question.get("category") or 0), evidence, [str(each.id) for each in found], ms, fitting)


def _fitting(found: Sequence[Recalled]) -> frozenset[str]:
    """The ids of the first messages that have `_TOKENS` tokens in sum."""
    sizes = accumulate(estimate_tokens(each.content) for each in found)
    return frozenset(str(each.id) for each, size in zip(found, sizes, strict=True) if size <= _TOKENS)


def evidence_of(question: Mapping[str, Any]) -> frozenset[str]:
    """The ids of the lines that a question names as its evidence, normalised: "D1:03" becomes "D1:3".

    `evidence` is a list or a string; an entry may name several lines. Malformed names ("D", "D:11:26") are ignored.
    """
    evidence = question.get("evidence")
    entries = evidence if isinstance(evidence, list) else [evidence]
    text = " ".join(each for each in entries if isinstance(each, str))
    return frozenset(f"D{session}:{line}" for session, line in _IDS.findall(text))


def _section(answered: Sequence[Answered], ks: Sequence[int], file: str, embedder: str, messages: int) -> Section:
    by_category: defaultdict[str, list[Answered]] = defaultdict(list)
    for each in answered:
        by_category[_CATEGORIES.get(each.category, f"category {each.category}")].append(each)
    groups = {**dict(sorted(by_category.items())), "all": list(answered)}
    figures: dict[str, float] = {}
    rows = []
    for name, group in groups.items():
        row = [name, str(len(group))]
        for k in ks:
            found = {f"any@{k}": [each.any(k) for each in group], f"all@{k}": [each.all(k) for each in group]}
            for measure, hits in found.items():
                figures[f"{name} {measure}"] = sum(hits) / len(hits) if hits else 0.0
                row.append(f"{figures[f'{name} {measure}']:.3f}")
        for measure, fitting in (("any", [each.any_fits for each in group]), ("all", [each.all_fit for each in group])):
            figures[f"{name} {measure} in {_TOKENS} tokens"] = sum(fitting) / len(fitting) if fitting else 0.0
            row.append(f"{figures[f'{name} {measure} in {_TOKENS} tokens']:.3f}")
        rows.append(row)
    took = sorted(each.ms for each in answered) or [0.0]
    for percent in (50, 95, 99):
        figures[f"p{percent}_ms"] = took[min(len(took) - 1, len(took) * percent // 100)]
    latency = ", ".join(f"p{percent} {figures[f'p{percent}_ms']:.1f} ms" for percent in (50, 95, 99))
    return Section(
        NAME,
        f"Evidence found among the first k messages: {file}",
        f"{messages} messages, with the embedder {embedder}; search by words and vectors in the episodic layer only; "
        f"{latency}.",
        [
            *("questions", "number"),
            *(f"{measure}@{k}" for k in ks for measure in ("any", "all")),
            *(f"{measure} in {_TOKENS:,} tokens" for measure in ("any", "all")),
        ],
        rows,
        figures,
    )


if __name__ == "__main__":
    sys.exit(main())
