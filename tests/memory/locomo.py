"""Generates conversations of any size in the file format of the LoCoMo benchmark, including its irregularities.

python -m tests.memory.locomo FILE [SAMPLES] [SESSIONS] [LINES]
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

_NAMES = ("Caroline", "Melanie", "Jon", "Gina", "Nate", "Joanna", "Tim", "Andrew")
_DOING = ("painted", "fixed", "bought", "lost", "found", "sold", "drew", "borrowed", "cleaned", "wrapped", "weighed")
_THINGS = ("kettle", "lantern", "bicycle", "violin", "teapot", "carpet", "ladder", "mirror", "basket", "drum", "quilt")
_CHAT = (
    "That sounds lovely!",
    "Wow, tell me more.",
    "How did it go?",
    "I am so happy for you.",
    "Same here, honestly.",
)
_MONTHS = ("January", "February", "March", "April", "May", "June")


def locomo(samples: int, sessions: int, lines: int, seed: int = 1) -> list[dict[str, Any]]:
    """Generate `samples` samples. Each has `sessions` sessions of `lines` lines, and questions with their evidence."""
    chance = random.Random(seed)  # noqa: S311 (no secret)
    return [_sample(number, sessions, lines, chance) for number in range(samples)]


def _sample(number: int, sessions: int, lines: int, chance: random.Random) -> dict[str, Any]:
    speakers = chance.sample(_NAMES, 2)
    conversation: dict[str, Any] = {"speaker_a": speakers[0], "speaker_b": speakers[1]}
    facts: list[tuple[str, str, str]] = []
    for session in range(1, sessions + 1):
        hour, month = chance.randint(1, 12), _MONTHS[(session // 28) % len(_MONTHS)]
        conversation[f"session_{session}_date_time"] = f"{hour}:05 pm on {session % 28 + 1} {month}, 2023"
        conversation[f"session_{session}"] = said = []
        for line in range(1, lines + 1):
            dia_id, speaker = f"D{session}:{line}", speakers[line % 2]
            spoken: dict[str, Any] = {"speaker": speaker, "dia_id": dia_id, "text": chance.choice(_CHAT)}
            said.append(spoken)
            if line % 5 == 0:
                what = f"{chance.choice(_DOING)} the {chance.choice(_THINGS)} number {session * 100 + line}"
                said[-1]["text"] = f"Yesterday I {what}."
                facts.append((speaker, what, dia_id))
        said[0] |= {"img_url": ["http://127.0.0.1/a.jpg"], "blip_caption": "a dog on a beach", "query": "dog"}
        said[0]["text"] = ""
    conversation[f"session_{sessions + 1}_date_time"] = "1:56 pm on 8 May, 2023"  # a session without lines
    return {
        "sample_id": f"conv-{number}",
        "conversation": conversation,
        "qa": _questions(facts, chance),
        "observation": {},
        "session_summary": {},
        "event_summary": {},
    }


def _questions(facts: list[tuple[str, str, str]], chance: random.Random) -> list[dict[str, Any]]:
    """Questions whose evidence has each form that occurs in LoCoMo's file.

    The evidence names one line or several lines, as a list or as a string. It can also be invalid or missing.
    """
    questions: list[dict[str, Any]] = []
    for speaker, what, dia_id in facts:
        questions.append({"question": f"When was it that {speaker} {what}?", "evidence": [dia_id], "category": 4})
        questions[-1]["answer"] = 7 if chance.random() < 0.2 else "the day before"
    (_, first, one), (_, second, other) = facts[0], facts[-1]
    both = f"Who {first}, and who {second}?"
    session, line = one.removeprefix("D").split(":")
    questions += [
        {"question": both, "answer": "both", "evidence": [one, other], "category": 1},
        {"question": both, "answer": "both", "evidence": [f"{one}; {other}"], "category": 1},
        {"question": both, "answer": "both", "evidence": f"{one}, {other}", "category": 1},
        {"question": f"When was it that they {first}?", "evidence": [f"D{session}:0{line}"], "category": 2},
        {"question": f"Did they never {first}?", "adversarial_answer": "no", "evidence": [one], "category": 5},
        {"question": "What names no line?", "answer": "this", "evidence": ["D"], "category": 3},
        {"question": "What is cut?", "answer": "this", "evidence": ["D:11:26", ""], "category": 3},
        {"question": "Which line is not there?", "answer": "this", "evidence": ["D999:1"], "category": 3},
        {"question": "What has no evidence?", "answer": "this", "evidence": [], "category": 3},
        {"question": "What has none at all?", "answer": "this", "category": 3},
    ]
    return questions


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(json.dumps(locomo(*map(int, sys.argv[2:])), indent=1), encoding="utf-8")
