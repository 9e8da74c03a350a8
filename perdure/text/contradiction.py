"""Whether two texts that are close all the same say different things.

A cosine cannot tell a contradiction from a paraphrase: "not" is a small word, and 30 is as
near to 90 as a number can be. This looks at what decides the sense instead: numbers,
negations, names, and words that exclude each other. It reads English and Korean, by rules
and short lists, and errs on one side only: a text that it takes for different is kept, so a
mistake costs a merge and never a fact.

Most of it can be told from a few plain numbers of each text (`Reading.essence` and the bits of
its names and words): whoever compares many texts compares these first.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache, reduce, wraps
from hashlib import blake2b
from itertools import groupby
from operator import or_
from typing import TypeVar

from perdure.text import linear as texts
from perdure.text.linear import has_hangul, is_hangul
from perdure.text.patterns import SPACE, STARTS, compiled

MAX_CHARS = 10_000
"""Characters of a text, in its normal form, that are read; whether the rest differs is decided by its hash."""

_REMEMBERED = 20_000
"""Words whose forms are remembered: most texts are made of the same ones."""

_LONGEST_REMEMBERED = 64
"""Longer words are not remembered, so that a text of one word does not stay in memory."""

_BITS = 63
_SHOWN_CHARS = 200


class Kind(StrEnum):
    """What two texts differ in."""

    NUMBER = "number"
    NEGATION = "negation"
    NAME = "name"
    OPPOSITE = "opposite"
    REST = "passage"


@dataclass(frozen=True, slots=True)
class Difference:
    """What one text has and the other has not. Either side may be empty."""

    kind: Kind
    left: str
    right: str

    def __str__(self) -> str:
        article = "an" if self.kind is Kind.OPPOSITE else "a"
        return f"they differ in {article} {self.kind} ({_shown(self.left)} / {_shown(self.right)})"


def _shown(side: str) -> str:
    return side if 0 < len(side) <= _SHOWN_CHARS else f"{side[: _SHOWN_CHARS - 1]}…" if side else "none"


@dataclass(frozen=True, slots=True)
class Reading:
    """What decides the sense of one text.

    `poles` are its words that exclude others, by their group. `rest` is a hash of the text beyond `MAX_CHARS`, empty if
    the text is not longer.
    """

    numbers: tuple[str, ...]
    negations: int
    words: frozenset[str]
    names: frozenset[str]
    poles: tuple[tuple[int, frozenset[int]], ...]
    rest: str = ""

    @property
    def essence(self) -> int:
        """A 63-bit number, equal for texts of equal numbers, negations and `rest`, the same on every machine."""
        told = "\x1f".join([str(self.negations), *self.numbers, *([f"rest {self.rest}"] if self.rest else [])])
        return _hashed(told) >> 1

    @property
    def name_bits(self) -> int:
        """63 bits: where one is missing among the other text's `word_bits`, so is a name."""
        return _bits(map(_stem, self.names))

    @property
    def word_bits(self) -> int:
        """The bits of all words."""
        return _bits(self.words) | _bits(map(_stem, self.words))


def difference(left: str, right: str) -> Difference | None:
    """What the two texts differ in, the gravest first; None where nothing speaks against one sense."""
    return between(read(left), read(right))


def between(left: Reading, right: Reading) -> Difference | None:
    """The same for texts that were read before. Swapping the two swaps the sides and nothing else."""
    if left.rest != right.rest:
        return Difference(Kind.REST, *(f"from character {MAX_CHARS:,}" if each.rest else "" for each in (left, right)))
    if left.numbers != right.numbers:
        return Difference(Kind.NUMBER, _only(left.numbers, right.numbers), _only(right.numbers, left.numbers))
    if left.negations != right.negations:
        return Difference(Kind.NEGATION, *(("negated" if each.negations else "") for each in (left, right)))
    ours, theirs = _missing(left.names, right.words), _missing(right.names, left.words)
    if ours or theirs:
        return Difference(Kind.NAME, ", ".join(ours), ", ".join(theirs))
    return _opposed(left, right)


def read(text: str) -> Reading:
    """Read one text, in time and space linear in its length, and bounded: see `MAX_CHARS`."""
    plain = texts.normalized("NFKC", text[:MAX_CHARS]).translate(_PLAIN)
    rest = plain[MAX_CHARS:] + text[MAX_CHARS:]
    plain = plain[:MAX_CHARS]
    tokens = list(_tokens(plain))
    placed = frozenset(_placed(plain))
    words = placed | {stem for token in tokens for stem in _stems(token.text)}
    poles: dict[int, set[int]] = {}
    for word in words:
        if (found := _pole(word)) is not None:
            poles.setdefault(found[0], set()).add(found[1])
    return Reading(
        numbers=tuple(sorted(_numbers(plain))),
        negations=sum(_negates(token.text) for token in tokens) + len(_ENGLISH_NOT_YET.findall(plain)),
        words=words,
        names=placed | {name for token in tokens for name in _name(token)},
        poles=tuple(sorted((group, frozenset(sides)) for group, sides in poles.items())),
        rest=f"{_hashed(rest):016x}" if rest else "",
    )


@dataclass(frozen=True, slots=True)
class _Token:
    """A word as it stands; `initial` where a sentence begins with it."""

    text: str
    initial: bool


def _listed(words: str) -> list[str]:
    return words.split()


_PLAIN = str.maketrans({"’": "'", "‘": "'", "ʼ": "'"})  # noqa: RUF001 (these are what is looked for)
_WITHIN_WORDS = {"'", "&"}
_SENTENCE_ENDS = (".", "!", "?", "。", ":", ";", "\n", '"', "“", "(")


def _tokens(text: str) -> Iterator[_Token]:
    """The words of `text`: runs of letters and digits, and such runs joined by an apostrophe or an ampersand."""
    parts: list[str] = []
    initial, gap = True, ""
    for is_word, characters in groupby(text, key=str.isalnum):
        run = "".join(characters)
        if not is_word:
            gap = run
        elif parts and gap in _WITHIN_WORDS:
            parts += [gap, run]
        else:
            if parts:
                yield _Token("".join(parts), initial)
                initial = _ends_sentence(gap)
            parts = [run]
    if parts:
        yield _Token("".join(parts), initial)


def _ends_sentence(gap: str) -> bool:
    """Whether a sentence ends in what stands between two words."""
    mark = gap.rstrip()
    return mark.endswith(_SENTENCE_ENDS) or "\n" in gap[len(mark) :]


_Form = TypeVar("_Form")


def _remembered(function: Callable[[str], _Form]) -> Callable[[str], _Form]:
    """`function` of a word, with its results for the latest words kept."""
    cached = lru_cache(_REMEMBERED)(function)

    @wraps(function)
    def remembered(word: str) -> _Form:
        return cached(word) if len(word) <= _LONGEST_REMEMBERED else function(word)

    return remembered


def _hashed(text: str) -> int:
    return int.from_bytes(blake2b(text.encode("utf-8", "replace"), digest_size=8).digest())


@_remembered
def _bit(word: str) -> int:
    return 1 << _hashed(word) % _BITS


def _bits(words: Iterable[str]) -> int:
    return reduce(or_, map(_bit, words), 0)


# --- numbers -----------------------------------------------------------------------------

_DIGITS = compiled(r"\p{Nd}+(?:[.,:/-]\p{Nd}+)*")
_THOUSANDS = compiled(r"\p{Nd}{1,3}(?:,\p{Nd}{3})+(?:\.\p{Nd}+)?")
_DECIMAL = compiled(r"\p{Nd}+(?:\.\p{Nd}+)?")
_SCALED = compiled(rf"(\p{{Nd}}[\p{{Nd}},]*(?:\.\p{{Nd}}+)?)[{SPACE}]?(천만|백만|천|만|억|조)")
_SCALES = {"천": 3, "만": 4, "백만": 6, "천만": 7, "억": 8, "조": 12}
"""The power of ten that each stands for."""

_ENGLISH_NUMBERS = {
    word: number
    for number, word in enumerate(
        _listed(
            "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen "
            "seventeen eighteen nineteen twenty"
        )
    )
    if word != "one"  # as a rule a pronoun: "this one"
} | {"thirty": 30, "forty": 40, "fifty": 50, "sixty": 60, "seventy": 70, "eighty": 80, "ninety": 90}
_ENGLISH_NUMBERS |= {
    word: number
    for number, word in enumerate(_listed("second third fourth fifth sixth seventh eighth ninth tenth"), start=2)
} | {"twice": 2, "thrice": 3, "dozen": 12, "hundred": 100, "thousand": 1000, "million": 10**6}
_FRACTIONS = {"half": "1/2", "quarter": "1/4"}
_KOREAN_NUMBERS = {
    "한": 1, "두": 2, "세": 3, "네": 4, "다섯": 5, "여섯": 6, "일곱": 7, "여덟": 8, "아홉": 9,
}  # fmt: skip
_KOREAN_TENS = {
    "열": 10, "스물": 20, "스무": 20, "서른": 30, "마흔": 40, "쉰": 50, "예순": 60, "일흔": 70, "여든": 80, "아흔": 90,
}  # fmt: skip
_KOREAN_COUNTERS = (
    "개", "번", "명", "시간", "시", "달", "살", "주", "배", "가지", "마리", "장", "잔", "병", "권", "대", "분",
)  # fmt: skip
_AFTER_KOREAN_COUNTERS = ("이에요", "이었", "이라", "이고", "입니다", "정도", "이상", "이하")
_LONGEST_AFTER_COUNTER = 3
_HANGUL_RUN = compiled("[\uac00-\ud7a3]+")


def _numbers(text: str) -> Iterator[str]:
    """Each number in one spelling: 1,000 and 천(1천) are 1000, "two" is 2; dates and versions as they stand."""
    digits, hangul = any(map(str.isdecimal, text)), has_hangul(text)
    if digits and hangul:
        for found in _SCALED.finditer(text):
            yield _spelt(found[1], _SCALES[found[2]])
        text = _SCALED.sub(lambda _: " ", text)
    if digits:
        for number in _DIGITS.findall(text):
            yield _spelt(number) if _DECIMAL.fullmatch(number) or _THOUSANDS.fullmatch(number) else number
    for word in map(str.lower, texts.words(text)):
        if word in _ENGLISH_NUMBERS or word in _FRACTIONS:
            yield _FRACTIONS.get(word) or str(_ENGLISH_NUMBERS[word])
    if hangul:
        yield from _korean_numbers(text)


def _spelt(number: str, scale: int = 0) -> str:
    """A decimal number, times 10 to the power of `scale`, without separators and needless zeros.

    By its digits: a conversion to a float would make numbers of more than 15 digits equal.
    """
    if not number.isascii():
        number = "".join(str(unicodedata.decimal(each, each)) for each in number)
    whole, _, fraction = number.replace(",", "").partition(".")
    fraction = fraction.ljust(scale, "0")
    whole, fraction = (whole + fraction[:scale]).lstrip("0") or "0", fraction[scale:].rstrip("0")
    return f"{whole}.{fraction}" if fraction else whole


def _korean_numbers(text: str) -> Iterator[str]:
    """Numbers in native Korean before a counter, such as 두 번 or 열한 시."""
    end = 0
    for run in _HANGUL_RUN.finditer(text):
        if run.start() >= end and (counted := _counted(text, run.start())) is not None:
            number, end = counted
            if number:
                yield str(number)


def _counted(text: str, start: int) -> tuple[int, int] | None:
    """The number that is counted from `start` on, 0 for a counter alone, and where its counter ends."""
    for tens in _begun(text, start, _KOREAN_TENS):
        for ones in _begun(text, start + len(tens), _KOREAN_NUMBERS):
            at = start + len(tens) + len(ones)
            for counter in (at + 1, at) if text[at : at + 1].isspace() else (at,):
                if (end := _counter_end(text, counter)) is not None:
                    return _KOREAN_TENS.get(tens, 0) + _KOREAN_NUMBERS.get(ones, 0), end
    return None


def _begun(text: str, start: int, words: Collection[str]) -> Iterator[str]:
    """The one of `words` that begins at `start`, if one does, then no word."""
    if text.startswith(tuple(words), start):
        yield from (word for word in words if text.startswith(word, start))
    yield ""


def _counter_end(text: str, start: int) -> int | None:
    """Where the counter that begins at `start` ends; None if there is none, or a longer word begins like one."""
    if not text.startswith(_KOREAN_COUNTERS, start):
        return None
    for counter in _KOREAN_COUNTERS:
        end = start + len(counter)
        after = text[end : end + _LONGEST_AFTER_COUNTER]
        longer = len(after) == _LONGEST_AFTER_COUNTER and is_hangul(after)
        if text.startswith(counter, start) and (after.startswith(_AFTER_KOREAN_COUNTERS) or not longer):
            return end
    return None


def _only(ours: tuple[str, ...], theirs: tuple[str, ...]) -> str:
    """What stands on this side alone; where the same stand more often, all of them."""
    others = frozenset(theirs)
    alone = [number for number in ours if number not in others]
    return ", ".join(alone or ours)


# --- negation ----------------------------------------------------------------------------

_ENGLISH_NOT = frozenset(
    _listed("""
    not no never none nobody nothing nowhere neither nor without cannot unable refuse refuses refused
    rarely seldom hardly scarcely barely stopped quit
    """)
) | frozenset(_listed("cant dont doesnt didnt wont isnt arent wasnt werent couldnt shouldnt wouldnt hasnt havent"))
_ENGLISH_NOT_YET = compiled(r"\byet to\b", ignore_case=True)
_KOREAN_NOT_ALONE = frozenset({"안", "못", "아니", "아니요", "말고"})
_KOREAN_NOT = compiled(
    r"지(?:도|는|를)?(?:않|못|마|말|아니)|^(?:않|못하|못해|못했|없|아니|아닌|아닙|아녜)"
    "|[\uac00-\ud7a3](?:않|없|아니|아닌|아닙)|불가|금지"
)


@_remembered
def _negates(text: str) -> bool:
    word = text.lower()
    if has_hangul(word):
        return word in _KOREAN_NOT_ALONE or _KOREAN_NOT.search(word) is not None
    return word in _ENGLISH_NOT or word.endswith("n't")


# --- stems -------------------------------------------------------------------------------

_ENDINGS = ("ing", "ed", "es", "s", "d", "e")
_SHORTEST_STEM = 3


def _bare(word: str) -> str:
    """An English word without case and possessive."""
    return word.casefold().removesuffix("'s")


@_remembered
def _stem(word: str) -> str:
    """An English word without its commonest endings: crude, and the same on both sides."""
    for ending in _ENDINGS:
        if word.endswith(ending) and len(word) - len(ending) >= _SHORTEST_STEM:
            return word[: -len(ending)]
    return word


# --- names -------------------------------------------------------------------------------

# Words that sentences begin with, and that are therefore no names there.
_OPENERS = frozenset(
    _listed("""
    a about after all also an and any are as ask at be because before both but by can change check cancel connect
    could create delete did do does each either every explain find first for from get give had has have he help
    her here his how i if in install is it its let lets list make may maybe me might most my need new now of on
    one open or our please prefers put remove reset run say says set she should show since so some start stop
    tell than that the their them then there these they this those to try turn two under until update us use user
    users was we were what whats when where which while who whom whose why will with would yes you your add allow
    always configure deploy describe disable enable increase decrease fix hello hey hi likes like lives loves
    wants works enjoys hates dislikes owns plays studies speaks uses thanks thank ok okay only just last next
    """)
)
_OPENING_STEMS = frozenset(map(_stem, _OPENERS))
_NEVER_NAMES = frozenset({"i", "i'm", "i'd", "i've", "i'll", "ok"})
_TITLES = ("씨", "님")
_SHORTEST_TITLED = 2
_KOREAN_TOPIC = compiled("([\uac00-\ud7a3]{1,2}[^하되있없않같지르])(?:은|는|이|가|께서|에게|한테)")
_KOREAN_NO_NAMES = frozenset(
    _listed("""
    저 나 너 우리 저희 그 그녀 그들 당신 이것 그것 저것
    여기 거기 저기 누구 무엇 뭐 어디 언제 사용자 고객 회원 관리자 사람
    하 되 있 없 않 같 어떻게 이거 그거 오늘 내일 어제 지금 방법 문제 경우
    """)
)
_KOREAN_PLACES = tuple(
    _listed("""
    서울 부산 대구 인천 광주 대전 울산 세종 경기 강원 충북 충남
    전북 전남 경북 경남 제주 수원 성남 고양 용인 창원 청주 전주
    천안 포항 춘천 강릉 여수 한국 미국 일본 중국 영국
    독일 프랑스 이탈리아 스페인 러시아 캐나다 호주 인도 베트남 태국 대만
    도쿄 오사카 베이징 상하이 뉴욕 런던 파리 베를린
    """)
)


def _name(token: _Token) -> Iterator[str]:
    """The name that this word is, if it looks like one, in the form in which `words` has it."""
    text = token.text
    if has_hangul(text):
        if (name := _korean_name(text)) is not None:
            yield name
        return
    word = _bare(text)
    if not text[0].isalpha() or word in _NEVER_NAMES or _negates(text):
        return
    shouted = len(text) > 1 and text[1:] != text[1:].lower()
    if shouted or (text[0].isupper() and not (token.initial and _opens(word)) and word not in _ENGLISH_NUMBERS):
        yield word


def _opens(word: str) -> bool:
    return word in _OPENERS or _stem(word) in _OPENING_STEMS


def _missing(names: frozenset[str], words: frozenset[str]) -> list[str]:
    """The names that are not among the words, however these are inflected."""
    return sorted(name for name in names if name not in words and _stem(name) not in words)


# What stands in these places is what a sentence says of somebody, whether or not it is written as a name is.
_PLACES = compiled(
    rf"{STARTS}(?:called|named|name is|name's|from"
    r"|(?:move|moves|moved|moving) to"
    r"|(?:live|lives|lived|living|born|based|work|works|worked|working|study|studies) (?:at|for|in))"
    r" (?P<english>[\pL\p{Nl}\p{No}]+)"
    "|이름은 (?P<called>[\uac00-\ud7a3]{1,6}?)(?:예요|이에요|입니다|이야|야|이다|다|라고)"
    "|(?P<where>[\uac00-\ud7a3]{2,8}?)(?:에서|에) (?:살|일|근무|다니|다녀|태어)"
    "|(?P<titled>[\uac00-\ud7a3]{2,4}) (?:씨|님)",
    ignore_case=True,
)
_NOT_PLACED = _OPENERS | frozenset({"home", "here", "there", "different", "another", "several", "many", "same"})


def _placed(text: str) -> Iterator[str]:
    """What stands where names stand, in the form in which `words` has it."""
    for found in _PLACES.finditer(text):
        word = _bare(next(each for each in found.groups() if each is not None))
        if word not in _NOT_PLACED:
            yield word


@_remembered
def _korean_name(text: str) -> str | None:
    """A place, somebody addressed by a title, or what a sentence of a few words is about."""
    for place in _KOREAN_PLACES:
        if text.startswith(place):
            return place
    bare = _without_particle(text)
    if len(bare) > _SHORTEST_TITLED and bare.endswith(_TITLES):
        return bare[:-1]
    found = _KOREAN_TOPIC.fullmatch(text)
    return None if found is None or found[1] in _KOREAN_NO_NAMES else str(found[1])


# --- words, and those that exclude each other -----------------------------------------------

_PARTICLES = (
    "에서는", "으로는",
    "에서", "으로", "에게", "한테", "께서", "부터", "까지", "처럼", "보다", "이랑", "하고",
    "은", "는", "이", "가", "을", "를", "의", "에", "로", "와", "과", "도", "만", "랑",
)  # fmt: skip
"""Longer ones come first."""


def _without_particle(word: str) -> str:
    """`word` without the longest particle at its end."""
    return next((word.removesuffix(each) for each in _PARTICLES if word.endswith(each)), word)


_EXCLUSIVE = """
    enable / disable | enabled / disabled | on / off | left / right | up / down | start / stop | begin / end
    open / close | lock / unlock | allow / forbid deny block | accept / reject refuse | like love enjoy / dislike hate
    before / after | increase raise / decrease lower reduce | install / uninstall | upload / download | buy / sell
    login / logout | import / export | push / pull
    encrypt / decrypt | connect / disconnect | subscribe / unsubscribe
    add / remove delete | show / hide | always / never | hot / cold | true / false | success succeed pass / failure fail
    first / last | minimum min / maximum max | morning / evening | male / female | married / single divorced
    more / less fewer | above / below | inside / outside | public / private | valid / invalid | possible / impossible
    monday / tuesday / wednesday / thursday / friday / saturday / sunday | north / south / east / west
    january / february / march / april / june / july / august / september / october / november / december
    red / blue / green / yellow / black / white | tea / coffee | cat / dog
    long tall / short | big large / small little | early / late | fast / slow | rich / poor | young / old
    introvert / extrovert | full / part empty | expensive costly / cheap | hire / fire | window / aisle
    good well / bad badly | better / worse | spring / summer / autumn / winter | vegetarian vegan / meat
    husband / wife | father dad / mother mum mom | brother / sister | son / daughter | near / far | high / low
    happy / sad | healthy / sick ill | heavy / light | strong / weak | clean / dirty | wet / dry | easy / difficult hard
    daily / weekly / monthly / yearly | breakfast / lunch / dinner | yesterday / today / tomorrow
    켜 켠 켤 / 끄 끈 끌 꺼 | 시작 / 종료 중지 중단 | 열 / 닫
    허용 / 차단 거부 | 활성화 / 비활성화 | 증가 / 감소 | 늘 / 줄
    좋아 / 싫어 | 왼쪽 / 오른쪽 | 이전 / 이후 | 오전 / 오후
    로그인 / 로그아웃 | 추가 / 삭제 제거 | 성공 / 실패 | 남자 / 여자
    구매 / 판매 | 가입 / 탈퇴 | 입금 / 출금 | 최대 / 최소
    위 / 아래 | 북쪽 / 남쪽 / 동쪽 / 서쪽 | 결혼 / 이혼 | 연결 / 해제
    설치 / 제거 | 공개 / 비공개 | 가능 / 불가능 | 아침 / 저녁 | 커피 / 녹차 홍차 | 고양이 / 강아지
    긴 길어 길고 길게 / 짧 | 큰 / 작은 작아 작고 | 빠르 빠른 빨라 / 느리 느린 느려
    여름 / 겨울 / 가을 | 합격 / 불합격 떨어 | 넓 / 좁 | 일찍 / 늦 | 더운 더워 더울 / 추운 추워 추울 | 많 / 적 | 높 / 낮
    비싸 비싼 / 싸 싼 | 가까 가깝 / 멀 먼 | 알 / 모르 모릅 몰라 | 남편 / 아내 | 아버지 아빠 / 어머니 엄마 | 아들 / 딸
    매일 / 매주 / 매달 매월 / 매년 | 어제 / 오늘 / 내일
    월요일 / 화요일 / 수요일 / 목요일 / 금요일 / 토요일 / 일요일
"""


@_remembered
def _stems(text: str) -> tuple[str, ...]:
    """The forms under which a word may be found in the other text."""
    word = _bare(text)
    if not has_hangul(word):
        return word, _stem(word)
    bare = _without_particle(word) or word
    places = (place for place in _KOREAN_PLACES if word.startswith(place))
    return word, bare, *places, *([bare[:-1]] if bare.endswith(_TITLES) else [])


def _groups() -> Iterator[list[list[str]]]:
    for line in _EXCLUSIVE.strip().splitlines():
        for group in line.split("|"):
            yield [side.split() for side in group.split("/")]


_POLES: dict[str, tuple[int, int]] = {}
for _number, _group in enumerate(_groups()):
    for _side, _members in enumerate(_group):
        for _member in _members:
            _POLES.setdefault(_member if has_hangul(_member) else _stem(_member), (_number, _side))
_LONGEST_KOREAN_POLE = 4
_LONGEST_SHORT_VERB = 3


def _uncompared(word: str) -> Iterator[str]:
    """The stem of a word, and what it is if it is a comparative or a superlative: bigger is big, earlier is early."""
    yield _stem(word)
    for ending in ("er", "est"):
        bare = word.removesuffix(ending)
        if bare == word or len(bare) < _SHORTEST_STEM:
            continue
        yield from (_stem(bare), bare)
        if bare[-1] == bare[-2]:
            yield bare[:-1]
        if bare[-1] == "i":
            yield f"{bare[:-1]}y"


@_remembered
def _pole(word: str) -> tuple[int, int] | None:
    """The group of words that exclude each other in which this one stands, and its side."""
    if not has_hangul(word):
        return next((_POLES[form] for form in _uncompared(word) if form in _POLES), None)
    for length in range(min(len(word), _LONGEST_KOREAN_POLE), 0, -1):  # verbs are inflected at their end
        if (found := _POLES.get(word[:length])) is not None and (length > 1 or len(word) <= _LONGEST_SHORT_VERB):
            return found
    return None


_REVERSING = ("un", "dis", "non", "in", "im", "ir", "il", "mis")
_SHORTEST_REVERSED = 4


def _contrary(word: str) -> str | None:
    """What a prefix such as "dis" turns round in `word`."""
    bare = next((word.removeprefix(each) for each in _REVERSING if word.startswith(each)), "")
    return bare if len(bare) >= _SHORTEST_REVERSED and bare.isalnum() else None


def _reversed(ours: frozenset[str], theirs: frozenset[str]) -> tuple[str, str] | None:
    """A word of ours, such as distrust, whose contrary the other text has instead."""
    for word in sorted(ours - theirs):
        if (bare := _contrary(word)) is not None and bare in theirs and bare not in ours:
            return word, bare
    return None


def _opposed(left: Reading, right: Reading) -> Difference | None:
    """A group from which both take words, and not the same ones; a word that is another one's contrary."""
    if found := _reversed(left.words, right.words):
        return Difference(Kind.OPPOSITE, *found)
    if found := _reversed(right.words, left.words):
        return Difference(Kind.OPPOSITE, *reversed(found))
    theirs = dict(right.poles)
    for group, ours in left.poles:
        other = theirs.get(group)
        if other is not None and ours != other:
            return Difference(Kind.OPPOSITE, _told(left, group), _told(right, group))
    return None


def _told(reading: Reading, group: int) -> str:
    return max((word for word in reading.words if (found := _pole(word)) and found[0] == group), key=_showing)


def _showing(word: str) -> tuple[int, str]:
    """A word before its stem."""
    return len(word), word
