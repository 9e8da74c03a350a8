"""`fastembed:` embedders: the library itself, with a model that the tests write. `make test` does not install it.

The model looks each token up in a table of one-hot vectors, so that a text's vector tells which tokens it has.
"""

from __future__ import annotations

import json
import struct
import sys
from pathlib import Path

import pytest

from perdure.clock import SystemClock
from perdure.errors import SettingsError
from perdure.models.embedders import fastembed
from perdure.models.embedders.protocol import Embedder, unit
from perdure.models.embedders.resolve import check, resolve
from perdure.settings import Settings
from perdure.testing.suites.embedders import EmbedderSuite

_WORDS = ["[PAD]", "[UNK]", "[CLS]", "red", "green", "cat", "dog", "bird"]
_FLOAT, _INT64 = 1, 7


def _varint(value: int) -> bytes:
    head, rest = value & 0x7F, value >> 7
    return bytes([head | 0x80]) + _varint(rest) if rest else bytes([head])


def _field(number: int, value: int | str | bytes) -> bytes:
    """One field of a message in protobuf's encoding."""
    if isinstance(value, int):
        return _varint(number << 3) + _varint(value)
    data = value.encode() if isinstance(value, str) else value
    return _varint(number << 3 | 2) + _varint(len(data)) + data


def _tensor(name: str, kind: int, dimensions: list[str]) -> bytes:
    """ONNX's ValueInfoProto of a tensor whose dimensions have these names."""
    shape = b"".join(_field(1, _field(2, each)) for each in dimensions)
    return _field(1, name) + _field(2, _field(1, _field(1, kind) + _field(2, shape)))


def _onnx() -> bytes:
    """ONNX's ModelProto of `last_hidden_state = table[input_ids]`, with a one-hot vector for each word."""
    size = len(_WORDS)
    values = [float(row == column) for row in range(size) for column in range(size)]
    table = _field(1, size) + _field(1, size) + _field(2, _FLOAT) + _field(8, "table")
    table += _field(9, struct.pack(f"<{size * size}f", *values))
    gather = _field(1, "table") + _field(1, "input_ids") + _field(2, "last_hidden_state") + _field(4, "Gather")
    graph = _field(1, gather) + _field(2, "tiny") + _field(5, table)
    graph += b"".join(
        _field(11, _tensor(name, _INT64, ["texts", "tokens"])) for name in ("input_ids", "attention_mask")
    )
    graph += _field(12, _tensor("last_hidden_state", _FLOAT, ["texts", "tokens", "size"]))
    return _field(1, 8) + _field(7, graph) + _field(8, _field(2, 17))


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """The directory of a model in the layout of sentence-transformers."""
    tokenizer = {
        "version": "1.0",
        "added_tokens": [],
        "normalizer": {"type": "Lowercase"},
        "pre_tokenizer": {"type": "Whitespace"},
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "[CLS]", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
            "special_tokens": {"[CLS]": {"id": "[CLS]", "ids": [2], "tokens": ["[CLS]"]}},
        },
        "model": {"type": "WordLevel", "vocab": {word: n for n, word in enumerate(_WORDS)}, "unk_token": "[UNK]"},
    }
    files = {
        "config.json": {"hidden_size": len(_WORDS), "pad_token_id": 0},
        "tokenizer.json": tokenizer,
        "tokenizer_config.json": {"model_max_length": 64, "pad_token": "[PAD]"},
        "1_Pooling/config.json": {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False},
    }
    (tmp_path / "onnx").mkdir()
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "onnx" / "model.onnx").write_bytes(_onnx())
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    return tmp_path


@pytest.mark.long
class TestFastEmbed(EmbedderSuite):
    @pytest.fixture
    def embedder(self, directory: Path) -> Embedder:
        return fastembed.load(str(directory), SystemClock(), 30.0)


@pytest.mark.long
def test_averages_the_tokens_of_each_text(directory: Path) -> None:
    embedder = resolve(f"fastembed:{directory}", Settings(), SystemClock())
    cat, red_cat, nothing = embedder.embed(["Cat", "red cat", "something else entirely"])
    assert cat == pytest.approx(unit([0, 0, 1, 0, 0, 1, 0, 0]), abs=1e-6)
    assert red_cat == pytest.approx(unit([0, 0, 1, 1, 0, 1, 0, 0]), abs=1e-6)
    assert nothing == pytest.approx(unit([0, 3, 1, 0, 0, 0, 0, 0]), abs=1e-6)
    assert embedder.dimensions == len(_WORDS)


@pytest.mark.long
def test_takes_the_first_token_where_the_model_says_so(directory: Path) -> None:
    (directory / "1_Pooling" / "config.json").write_text('{"pooling_mode_cls_token": true}')
    [vector] = resolve(f"fastembed:{directory}", Settings(), SystemClock()).embed(["red cat"])
    assert vector == [0, 0, 1, 0, 0, 0, 0, 0]


@pytest.mark.long
def test_one_process_may_load_a_directory_twice(directory: Path) -> None:
    names = (f"{directory}/", str(directory))
    first, second = (fastembed.load(name, SystemClock(), 30.0) for name in names)
    assert first.embed(["dog"]) == second.embed(["dog"])


@pytest.mark.long
@pytest.mark.parametrize(
    ("broken", "reason"),
    [
        ("onnx/model.onnx", "neither onnx/model.onnx nor model.onnx"),
        ("config.json", "config.json"),
        ("tokenizer.json", "tokenizer.json"),
    ],
)
def test_says_why_a_directory_cannot_be_loaded(broken: str, reason: str, directory: Path) -> None:
    (directory / broken).unlink()
    with pytest.raises(SettingsError, match=f"PERDURE_EMBEDDER is 'fastembed:.*{reason}"):
        resolve(f"fastembed:{directory}", Settings(), SystemClock())


@pytest.mark.long
def test_refuses_a_pooling_that_it_does_not_know(directory: Path) -> None:
    (directory / "1_Pooling" / "config.json").write_text('{"pooling_mode_max_tokens": true}')
    with pytest.raises(SettingsError, match="has 0 of the accepted poolings"):
        resolve(f"fastembed:{directory}", Settings(), SystemClock())


@pytest.mark.long
def test_says_which_names_are_accepted() -> None:
    with pytest.raises(SettingsError, match="'fastembed:word2vec': accepted: the name of a model"):
        resolve("fastembed:word2vec", Settings(), SystemClock())


def test_says_which_extra_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fastembed", None)
    with pytest.raises(SettingsError, match=r"'fastembed:tiny': it needs the extra fastembed, pip install"):
        resolve("fastembed:tiny", Settings(), SystemClock())
    with pytest.raises(SettingsError, match=r"it needs the extra fastembed, pip install 'perdure\[fastembed\]'"):
        check("fastembed:tiny", Settings(), SystemClock())
