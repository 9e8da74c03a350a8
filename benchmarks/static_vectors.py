"""Makes the words' vectors of `perdure.models.embedders.static`. Run by hand, in half an hour on two cores.

    python -m benchmarks.static_vectors ENCODER WORDNET OUT [--cache FILE]
    python -m benchmarks.static_vectors --related OUT      only replaces the related words in OUT

ENCODER is the directory of all-MiniLM-L6-v2 in the layout of sentence-transformers, which must be installed with
PyTorch. WORDNET is the directory `dict` of WordNet 3.1. OUT is the file to write. FILE keeps the sentences' vectors, so
that a second run takes a minute.

The words are the whole words of the encoder's vocabulary, most frequent first, that occur in `_FEWEST` sentences: the
vocabulary has words of other languages, too. Each begins with the encoder's vector of the word alone, reduced to
`MEANING` by the principal components of the sentences' vectors, and weighted by its rank (as by Arora et al., 2017).
Then all are trained until the sum of a sentence's words is near the encoder's vector of the sentence, and nearer than
those of other sentences. None of the benchmarks' texts is among the sentences.

The words related to a word are those with the highest cosines, each with another stem in PostgreSQL's English search.
Stop words are related to none.
"""

from __future__ import annotations

import argparse
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np

from perdure.database.engine import Database, Statement
from perdure.models.embedders.hashing import words
from perdure.models.embedders.static import MEANING, table
from perdure.servers.throwaway import servers

_ROUNDS = 2
_BATCH = 512
_RATE = 2e-3
_CHARS = 200
_FEWEST = 3
_FREQUENT = 1e-3
_MOST_RELATED = 8
# The stems of stop words, and parts of contractions ("hasn't") that are none for PostgreSQL.
_WITHOUT = frozenset(
    {"", "ain", "aren", "couldn", "didn", "doesn", "hadn", "hasn", "haven", "isn", "ll", "mustn", "re", "shouldn", "ve"}
    | {"wasn", "weren", "wouldn"}
)
_LEAST_COSINE = 0.4
_NEAREST = 200
_PARTS_OF_SPEECH = ("noun", "verb", "adj", "adv")
_EXAMPLE = re.compile(r'"([^"]{12,160})"')
_QUOTED = re.compile(r';?\s*"[^"]*"')

_STEMS = Statement(
    "benchmark.stems",
    """
    SELECT coalesce((ts_lexize('english_stem', word))[1], '') AS stem
    FROM unnest(%(words)s::text[]) WITH ORDINALITY AS given (word, number) ORDER BY number
    """,
    writes=False,
)


def main() -> None:
    """Train, and write the file."""
    parser = argparse.ArgumentParser(description="Make the words' vectors.")
    parser.add_argument("encoder", type=Path, nargs="?")
    parser.add_argument("wordnet", type=Path, nargs="?")
    parser.add_argument("out", type=Path, nargs="?")
    parser.add_argument("--cache", type=Path)
    parser.add_argument("--related", type=Path, metavar="OUT")
    given = parser.parse_args()
    if given.related is not None:
        kept = table()
        write(given.related, kept.words, np.array(kept.scales), np.array(kept.components).reshape(-1, kept.size))
        return
    if given.out is None:
        parser.error("ENCODER, WORDNET and OUT are required")
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
    scales = np.abs(trained).max(axis=1) / 127
    write(given.out, known, scales.astype("<f4"), np.round(trained / scales[:, None]).astype(np.int8))


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


def write(out: Path, known: Sequence[str], scales: Any, components: Any) -> None:
    """Write the file that `perdure.models.embedders.static` reads."""
    content = f"{len(known)} {components.shape[1]} {_MOST_RELATED}\n".encode()
    content += "".join(f"{each}\n" for each in known).encode()
    content += scales.astype("<f4").tobytes() + components.astype(np.int8).tobytes()
    related, cosines = _related(components.astype(float), _stems(known))
    content += related.astype("<u2").tobytes() + np.floor(255 * cosines).astype(np.uint8).tobytes()
    out.write_bytes(content)


def _stems(known: Sequence[str]) -> list[str]:
    with servers() as running:
        database = Database(running.postgres.url)
        rows = database.run(_STEMS, {"words": list(known)})
        database.close()
    return [row.stem for row in rows]


def _related(vectors: Any, stems: Sequence[str]) -> tuple[Any, Any]:
    """The related words of each word, and their cosines, in arrays of shape `(words, _MOST_RELATED)`.

    A word with fewer related words has itself in the other places.
    """
    vectors = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    related = np.repeat(np.arange(len(vectors))[:, None], _MOST_RELATED, axis=1)
    kept = np.zeros(related.shape)
    for at, vector in enumerate(vectors):
        cosines = vectors @ vector
        if stems[at] in _WITHOUT:
            continue
        seen, found = {stems[at], *_WITHOUT}, 0
        for other in np.argsort(-cosines)[:_NEAREST]:
            if found == _MOST_RELATED or cosines[other] < _LEAST_COSINE:
                break
            if stems[other] not in seen:
                seen.add(stems[other])
                related[at, found], kept[at, found] = other, cosines[other]
                found += 1
    return related, kept


if __name__ == "__main__":
    main()
