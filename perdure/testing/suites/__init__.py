"""The required behaviour of models, embedders and snapshot stores, as pytest classes that third parties subclass.

Each class needs one fixture, which returns the implementation under test:

| class | module | fixture |
| --- | --- | --- |
| `ModelSuite` | `perdure.testing.suites.models` | `model` |
| `EmbedderSuite` | `perdure.testing.suites.embedders` | `embedder` |
| `SnapshotSuite` | `perdure.testing.suites.snapshots` | `harness`, a `StoreHarness` |

They need pytest; `snapshots` needs hypothesis as well. perdure's own implementations pass them in tests/models and
tests/snapshots.
"""

import pytest

pytest.register_assert_rewrite(
    "perdure.testing.suites.models", "perdure.testing.suites.embedders", "perdure.testing.suites.snapshots"
)
