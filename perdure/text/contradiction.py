"""Detects whether two texts that are close in meaning contradict each other.

Cosine similarity cannot distinguish a contradiction from a paraphrase: "not", or 30 instead of 90, hardly changes a
vector. This module compares numbers, negations, names, and words that exclude each other, in English and Korean, and
numbers in German, French, Spanish, Portuguese, Japanese and Chinese, too. In doubt, it reports a difference. The caller
then keeps both texts, although they may mean the same.

A caller that compares many texts should first compare the integers `fingerprint`, `name_bits` and `word_bits` of
`Features`. These integers decide most pairs.

Called by consolidation, by the tool `remember` and by the CaseBank's search for duplicates.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import reduce
from hashlib import blake2b
from itertools import zip_longest
from operator import or_

from perdure.text.linear import has_hangul, normalized
from perdure.text.patterns import SPACE, STARTS, Match, compiled
from perdure.text.words import KOREAN_PLACES, TITLES, Reading, Token, sides, stem, tokens, without_particle, word_list

MAX_CHARS = 10_000
"""Maximum characters of a normalised text that are analysed. The rest of the text is compared by its hash."""

_BITS = 63
_SHOWN_CHARS = 200
_STRAIGHT_APOSTROPHES = str.maketrans({"’": "'", "‘": "'", "ʼ": "'"})  # noqa: RUF001 (the characters to replace)
_NEGATIVE_PREFIXES = ("un", "dis", "non", "in", "im", "ir", "il", "mis")
_SHORTEST_NEGATED = 4
_NOT_YET = compiled(r"\byet to\b", ignore_case=True)


class DifferenceKind(StrEnum):
    """The kind of difference between two texts."""

    NUMBER = "number"
    NEGATION = "negation"
    NAME = "name"
    OPPOSITE = "opposite"
    REST = "passage"


@dataclass(frozen=True, slots=True)
class Difference:
    """A difference between two texts.

    `left` describes the differing part of the first text, such as its numbers. `right` describes the differing part of
    the second text. One of them may be empty.
    """

    kind: DifferenceKind
    left: str
    right: str

    @property
    def excludes(self) -> bool:
        """Whether the texts cannot both be true: one denies the other, or they differ in one of two opposites.

        Two names, numbers, days or colours may belong to two things.
        """
        is_polar = self.kind is DifferenceKind.OPPOSITE and sides(self.left) <= 2  # noqa: PLR2004 (two sides)
        return is_polar or self.kind is DifferenceKind.NEGATION

    def __str__(self) -> str:
        article = "an" if self.kind is DifferenceKind.OPPOSITE else "a"
        return f"they differ in {article} {self.kind} ({_shorten(self.left)} / {_shorten(self.right)})"


def _shorten(side: str) -> str:
    return side if 0 < len(side) <= _SHOWN_CHARS else f"{side[: _SHOWN_CHARS - 1]}…" if side else "none"


@dataclass(frozen=True, slots=True)
class Features:
    """The features of one text that `difference` compares.

    `words` has the forms of all words; see `words.Reading`. `opposites` maps the number of each group of opposed words,
    such as "on" and "off", that occurs in the text. The value has the sides of the group that occur, and one of the
    words. `rest` is a hash of the text beyond `MAX_CHARS`, or empty if the text is not longer than `MAX_CHARS`.
    """

    numbers: tuple[str, ...]
    negations: int
    words: frozenset[str]
    names: frozenset[str]
    opposites: Mapping[int, tuple[frozenset[int], str]]
    rest: str = ""

    @property
    def fingerprint(self) -> int:
        """A 63-bit hash of `numbers`, `negations` and `rest`. It is the same on every machine."""
        parts = [str(self.negations), *self.numbers, *([f"rest {self.rest}"] if self.rest else [])]
        return _hash("\x1f".join(parts)) >> 1

    @property
    def name_bits(self) -> int:
        """A 63-bit Bloom filter of the names.

        If the `word_bits` of another text lack one of these bits, the other text lacks one of the names.
        """
        return _bits(map(stem, self.names))

    @property
    def word_bits(self) -> int:
        return _bits(self.words)


def difference(left: str, right: str) -> Difference | None:
    return compare(features(left), features(right))


def compare(left: Features, right: Features) -> Difference | None:
    """The `difference` of two texts, given their features. The kind does not depend on the order of the texts."""
    if left.rest != right.rest:
        return Difference(
            DifferenceKind.REST, *(f"from character {MAX_CHARS:,}" if each.rest else "" for each in (left, right))
        )
    if left.numbers != right.numbers:
        return Difference(DifferenceKind.NUMBER, _only(left.numbers, right.numbers), _only(right.numbers, left.numbers))
    if left.negations != right.negations:
        return Difference(DifferenceKind.NEGATION, *(("negated" if each.negations else "") for each in (left, right)))
    left_only, right_only = _missing(left.names, right), _missing(right.names, left)
    if left_only or right_only:
        return Difference(DifferenceKind.NAME, ", ".join(left_only), ", ".join(right_only))
    return _opposites(left, right)


def _missing(names: frozenset[str], other: Features) -> list[str]:
    return sorted(name for name in names if stem(name) not in other.words)


def _only(these: tuple[str, ...], others: tuple[str, ...]) -> str:
    """The numbers in `these` that are not in `others`. If there are no such numbers, all numbers in `these`."""
    return ", ".join([number for number in these if number not in others] or these)


def _opposites(left: Features, right: Features) -> Difference | None:
    """The difference if the texts use opposed words: "trust" and "distrust", or two sides of a group of opposites."""
    for word in sorted(left.words ^ right.words):
        bare = next((word.removeprefix(each) for each in _NEGATIVE_PREFIXES if word.startswith(each)), "")
        if len(bare) >= _SHORTEST_NEGATED and bare in left.words ^ right.words:
            pair = (word, bare) if word in left.words else (bare, word)
            if pair[0] in left.words and pair[1] in right.words:
                return Difference(DifferenceKind.OPPOSITE, *pair)
    for group in sorted(left.opposites.keys() & right.opposites.keys()):
        (sides, word), (others, other) = left.opposites[group], right.opposites[group]
        if sides != others:
            return Difference(DifferenceKind.OPPOSITE, word, other)
    return None


def features(text: str) -> Features:
    """Analyse one text, in linear time and bounded space (see `MAX_CHARS`)."""
    normal = normalized("NFKC", text[:MAX_CHARS]).translate(_STRAIGHT_APOSTROPHES)
    rest = normal[MAX_CHARS:] + text[MAX_CHARS:]
    normal = normal[:MAX_CHARS]
    found = [(token, token.read()) for token in tokens(normal)]
    positioned = frozenset(_names_by_position(normal))
    opposites: dict[int, tuple[frozenset[int], str]] = {}
    for _, word in found:
        for group, side in word.opposites:
            sides, longest = opposites.get(group, (frozenset(), ""))
            opposites[group] = sides | {side}, max(longest, word.base, key=lambda each: (len(each), each))
    return Features(
        numbers=tuple(
            sorted([*_numbers(normal), *(_NUMBERS[word.base] for _, word in found if word.base in _NUMBERS)])
        ),
        negations=sum(word.negates for _, word in found) + len(_NOT_YET.findall(normal)),
        words=positioned.union(map(stem, positioned), *(word.forms for _, word in found)),
        names=positioned.union(name for token, word in found for name in _names(token, word)),
        opposites=opposites,
        rest=f"{_hash(rest):016x}" if rest else "",
    )


def _hash(text: str) -> int:
    return int.from_bytes(blake2b(text.encode("utf-8", "replace"), digest_size=8).digest())


def _bits(words: Iterable[str]) -> int:
    return reduce(or_, (1 << _hash(word) % _BITS for word in words), 0)


# --- numbers -----------------------------------------------------------------------------

_DIGITS = compiled(r"\p{Nd}+(?:[.,:/-]\p{Nd}+)*")
_ONE_NUMBER = compiled(r"[0-9]+(?:\.[0-9]+)?|[0-9]{1,3}(?:,[0-9]{3})+(?:\.[0-9]+)?")
_SCALES = {"천만": 7, "백만": 6, "천": 3, "만": 4, "억": 8, "조": 12, "千": 3, "万": 4, "億": 8, "亿": 8}
"""The exponent of ten of each Korean, Japanese and Chinese unit, such as 3 for 천 (1,000)."""

_SCALED = compiled(rf"([0-9][0-9,]*(?:\.[0-9]+)?)[{SPACE}]?({'|'.join(_SCALES)})")
_NUMBERS = {
    word: number
    for names, numbers in (
        ("two three four five six seven eight nine ten eleven twelve", range(2, 13)),
        ("thirteen fourteen fifteen sixteen seventeen eighteen nineteen", range(13, 20)),
        ("twenty thirty forty fifty sixty seventy eighty ninety hundred", range(20, 101, 10)),
        ("second third fourth fifth sixth seventh eighth ninth tenth", range(2, 11)),
        ("zero twice thrice dozen thousand million half quarter", (0, 2, 3, 12, 1000, 10**6, "1/2", "1/4")),
        ("zwei drei vier fünf sechs sieben acht neun zehn", range(2, 11)),
        ("dos tres cuatro cinco seis siete ocho nueve diez", range(2, 11)),
        ("deux trois quatre cinq six sept huit neuf dix", range(2, 11)),
        ("dois três quatro cinco seis sete oito nove dez", range(2, 11)),
    )
    for word, number in zip(word_list(names), map(str, numbers), strict=True)
}
"""Number words of five languages. "One" is none of them: it is usually a pronoun, as in "this one"."""
_NUMERALS = {numeral: str(number) for number, numeral in enumerate("一二三四五六七八九十", start=1)} | {"两": "2"}
_NUMERAL = compiled("([一二三四五六七八九十两])([人个個匹只隻本歳岁点時时分元円位名口])")
"""A Japanese or Chinese numeral before a counter. Others may be parts of words, such as 三月 (March)."""

_SPELLED = compiled(r"\p{Nd}[\p{Nd}.,:/-]*[人个個匹只隻本歳岁点時时分元円]?")

_KOREAN_NUMBERS = {
    word: number for number, word in enumerate(word_list("한 두 세 네 다섯 여섯 일곱 여덟 아홉"), start=1)
}
_KOREAN_TENS = {
    word: number for number, word in enumerate(word_list("열 스물 서른 마흔 쉰 예순 일흔 여든 아흔"), start=1)
}
_KOREAN_TENS["스무"] = 2
_HANGUL_RUN = compiled("[\uac00-\ud7a3]+")
_COUNTED = compiled(
    f"({'|'.join(_KOREAN_TENS)})?({'|'.join(_KOREAN_NUMBERS)})?"
    f"[{SPACE}]?(?:개|번|명|시간|시|달|살|주|배|가지|마리|장|잔|병|권|대|분)"
    "(?:(?:이에요|이었|이라|이고|입니다|정도|이상|이하).*|.{0,2})"
)


def _numbers(text: str) -> Iterator[str]:
    """Each number in digits or Korean, in one spelling: 1,000 and 1천 are 1000. Dates and versions stay as they are."""
    hangul = has_hangul(text)
    if not text.isascii():
        yield from (_NUMERALS[found[1]] for found in _NUMERAL.finditer(text))
        for found in _SCALED.finditer(text):
            yield _canonical(found[1], _SCALES[found[2]])
        text = _SCALED.sub(lambda _: " ", text)
    for number in _DIGITS.findall(text):
        yield _canonical(number) if _ONE_NUMBER.fullmatch(number) else number
    if hangul:
        yield from _korean_numbers(text)


def without_numbers(text: str) -> str:
    """`text` in lower case, with a space in place of each number that `features` finds, except Korean ones."""

    def blank(_: Match) -> str:
        return " "

    kept = _SPELLED.sub(blank, _NUMERAL.sub(blank, _SCALED.sub(blank, text)))
    return " ".join(word for word in kept.split() if word.strip(".,;:!?") not in _NUMBERS)


def _canonical(number: str, scale: int = 0) -> str:
    """`number` times 10 to the power of `scale`, without separators and superfluous zeros.

    Works on the digits, because different numbers of more than 15 digits may be equal as floats.
    """
    whole, _, fraction = number.replace(",", "").partition(".")
    fraction = fraction.ljust(scale, "0")
    whole, fraction = (whole + fraction[:scale]).lstrip("0") or "0", fraction[scale:].rstrip("0")
    return f"{whole}.{fraction}" if fraction else whole


def _korean_numbers(text: str) -> Iterator[str]:
    """Native Korean numbers before a counter, such as 두 번 or 열한 시."""
    runs = list(_HANGUL_RUN.finditer(text))
    for run, after in zip_longest(runs, runs[1:]):
        counted = _COUNTED.fullmatch(run[0])
        if counted is None and after is not None and text[run.end() : after.start()].isspace():
            counted = _COUNTED.fullmatch(text[run.start() : after.end()])
        if counted is not None and (counted[1] or counted[2]):
            yield str(10 * _KOREAN_TENS.get(counted[1], 0) + _KOREAN_NUMBERS.get(counted[2], 0))


# --- names -------------------------------------------------------------------------------

# These words are not names although they have a capital letter at the beginning of a sentence, or stand where a name
# often stands.
_OPENERS = frozenset(
    map(
        stem,
        word_list("""
    a about after all also an and any are as ask at be because before both but by can change check cancel connect
    could create delete did do does each either every explain find first for from get give had has have he help
    her here his how i if in install is it its let lets list make may maybe me might most my need new now of on
    one open or our please prefers put remove reset run say says set she should show since so some start stop
    tell than that the their them then there these they this those to try turn two under until update us use user
    users was we were what whats when where which while who whom whose why will with would yes you your add allow
    always configure deploy describe disable enable increase decrease fix hello hey hi likes like lives loves
    wants works enjoys hates dislikes owns plays studies speaks uses thanks thank ok okay only just last next
    home different another several many same
    """),
    )
)
_NEVER_NAMES = frozenset({"i", "i'm", "i'd", "i've", "i'll", "ok"})
_SHORTEST_TITLED = 2
_KOREAN_TOPIC = compiled("([\uac00-\ud7a3]{1,2}[^하되있없않같지르])(?:은|는|이|가|께서|에게|한테)")
_KOREAN_NO_NAMES = frozenset(
    word_list("""
    저 나 너 우리 저희 그 그녀 그들 당신 이것 그것 저것
    여기 거기 저기 누구 무엇 뭐 어디 언제 사용자 고객 회원 관리자 사람
    하 되 있 없 않 같 어떻게 이거 그거 오늘 내일 어제 지금 방법 문제 경우
    """)
)

_NAME_POSITIONS = compiled(
    rf"{STARTS}(?:called|named|name is|name's|from"
    r"|(?:move|moves|moved|moving) to"
    r"|(?:live|lives|lived|living|born|based|work|works|worked|working|study|studies) (?:at|for|in))"
    r" (?P<english>[\pL\p{Nl}\p{No}]+)"
    "|이름은 (?P<called>[\uac00-\ud7a3]{1,6}?)(?:예요|이에요|입니다|이야|야|이다|다|라고)"
    "|(?P<where>[\uac00-\ud7a3]{2,8}?)(?:에서|에) (?:살|일|근무|다니|다녀|태어)"
    "|(?P<titled>[\uac00-\ud7a3]{2,4}) (?:씨|님)",
    ignore_case=True,
)
"""Positions in which a word counts as a name even in lower case, such as "lives in X"."""


def _names_by_position(text: str) -> Iterator[str]:
    for found in _NAME_POSITIONS.finditer(text):
        word = next(each for each in found.groups() if each is not None).casefold().removesuffix("'s")
        if stem(word) not in _OPENERS:
            yield word


def _names(token: Token, word: Reading) -> Iterator[str]:
    """If the token is spelled like a name, yield the name in one of the word's `forms`.

    A Korean name is a known place, a word before a form of address, or two or three syllables before a particle.
    """
    text = token.text
    if has_hangul(text):
        topic = _KOREAN_TOPIC.fullmatch(text)
        if place := next((place for place in KOREAN_PLACES if text.startswith(place)), None):
            yield place
        elif len(bare := without_particle(text)) > _SHORTEST_TITLED and bare.endswith(TITLES):
            yield bare[:-1]
        elif topic is not None and topic[1] not in _KOREAN_NO_NAMES:
            yield topic[1]
    elif text[0].isalpha() and word.base not in _NEVER_NAMES and not word.negates:
        opens = token.initial and stem(word.base) in _OPENERS
        if text[1:] != text[1:].lower() or (text[0].isupper() and not opens and word.base not in _NUMBERS):
            yield word.base
