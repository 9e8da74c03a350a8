"""Splits English and Korean text into words, and finds stems, negations and words that exclude each other.

Words that exclude each other are, for example, open and close, or the days of the week. The module uses rules and short
word lists. Callers compare two texts by the same rules, so a crude stem is good enough. Called by `contradiction` and
by the offline model.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from perdure.text.linear import has_hangul
from perdure.text.patterns import compiled

_CACHED_WORDS = 20_000
_LONGEST_CACHED = 64
"""The most characters of a cached word. A long text without spaces is one word, which would stay in memory."""

_WORD = compiled(r"[\pL\pN]+(?:['&][\pL\pN]+)*")
_SENTENCE_ENDS = frozenset('.!?\u3002:;"\u201c(\n')


@dataclass(frozen=True, slots=True)
class Reading:
    """What is known of one word.

    `base` is the word in lower case, without a possessive ending. `forms` has the word and its stem; in Korean also the
    word without a particle or a form of address, and the place that it names. Words of two texts are compared by their
    forms. `opposites` has the number of each group of `_EXCLUSIVE` that has the word, and the word's side in the group.
    """

    base: str
    forms: frozenset[str]
    negates: bool
    opposites: frozenset[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class Token:
    """A word in its original spelling. `initial` is True if a sentence begins with the word."""

    text: str
    initial: bool

    def read(self) -> Reading:
        return _cached_reading(self.text) if len(self.text) <= _LONGEST_CACHED else _reading(self.text)


def tokens(text: str) -> Iterator[Token]:
    """The words of `text`: runs of letters and digits, joined across a single apostrophe or ampersand."""
    end = 0
    for found in _WORD.finditer(text):
        yield Token(found[0], not end or not _SENTENCE_ENDS.isdisjoint(text[end : found.start()]))
        end = found.end()


def word_list(text: str) -> list[str]:
    return text.split()


# --- stems, particles and negations ------------------------------------------------------

_ENDINGS = ("ing", "ed", "es", "s", "d", "e")
_SHORTEST_STEM = 3
_PARTICLES = (
    "에서는", "으로는",
    "에서", "으로", "에게", "한테", "께서", "부터", "까지", "처럼", "보다", "이랑", "하고",
    "은", "는", "이", "가", "을", "를", "의", "에", "로", "와", "과", "도", "만", "랑",
)  # fmt: skip
"""Korean particles. Longer ones come first, so that the first match is the longest."""

TITLES = ("씨", "님")
"""Korean forms of address, which follow a name."""

KOREAN_PLACES = word_list("""
    서울 부산 대구 인천 광주 대전 울산 세종 경기 강원 충북 충남 전북 전남 경북 경남 제주 수원 성남 고양 용인 창원 청주
    전주 천안 포항 춘천 강릉 여수 한국 미국 일본 중국 영국 독일 프랑스 이탈리아 스페인 러시아 캐나다 호주 인도 베트남
    태국 대만 도쿄 오사카 베이징 상하이 뉴욕 런던 파리 베를린
    """)

_ENGLISH_NOT = frozenset(
    word_list("""
    not no never none nobody nothing nowhere neither nor without cannot unable refuse refuses refused rarely seldom
    hardly scarcely barely stopped quit cant dont doesnt didnt wont isnt arent wasnt werent couldnt shouldnt wouldnt
    hasnt havent
    """)
)
_KOREAN_NOT_ALONE = frozenset({"안", "못", "아니", "아니요", "말고"})
_KOREAN_NOT = compiled(
    r"지(?:도|는|를)?(?:않|못|마|말|아니)|^(?:않|못하|못해|못했|없|아니|아닌|아닙|아녜)"
    "|[\uac00-\ud7a3](?:않|없|아니|아닌|아닙)|불가|금지"
)


def stem(word: str) -> str:
    """An English word without a common ending, such as "ing" or "ed"."""
    for ending in _ENDINGS:
        if word.endswith(ending) and len(word) - len(ending) >= _SHORTEST_STEM:
            return word[: -len(ending)]
    return word


def without_particle(word: str) -> str:
    """A Korean word without the longest particle at its end; `word` if it is only a particle."""
    return next((word.removesuffix(each) for each in _PARTICLES if word.endswith(each)), word) or word


def _reading(text: str) -> Reading:
    base, negates = text.casefold().removesuffix("'s"), text.lower() in _ENGLISH_NOT or text.lower().endswith("n't")
    forms = {base}
    if has_hangul(text):
        bare = without_particle(base)
        forms |= {bare, bare[:-1] if bare.endswith(TITLES) else bare}
        forms |= {place for place in KOREAN_PLACES if base.startswith(place)}
        negates = base in _KOREAN_NOT_ALONE or _KOREAN_NOT.search(base) is not None
    forms |= set(map(stem, forms))
    return Reading(base, frozenset(forms), negates, frozenset(found for form in forms if (found := _opposite(form))))


_cached_reading = lru_cache(_CACHED_WORDS)(_reading)


# --- words that exclude each other -------------------------------------------------------

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

_OPPOSITES = {
    member if has_hangul(member) else stem(member): (number, side)
    for number, group in reversed([*enumerate(_EXCLUSIVE.replace("\n", "|").split("|"))])
    for side, members in enumerate(group.split("/"))
    for member in members.split()
}
_SIDES = [group.count("/") + 1 for group in _EXCLUSIVE.replace("\n", "|").split("|")]
_LONGEST_KOREAN_OPPOSITE = 4
_LONGEST_SHORT_VERB = 3


def _opposite(word: str) -> tuple[int, int] | None:
    """The number of the word's group in `_EXCLUSIVE`, and its side in the group; `None` if no group has the word."""
    if not has_hangul(word):
        candidates = [stem(word)]
        for bare in (word.removesuffix("er"), word.removesuffix("est")):  # "taller", "bigger", "earlier"
            if _SHORTEST_STEM <= len(bare) < len(word):
                candidates += [stem(bare), bare, bare[:-1] if bare[-1] == bare[-2] else f"{bare[:-1]}y"]
        return next((_OPPOSITES[each] for each in candidates if each in _OPPOSITES), None)
    for length in range(min(len(word), _LONGEST_KOREAN_OPPOSITE), 0, -1):  # verbs are inflected at their end
        if (found := _OPPOSITES.get(word[:length])) and (length > 1 or len(word) <= _LONGEST_SHORT_VERB):
            return found
    return None


def sides(word: str) -> int:
    """How many sides the word's group in `_EXCLUSIVE` has, such as 2 for "cheap" and 7 for "monday"; 0 without one."""
    found = _opposite(word)
    return 0 if found is None else _SIDES[found[0]]
