"""Makes the words' vectors of `perdure.models.embedders.static`. Run by hand, in half an hour on two cores.

    python -m benchmarks.static_vectors ENCODER WORDNET OUT [--cache FILE]

ENCODER is the directory of all-MiniLM-L6-v2 in the layout of sentence-transformers, which must be installed with
PyTorch. WORDNET is the directory `dict` of WordNet 3.1. OUT is the file to write. FILE keeps the sentences' vectors, so
that a second run takes a minute.

The words are the whole words of the encoder's vocabulary, most frequent first, that occur in `_FEWEST` sentences: the
vocabulary has words of other languages, too. Each begins with the encoder's vector of the word alone, reduced to
`MEANING` by the principal components of the sentences' vectors, and weighted by its rank (as by Arora et al., 2017).
Then all are trained until the sum of a sentence's words is near the encoder's vector of the sentence, and nearer than
those of other sentences. None of the benchmarks' texts is among the sentences.
"""

from __future__ import annotations

import argparse
import lzma
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np

from perdure.models.embedders.hashing import words
from perdure.models.embedders.static import MEANING

_ROUNDS = 2
_BATCH = 512
_RATE = 2e-3
_CHARS = 200
_FEWEST = 3
_FREQUENT = 1e-3
_PARTS_OF_SPEECH = ("noun", "verb", "adj", "adv")
_EXAMPLE = re.compile(r'"([^"]{12,160})"')
_QUOTED = re.compile(r';?\s*"[^"]*"')


def main() -> None:
    """Train, and write the file."""
    parser = argparse.ArgumentParser(description="Make the words' vectors.")
    parser.add_argument("encoder", type=Path)
    parser.add_argument("wordnet", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--cache", type=Path)
    given = parser.parse_args()
    from sentence_transformers import SentenceTransformer  # noqa: PLC0415 (not installed for the other benchmarks)

    encoder = SentenceTransformer(str(given.encoder), device="cpu")
    encoder.max_seq_length = 64
    vocabulary = encoder.tokenizer.get_vocab()
    known = [each for each in sorted(vocabulary, key=vocabulary.__getitem__) if each.isascii() and each.isalpha()]
    known = [each for each in known if len(each) > 1]
    texts = list(dict.fromkeys(sentences(given.wordnet)))
    counts = Counter(word for text in texts for word in set(words(text)))
    known = [each for each in known if counts[each] >= _FEWEST]
    vectors = _encoded(encoder, texts, given.cache)
    trained = _trained(known, texts, vectors, encoder.encode(known, batch_size=_BATCH))
    write(given.out, known, trained)


def sentences(wordnet: Path) -> Iterator[str]:
    """The definitions, each after its words, and the examples."""
    for part in _PARTS_OF_SPEECH:
        for line in (wordnet / f"data.{part}").read_text(encoding="utf-8", errors="replace").splitlines():
            head, _, gloss = line.partition("|")
            if not head[:8].isdigit():
                continue
            columns = head.split()
            names = [columns[4 + 2 * at].replace("_", " ").split("(")[0] for at in range(int(columns[3], 16))]
            yield f"{', '.join(names[:3])}: {_QUOTED.sub('', gloss.strip()).strip(' ;')}"[:_CHARS]
            yield from _EXAMPLE.findall(gloss)


def _encoded(encoder: Any, texts: Sequence[str], cache: Path | None) -> Any:
    digest = sha256("\n".join(texts).encode()).hexdigest()
    if cache is not None and cache.exists() and np.load(cache)["digest"] == digest:
        return np.load(cache)["vectors"].astype(np.float32)
    vectors = encoder.encode(texts, batch_size=_BATCH, normalize_embeddings=True).astype(np.float16)
    if cache is not None:
        np.savez(cache, vectors=vectors, digest=digest)
    return vectors.astype(np.float32)


def _trained(known: Sequence[str], texts: Sequence[str], vectors: Any, alone: Any) -> Any:
    """The words' vectors, in an array of shape `(words, MEANING)`."""
    import torch  # noqa: PLC0415 (as above)
    from torch.nn import functional  # noqa: PLC0415 (as above)

    mean = vectors.mean(axis=0)
    some = np.random.default_rng(0).choice(len(vectors), min(20_000, len(vectors)), replace=False)
    main_axes = np.linalg.svd(vectors[some] - mean, full_matrices=False)[2][:MEANING].T
    wanted = functional.normalize(torch.tensor((vectors - mean) @ main_axes).float(), dim=1)
    ranks = np.arange(1, len(known) + 1)
    frequency = 1 / (ranks + 2.7) / (np.log(len(known)) + 0.57)
    first = (alone / np.linalg.norm(alone, axis=1, keepdims=True) - mean) @ main_axes
    first *= (_FREQUENT / (_FREQUENT + frequency) / np.linalg.norm(first, axis=1))[:, None]
    table = torch.nn.EmbeddingBag.from_pretrained(torch.tensor(first).float(), freeze=False, mode="sum")
    optimizer = torch.optim.Adam(table.parameters(), lr=_RATE)
    places = {word: at for at, word in enumerate(known)}
    said = [[places[each] for each in words(text) if each in places] for text in texts]
    order = np.array([at for at, found in enumerate(said) if len(found) > 1])
    for number in range(_ROUNDS):
        np.random.default_rng(number).shuffle(order)
        for start in range(0, len(order), _BATCH):
            batch = order[start : start + _BATCH]
            starts = np.cumsum([0, *(len(said[at]) for at in batch[:-1])])
            sums = table(torch.tensor([each for at in batch for each in said[at]]), torch.tensor(starts))
            made, target = functional.normalize(sums, dim=1), wanted[torch.tensor(batch)]
            apart = functional.cross_entropy(20 * made @ target.T, torch.arange(len(batch)))
            loss = (1 - (made * target).sum(dim=1)).mean() + 0.05 * apart
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print(f"round {number + 1}: the last batch's loss is {loss.item():.3f}", flush=True)
    return table.weight.detach().numpy()


def write(out: Path, known: Sequence[str], vectors: Any) -> None:
    """Write the file that `perdure.models.embedders.static` reads: one byte for each component."""
    scales = np.abs(vectors).max(axis=1) / 127
    components = np.round(vectors / scales[:, None]).astype(np.int8)
    content = f"{len(known)} {vectors.shape[1]}\n".encode() + "".join(f"{each}\n" for each in known).encode()
    content += scales.astype("<f4").tobytes() + components.tobytes()
    out.write_bytes(lzma.compress(content, preset=4))  # to be read with 4 MB of memory


if __name__ == "__main__":
    main()
