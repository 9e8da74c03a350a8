"""Replays recorded conversations with the agent as it is now, and counts what is different.

    python evaluate.py                            the recorded replies: has the prompt changed, and do all calls work?
    python evaluate.py --model openai:gpt-5-mini  a model answers: does the agent still sort as before?

Each line of the recordings is what `perdure sessions export SESSION_ID` prints, without line breaks. The turns of a
conversation are replayed one by one, each after the recorded turns before it.
"""

import argparse
import json
import sys
from pathlib import Path

from triage import triage

from perdure.testing import recorded

RECORDINGS = Path(__file__).parent / "recordings.jsonl"


def main() -> int:
    """Print a line for each recording, and the sums; returns 1 if fewer than `--least` are sorted as before."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("recordings", nargs="?", type=Path, default=RECORDINGS)
    options.add_argument("--model", help="a model such as openai:gpt-5-mini; by default, the recorded replies answer")
    options.add_argument("--least", type=float, default=0.9, help="the share that must be sorted as before")
    given = options.parse_args()

    lines = given.recordings.read_text(encoding="utf-8").splitlines()
    conversations = [recorded(json.loads(line)) for line in lines]
    runs = [turn for each in conversations for turn in each.turns]
    same = same_calls = tokens = 0
    changed: set[str] = set()
    for run in runs:
        replay = run.replay(triage, model=given.model)
        was, now = run.bundle["reply"]["data"], replay.data
        is_same = now is not None and (now.team, now.urgent) == (was["team"], was["urgent"])
        same += is_same
        same_calls += not replay.difference.calls
        if (used := replay.answer.usage) is not None:
            tokens += used.input_tokens + used.output_tokens
        changed |= {str(each) for each in (replay.difference.instructions, replay.difference.tools) if each}
        print("same " if is_same else "OTHER", f"{run.text[:70]:70}", replay.reply if now is None else now.team)
    print(f"{same} of {len(runs)} messages in {len(conversations)} conversations are sorted as before.")
    print(f"{same_calls} lead to the same calls, and all take {tokens:,} tokens.")
    print("\n".join(("The prompt has changed:", *changed)) if changed else "The prompt is the recorded one.")
    return 0 if same >= given.least * len(runs) else 1


if __name__ == "__main__":
    sys.exit(main())
