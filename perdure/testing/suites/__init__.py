"""Behavioural tests of models, embedders, channels and snapshot stores, as pytest classes that third parties subclass.

Each class requires one fixture, which returns the implementation under test:

| class | module | fixture |
| --- | --- | --- |
| `ModelSuite` | `perdure.testing.suites.models` | `model` |
| `EmbedderSuite` | `perdure.testing.suites.embedders` | `embedder` |
| `ChannelSuite` | `perdure.testing.suites.channels` | `harness`, a `ChannelHarness` |
| `SnapshotSuite` | `perdure.testing.suites.snapshots` | `harness`, a `StoreHarness` |

All classes need pytest; `SnapshotSuite` also needs hypothesis. tests/models, tests/channels and tests/snapshots run the
classes on perdure's own implementations.
"""

import pytest

pytest.register_assert_rewrite(
    "perdure.testing.suites.models",
    "perdure.testing.suites.embedders",
    "perdure.testing.suites.channels",
    "perdure.testing.suites.snapshots",
)
