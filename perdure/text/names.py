"""Finds names in English and Korean text: words that are spelled like names, or stand next to words such as "called".

Called by `contradiction`.
"""

from __future__ import annotations

from collections.abc import Iterator

from perdure.text.linear import has_hangul
from perdure.text.numbers import ENGLISH_NUMBERS
from perdure.text.patterns import STARTS, compiled
from perdure.text.words import (
    KOREAN_PLACES,
    TITLES,
    Token,
    base_form,
    cached_by_word,
    is_negation,
    stem,
    without_particle,
    word_list,
)

# These words are not names although they have a capital letter at the beginning of a sentence.
_OPENERS = frozenset(
    word_list("""
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
_OPENING_STEMS = frozenset(map(stem, _OPENERS))
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


def names_of(token: Token) -> Iterator[str]:
    """If the token is spelled like a name, yield the name in a form that `words.forms` returns for the token's text."""
    text = token.text
    if has_hangul(text):
        if (name := _korean_name(text)) is not None:
            yield name
        return
    word = base_form(text)
    if not text[0].isalpha() or word in _NEVER_NAMES or is_negation(text):
        return
    inner_capital = len(text) > 1 and text[1:] != text[1:].lower()
    opens = token.initial and _opens_sentences(word)
    if inner_capital or (text[0].isupper() and not opens and word not in ENGLISH_NUMBERS):
        yield word


def _opens_sentences(word: str) -> bool:
    return word in _OPENERS or stem(word) in _OPENING_STEMS


def missing(names: frozenset[str], words: frozenset[str]) -> list[str]:
    """The names of which neither the whole name nor its stem is in `words`."""
    return sorted(name for name in names if name not in words and stem(name) not in words)


# A word in one of these positions ("lives in X") counts as a name even in lower case.
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
_NO_NAMES_BY_POSITION = _OPENERS | frozenset(
    {"home", "here", "there", "different", "another", "several", "many", "same"}
)


def names_by_position(text: str) -> Iterator[str]:
    """Yield each word in a position where a name is expected, in a form that `words.forms` returns for the word."""
    for found in _NAME_POSITIONS.finditer(text):
        word = base_form(next(each for each in found.groups() if each is not None))
        if word not in _NO_NAMES_BY_POSITION:
            yield word


@cached_by_word
def _korean_name(text: str) -> str | None:
    """The name in a Korean word; `None` if the word contains no name.

    A name is a known place, a word before a form of address, or two or three syllables before a particle such as 는.
    """
    for place in KOREAN_PLACES:
        if text.startswith(place):
            return place
    bare = without_particle(text)
    if len(bare) > _SHORTEST_TITLED and bare.endswith(TITLES):
        return bare[:-1]
    found = _KOREAN_TOPIC.fullmatch(text)
    return None if found is None or found[1] in _KOREAN_NO_NAMES else str(found[1])
