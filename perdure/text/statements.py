"""Relates two statements about a person: does the later one repeat the earlier one, change it, or neither?

    "I live in Lyon." + "My home is in Lyon."     → same
    "I live in Lyon." + "I moved to Paris."       → changes: one home, another value
    "I live in Lyon." + "My sister lives in Nice." → unrelated: another subject
    "I live in Lyon." + "I was born by the sea."  → unknown

The module knows no meaning. It reads a statement's subject, its attribute (such as "home") with the attribute's value,
its taste, and whether it says that something is over, by rules and short word lists in English, German, Spanish,
Korean, Japanese and Chinese. `contradiction` compares numbers, names and opposites. A statement that the rules cannot
read is `UNKNOWN`. `SAME` and `CHANGES` are therefore rare rather than wrong.

Called by the judge `guard` of consolidation, and by the tool `remember`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache

from perdure.text.contradiction import DifferenceKind, difference, features, without_numbers
from perdure.text.linear import has_hangul, normalized
from perdure.text.patterns import Match, Pattern, compiled
from perdure.text.words import without_particle, word_list

USER = "user"
"""The subject of a statement of the user about themselves."""

MAX_CHARS = 1_000
"""The most characters of a statement that are read. A memory has no more."""

_CACHED = 2_000
_SAME_TOPIC = 0.5
_SHARED_TOPIC = 0.66
_SAME_FRAME = 0.5


class Relation(StrEnum):
    """What a later statement is to an earlier one.

    `UNRELATED`: they are about different subjects or different values of an attribute that has several. `UNKNOWN`: the
    rules do not tell.
    """

    SAME = "same"
    CHANGES = "changes"
    UNRELATED = "unrelated"
    UNKNOWN = "unknown"


SEVERAL = frozenset({"allergy", "child", "hobby", "language", "pet", "sibling", "taste"})
"""The attributes of which a subject has several values. A further value leaves the others as they are."""

SINGLE = frozenset({"age", "birthday", "employer", "home", "manager", "name", "occupation", "phone"})
"""The attributes of which a subject has one value at a time. A new value ends the earlier one."""


@dataclass(frozen=True, slots=True)
class Statement:
    """What the rules read in one statement.

    `subject` is `USER`, a relative or an animal such as "sister", or a name. `value` has the words of the attribute's
    value, `head` the word next to the attribute's cue. `words` are those that carry meaning. `is_over`: it denies or
    ends something. `taste`: 1 likes, -1 dislikes, 0 neither. `frame` has the words in their order.
    """

    subject: str
    attribute: str | None
    head: str
    value: frozenset[str]
    words: frozenset[str]
    is_over: bool
    taste: int
    frame: tuple[str, ...]


def relate(earlier: str, later: str) -> Relation:
    """The relation of `later` to `earlier`. `SAME` is symmetric."""
    old, new = read(earlier), read(later)
    if old.subject != new.subject:
        return Relation.UNRELATED
    if old.attribute is not None and old.attribute == new.attribute:
        return _of_attribute(old, new, differ=differ(earlier, later))
    if old.taste and new.taste:
        return _of_tastes(old, new, differ=differ(earlier, later))
    if old.words == new.words and old.words and not differ(earlier, later):
        return Relation.SAME
    return _of_topic(old, new, earlier, later)


def differ(earlier: str, later: str) -> bool:
    """Whether the statements cannot be the same: they differ in a number, a name, a denial, a taste or one word."""
    old, new = read(earlier), read(later)
    if (old.is_over, old.subject) != (new.is_over, new.subject) or (old.taste * new.taste) < 0:
        return True
    found = difference(earlier, later)
    if found is not None:
        is_noun = found.kind is DifferenceKind.NAME and not is_compared(earlier, later)
        is_denied_taste = found.kind is not DifferenceKind.NAME and old.taste == new.taste != 0
        if not is_noun and not (is_denied_taste and old.words == new.words):
            return True
    if old.attribute is not None and old.attribute == new.attribute and old.value and new.value:
        return old.value != new.value
    return _differ_in_one_place(old.frame, new.frame)


def overlap(earlier: str, later: str) -> bool:
    """Whether the statements have a word, a number or an attribute in common, or one of them has no word to compare."""
    old, new = read(earlier), read(later)
    if not old.words or not new.words or (old.attribute is not None and old.attribute == new.attribute):
        return True
    return bool(old.words & new.words or {*features(earlier).numbers} & {*features(later).numbers})


@lru_cache(_CACHED)
def read(text: str) -> Statement:
    """Read one statement, in linear time."""
    spelled = normalized("NFKC", text[:MAX_CHARS]).strip()
    plain = spelled.casefold().replace("ß", "ss").replace("’", "'")  # noqa: RUF001 (the character to replace)
    attribute, head, value = _attribute(spelled, plain)
    taste = -1 if _DISLIKES.search(plain) else 1 if _LIKES.search(plain) else 0
    is_over = _OVER.search(plain) is not None
    bare = _EMPTY.sub(_blank, _DISLIKES.sub(_blank, _LIKES.sub(_blank, without_numbers(plain))))
    frame = tuple(_words(bare))
    # "do not like" is a dislike, and denies nothing else
    return Statement(
        USER if attribute == "manager" else _subject(spelled, plain, attribute),
        attribute,
        head,
        value,
        frozenset(frame),
        is_over and not taste,
        -taste if is_over and taste > 0 else taste,
        frame,
    )


def _of_attribute(old: Statement, new: Statement, *, differ: bool) -> Relation:  # noqa: C901, PLR0911 (a table)
    shared, either = old.value & new.value, old.value | new.value
    if old.attribute in SEVERAL:
        if not shared or (shared not in (old.value, new.value) and len(shared) < _SAME_TOPIC * len(either)):
            return Relation.UNRELATED if old.value and new.value else Relation.UNKNOWN
        if old.is_over != new.is_over:
            return Relation.CHANGES
        return Relation.SAME if old.value == new.value and not differ else Relation.UNKNOWN
    if not old.value or not new.value:
        return Relation.CHANGES if old.is_over != new.is_over else Relation.UNKNOWN
    if old.value == new.value:
        if old.is_over != new.is_over:
            return Relation.CHANGES
        return Relation.UNKNOWN if differ else Relation.SAME
    if new.is_over and shared:
        return Relation.CHANGES
    is_name = old.attribute in ("name", "manager") and shared not in (old.value, new.value)
    if is_name or (old.head not in new.value and new.head not in old.value):
        return Relation.CHANGES
    return Relation.UNKNOWN


def _of_tastes(old: Statement, new: Statement, *, differ: bool) -> Relation:
    shared = old.words & new.words
    if not shared:
        return Relation.UNRELATED if old.words and new.words and not differ else Relation.UNKNOWN
    if old.taste != new.taste:
        alike = len(shared) >= _SHARED_TOPIC * min(len(old.words), len(new.words))
        return Relation.CHANGES if alike else Relation.UNKNOWN
    return Relation.SAME if old.words == new.words and not differ else Relation.UNKNOWN


def _of_topic(old: Statement, new: Statement, earlier: str, later: str) -> Relation:
    """Statements without a known attribute: one topic, and another number or a denial."""
    shared = old.words & new.words
    if not shared:
        return Relation.UNKNOWN
    if old.is_over != new.is_over:
        alike = len(shared) >= _SHARED_TOPIC * min(len(old.words), len(new.words))
        return Relation.CHANGES if alike else Relation.UNKNOWN
    numbers, others = features(earlier).numbers, features(later).numbers
    if numbers and others and numbers != others and not _are_years({*numbers} ^ {*others}):
        alike = len(shared) >= _SAME_TOPIC * len(old.words | new.words)
        return Relation.CHANGES if alike else Relation.UNKNOWN
    return Relation.UNKNOWN


def _are_years(numbers: set[str]) -> bool:
    """Events of two years may both have happened."""
    return all(len(each) == 4 and each[:2] in ("19", "20") for each in numbers)  # noqa: PLR2004 (digits of a year)


def _differ_in_one_place(left: tuple[str, ...], right: tuple[str, ...]) -> bool:
    """Whether one run of words is all that differs, most words being the same: "I drink tea" and "I drink juice"."""
    most = min(len(left), len(right))
    before = next((at for at in range(most) if left[at] != right[at]), most)
    after = next((at for at in range(most - before) if left[-1 - at] != right[-1 - at]), most - before)
    gaps = [frame[before : len(frame) - after] for frame in (left, right)]
    return all(gaps) and before + after >= _SAME_FRAME * max(len(left), len(right))


def _blank(_: Match) -> str:
    return " "


def _nothing(_: Match) -> str:
    return ""


# --- words -------------------------------------------------------------------------------

_SPACED = r"\p{Latin}\p{Greek}\p{Cyrillic}\p{Hangul}\p{Arabic}\p{Hebrew}\p{Devanagari}\p{Thai}\p{M}"
_WORD = compiled(rf"\p{{Han}}|[\p{{Katakana}}ー]+|\p{{Hiragana}}+|[{_SPACED}\p{{Nd}}]+(?:'[{_SPACED}]+)?")
_HIRAGANA = range(0x3040, 0x30A0)
_STOP_WORDS = frozenset(
    word_list("""
    a an and are as at be been by do does for from had has have i i'm i've i'd in is it its me my mine now of on or
    our so the their these this those to user user's users was we were with am got work works worked working currently
    really very much any
    anymore more these days each every all usually better last month since after longer turned out wrong
    als am an auf bei das dem den der des die ein eine einen einer einem es für fuer gern gerne habe hat ich im in ist
    ihr inzwischen jetzt mein meine meinem meinen meiner meines nach nun sehr sein seit unser unsere um und viel von
    vom wir zu zum zur nutzer nutzerin benutzer doch mehr uhr findet statt liegt betragt beträgt zahle bin haben
    a al ahora con de del desde el en es esta está este la las lo los me mi mis mucho muy mío nuestra nuestro o para por
    que se ser son soy su sus tengo tiene un una unos y ya usuario usuaria he hemos fue hace pago
    actualmente cada más error
    저 나 제 내 우리 저희 사용자 안 못 그 이제 지금 현재 매우 아주 정말 매주 모두 있어요 있습니다 있다 있고
    이에요 예요 입니다
    이다 했어요 합니다 한다 해요 거예요 겁니다 월 원이에요 원입니다 원이다 더 이상 때문에 씨예요 씨입니다
    だ です ます
    """)
)
_EMPTY = compiled(
    r"月 |私|僕|俺|うち|ユーザー|今|毎週|每个|每|现在|用户"
    r"|我|你|的|了|是|在|有|很|也|都|和|就|对|說|说|这|那"
    r"|一个|个|个|從|从|起|到|不再|再|不|没|被|医生|给|付|元|円|月に|症"
    r"|allergisch|allergies?|allergic|allergien?|alergias?|al[eé]rgic[oa]s?|알레르기가?는?|알러지가?|アレルギー|过敏"
    r"|\b(?:not?|never|no longer|don't|doesn't|nicht|keinen?|keine[rm]?|nunca)\b|取消|中止|취소\p{Hangul}*"
    r"|\b(?:cancell?ed|plan(?:s|ned|ning)?|going|abgesagt|planen?|geplant|cancelado|cancelé|vamos)\b|계획\p{Hangul}*|計画|计划"
)
"""What carries no meaning of its own: pronouns and particles of scripts without spaces, cues, and denials."""

_ENDINGS = ("ungen", "ing", "es", "en", "er", "ed", "s", "e", "n", "o", "a")
_SHORTEST_STEM = 3
_SYNONYMS = {
    "kid": "child", "kids": "child", "children": "child", "meeting": "treffen", "viaje": "visitar", "trip": "visit",
    "apartment": "flat", "mum": "mother", "mom": "mother", "dad": "father",
}  # fmt: skip


def _words(text: str) -> list[str]:
    """The words that carry meaning, in their crude stems.

    Each ideograph is one word. A run of hiragana is one, unless it is made of particles and endings.
    """
    found = []
    for each in _WORD.finditer(text):
        word = each[0]
        if ord(word[0]) in _HIRAGANA and _KANA_ENDING.fullmatch(word):
            continue
        bare = without_particle(without_particle(word)) if has_hangul(word) else word
        if word not in _STOP_WORDS and bare not in _STOP_WORDS:
            found.append(_stem(bare))
    return found


def _stem(word: str) -> str:
    if has_hangul(word):
        return _KOREAN_ENDING.sub(_nothing, word) or word
    word = _SYNONYMS.get(word, word.removesuffix("'s"))
    for ending in _ENDINGS if word.isalpha() else ():
        if word.endswith(ending) and len(word) - len(ending) >= _SHORTEST_STEM:
            return word[: -len(ending)]
    return word


_KANA_ENDING = compiled(
    r"\p{Hiragana}{0,2}(?:は|が|を|に|で|と|の|も|へ|から|です|でした|だ|ます|ました|まし|いて|いる|います|して|した|しま|て|た|る"
    r"|あります|ある|なり|なりました|なっ|った|いい)*"
)
_KOREAN_ENDING = compiled(
    "(?:이에요|예요|입니다|이다|이야|해요|합니다|하다|한다|했어요|하고|하지|워요|우고|셔요|시지|시는|아요|어요|습니다|는다|고|요|다)$"
)


# --- denials and tastes -------------------------------------------------------------------

_OVER = compiled(
    r"\b(?:not|no longer|never|don't|doesn't|didn't|isn't|aren't|won't|can't|stopped|quit|cancell?ed|called off)\b"
    r"|\b(?:gave up|is gone|left)\b"
    r"|\b(?:nicht|kein(?:e|en|er|em)?|nie|abgesagt|storniert|aufgehört|ist weg|gekündigt|verlassen)\b"
    r"|\b(?:no|ya no|nunca|cancel(?:ado|amos|é)|dej(?:é|ado) de)\b"
    r"|더 ?이상|않|(?:^| )안 |없[어습는다]|아니|취소|그만|못해|끊었"
    r"|ません|ない|なく|なか|じゃな|やめ|中止|取り?消|キャンセル"
    r"|不过敏|不[^错同管过]|没|取消|戒了"
)
_LIKES = compiled(
    r"\b(?:like[sd]?|lov(?:e|es|ed)|enjoy(?:s|ed)?|prefer(?:s|red)?|mag|liebe|liebt|gern|gerne|bevorzuge)\b"
    r"|\b(?:gusta[n]?|encanta[n]?|adoro|prefiero)\b|좋아|즐겨|好き|喜欢|喜歡|爱[^好]"
)
_DISLIKES = compiled(
    r"\b(?:hate[sd]?|dislike[sd]?|detest[s]?|hasse|hasst|verabscheue|odi[oa]|detesto)\b|싫|嫌い|讨厌|討厭"
)


# --- subjects ----------------------------------------------------------------------------

_PARTIES = {
    word: party
    for party, words in {
        "sister": "sister schwester hermana 여동생 누나 언니 妹 姉 姐姐 妹妹",
        "brother": "brother bruder hermano 남동생 형 오빠 兄 弟 哥哥 弟弟",
        "mother": "mother mum mom mutter madre 어머니 엄마 母 妈妈 母亲",
        "father": "father dad vater padre 아버지 아빠 父 爸爸 父亲",
        "wife": "wife ehefrau frau esposa 아내 妻 妻子 老婆 太太",
        "husband": "husband ehemann mann marido esposo 남편 夫 丈夫 老公",
        "partner": "partner girlfriend boyfriend novia novio partnerin 여자친구 남자친구 彼女 彼氏 女朋友 男朋友",
        "son": "son sohn sohnes hijo 아들 息子 儿子",
        "daughter": "daughter tochter hija 딸 娘 女儿",
        "friend": "friend freund freundin amigo amiga 친구 友達 友人 朋友",
        "neighbour": "neighbour neighbor nachbar nachbarin vecino vecina 이웃 隣人 邻居",
        "colleague": "colleague kollege kollegin colega 동료 同僚 同事",
        "dog": "dog hund hundes perro perra 강아지 犬 狗",
        "cat": "cat katze kater gato gata 고양이 猫",
    }.items()
    for word in words.split()
}
_FIRST_PERSON = frozenset(word_list("i i'm i've i'd i'll we ich wir user nutzer nutzerin usuario usuaria yo nosotros"))
_POSSESSIVES = compiled(r"(?:my|our|his|her|their|user's|mein\w*|unser\w*|mis?|nuestr\w+|su)")
_NAMED = compiled(
    r"^(?P<name>\p{Lu}[\p{L}\p{M}]+) (?:lives?|moved|works?|is|has|likes|loves|hates|prefers|wohnt|lebt|arbeitet|heißt"
    r"|ist|hat|mag|liebt|vive|trabaja|es|tiene|se)\b"
)
_OWNED = compiled(r"\b(?:my|mein|meine|mi)\b")
_NOT_NAMED = frozenset(
    word_list("""
    he she it this that there what who everybody everyone nobody i user er sie es das dies der die wer alle jeder ese
    esto eso ella él todo nadie
    """)
)
_SPANISH_FIRST = compiled(r"^(?:ahora |ya no |ya |en \w+ |desde \w+ )?(?:\w+[oé]|me|soy|estoy|voy|he|tengo)\b")
_UNSPACED_PARTY = compiled(
    r"^(?:私の|うちの|僕の|我的|我家的|我家|我|用户的|用户|ユーザーの)?(?P<party>"
    + "|".join(sorted((word for word in _PARTIES if ord(word[0]) in range(0x3400, 0xA000)), key=len, reverse=True))
    + r")(?P<rest>.?)"
)
_UNSPACED_TOPIC = compiled(
    r"^(?P<topic>[\p{Han}\p{Katakana}ーさんくちゃ]{2,8}?)(?:は|が).*(?:住|働|勤)"
    r"|^(?P<named>\p{Han}{2,4}?)(?:现在|已经)?(?:住在|搬到|在.+(?:工作|上班))"
)
_KOREAN_TOPIC = compiled(
    r"^(?P<topic>\p{Hangul}{2,4}?)(?:은|는|이|가) .*(?:살|산다|이사|일해|일한|근무|다니|다녀|이직)"
)
_NO_TOPIC = compiled(r"私|僕|俺|我|用户|ユーザー|家|今|仕事|職業|저|나|사용자|집|직업|월|회사|现在|从|銀行|学校|住|搬")
_KOREAN_OWNED = ("이름", "나이", "집", "직업", "생일")


def _subject(spelled: str, plain: str, attribute: str | None) -> str:  # noqa: C901, PLR0911 (each way to name it)
    """Whom the statement is about. A statement that names nobody is about the user."""
    party = _UNSPACED_PARTY.match(plain)
    if party is not None:
        return _PARTIES[party["party"]] if plain[0] in "我用" or party["rest"] in "はがのも" else USER
    tokens = plain.replace(",", " ").replace(".", " ").split()
    for at, token in enumerate(tokens[:5]):
        if has_hangul(token):
            bare = without_particle(token)
            owns = at + 1 < len(tokens) and tokens[at + 1].startswith(_KOREAN_OWNED)
            if bare in _PARTIES and (token[len(bare) :] in ("은", "는", "이", "가", "의", "도") or owns):
                return _PARTIES[bare]
            continue
        if token in _FIRST_PERSON or (at == 0 and _SPANISH_FIRST.match(plain)):
            return USER
        word = token.removesuffix("'s")
        if word in _PARTIES and (at == 0 or _POSSESSIVES.fullmatch(tokens[at - 1])):
            return _PARTIES[word]
    named = _NAMED.match(spelled)
    if named is not None and named["name"].casefold() not in _NOT_NAMED and not _OWNED.search(plain):
        return str(named["name"].casefold())
    if attribute in ("home", "employer", "occupation"):
        found = _KOREAN_TOPIC.match(plain) or _UNSPACED_TOPIC.match(plain)
        topic = next((each for each in found.groups() if each), None) if found is not None else None
        if topic is not None and not _NO_TOPIC.search(topic):
            return str(topic)
    return USER


def is_compared(*texts: str) -> bool:
    """Whether `contradiction` can compare the texts: each has a word that only English has, or is Korean.

    In German each noun has a capital letter, as names do in English, and in Spanish the first word may be a verb.
    """
    return all(has_hangul(text) or _ENGLISH.search(text.casefold()) is not None for text in texts)


_ENGLISH = compiled(r"\b(?:i|i'm|i've|my|the|user|user's|is|are|we|does|don't|lives|works|likes)\b")

# --- attributes --------------------------------------------------------------------------

_AFTER = {
    "home": (
        r"\b(?:liv(?:e|es|ed|ing)|resid(?:e|es|ing)|based) (?:now )?(?:in|at|on)\b"
        r"|\bmov(?:e|es|ed|ing) to\b|\brelocated to\b"
        r"|\b(?:home|house|flat|apartment) is (?:now )?in\b"
        r"|\b(?:wohn|leb)(?:e|t|en)\b(?: \pL+){0,3}? in\b|\bnach (\S+) (?:um)?gezogen|\bzieh(?:e|t) nach\b"
        r"|\bzuhause ist (?:jetzt )?in\b|\bin (\S+) zu hause\b"
        r"|\bviv(?:o|e|imos)\b(?: ahora)? en\b|\bmud\pL+ a\b|\b(?:casa|hogar) est[aá](?: ahora)? en\b"
        r"|집은 ?(\S+)에 있|(?:家|自宅)は|住在|搬到|搬去|家在"
    ),
    "employer": (
        r"\bwork(?:s|ed|ing)? (?:at|for)\b|\bjoined\b|\bemployer is\b"
        r"|\barbeite[tn]?\b(?: \pL+){0,2}? (?:bei|für)\b|\barbeitgeber ist\b"
        r"|\btrabaj\pL+(?: ahora)? (?:en|para)\b|\bempresa es\b"
        r"|在([^在]{1,8})(?:工作|上班|任职)|跳槽到|入职"
    ),
    "occupation": (
        r"\bwork(?:s|ed|ing)? as\b|\bjob is\b|\boccupation is\b|\barbeite[tn]?\b(?: \pL+){0,2}? als\b|\bberuf ist\b"
        r"|\btrabaj\pL+(?: ahora)? como\b|직업은|(?:仕事|職業)は|(?:职业|工作)是"
    ),
    "name": (
        r"\bname is\b|\bname's\b|\bcalled\b|\bnamed\b|\bheiss(?:e|t|en)\b|\bname(?: \pL+){0,2} ist\b"
        r"|\b(?:me|se) llam[oa]\b|\bnombre(?: de mi \pL+)? es\b|이름은|名前は|名字是|叫|[犬猫]は(.+)と(?:いい|言い)"
    ),
    "manager": (
        r"\b(?:manager|boss) is\b|\bchef(?:in)? ist(?: jetzt)?\b|\bjef[ea] es(?: ahora)?\b"
        r"|상사는|上司は|(?:上司|老板)是"
    ),
    "allergy": (
        r"\ballerg(?:ic|ies|y)(?: to)?\b|\ballergi(?:e|en|sch)(?: gegen)?\b"
        r"|\bal[eé]rgi(?:a|as|co|ca)(?: a(?:l| los| las)?)?\b"
        r"|(?:알레르기|알러지)(?:가|는|도|를)?|アレルギー|过敏"
    ),
    "age": (
        r"\b(?:am|i'm|is|turned|now) (\pN{1,3})(?: years old|$|\.| today)"
        r"|\b(?:bin|ist)(?: jetzt)? (\pN{1,3}) jahre alt\b"
        r"|\b(?:tengo|tiene)(?: ahora)? (\pN{1,3}) años|(\pN{1,3}) ?(?:살|세)(?:이에요|예요|입니다|이다|$)"
        r"|(\pN{1,3})歳(?:です|にな|だ|。|$)|(\pN{1,3})岁(?:了|。|\x{ff0c}|$)"
    ),
}  # fmt: skip
_BEFORE = {
    "home": r"(?:에서?|으?로) ?(?:지금 |이제 )?(?:살|산다|거주|이사)|(?:に|へ)(?:住|引っ?越)|で暮ら",
    "employer": r"에서 ?(?:일|근무)|에 ?(?:다니|다녀|입사|취직)|으?로 ?이직|で働|に勤|に転職|に入社|で勤務",
    "manager": r" is my (?:manager|boss)\b",
}
_CUES: dict[str, tuple[Pattern | None, Pattern | None]] = {
    name: (
        compiled(_AFTER[name]) if name in _AFTER else None,
        compiled(_BEFORE[name]) if name in _BEFORE else None,
    )
    for name in (*_AFTER,)
}
_RUN = compiled(rf"\p{{Han}}+|[\p{{Katakana}}ー]+|[{_SPACED}]+(?:'[{_SPACED}]+)?")
_NO_VALUE = compiled(
    r"[一-九十]月|\p{Nd}+ ?(?:月|월)(?:부터|から)?|工作|上班|任职|住|搬|现在|改名|用户"
    r"|我|的|了|对|不再|不|有|症|医生|说|在|从|起|是|叫"
    r"|이사|사용자|더 이상|[없있]\p{Hangul}*|私|僕|ユーザー|今|昨年|去年|名前|犬|猫"
    r"|\bmonths?\b|\bweeks?\b|\byears?\b"
)
_TIMELY = frozenset(
    word_list("""
    month last week year summer winter for good just recently seit letzten letzter woche jahr monat hace semana mes año
    january february march april may june july august september october november december
    januar februar marz märz april mai juni juli august september oktober november dezember hochzeit
    enero febrero marzo abril mayo junio julio agosto septiembre octubre noviembre diciembre
    先週 先月 今年 去年 上个月
    """)
)
_PERSON_NAME = compiled(r"^\p{Lu}|(?:씨|님)$|^\p{Hangul}{2,4}$|^[\p{Han}\p{Katakana}]{2,4}$")
_KOREAN_CLOSING = compiled(r"(?:씨)?(?:으로|로)?(?:이에요|예요|입니다|이야|이다|야)$|씨$|(?:으로|로)$")


def _attribute(spelled: str, plain: str) -> tuple[str | None, str, frozenset[str]]:
    """The first known attribute of the statement, the word of its value next to the cue, and the value's words."""
    for name, (after, before) in _CUES.items():
        found, behind = (after.search(plain), True) if after is not None else (None, True)
        if found is None and before is not None:
            found, behind = before.search(plain), False
        if found is None:
            continue
        within = next((each for each in found.groups() if each), "")
        if name == "age":
            return name, within, frozenset([within])
        rest = _values(plain[: found.start()]), _values(plain[found.end() :])
        value = [*rest[0], *rest[1]]
        if name != "allergy":
            value = [each for each in _values(within) or rest[behind] or rest[not behind] if each not in _PARTIES]
        if not value:
            return name, "", frozenset()
        head = value[0] if behind else value[-1]
        if name == "manager" and not _is_name(spelled, head):
            continue
        return name, head, frozenset(value)
    return None, "", frozenset()


def _values(text: str) -> list[str]:
    """The words of a value: without particles, pronouns, times and the cues of other attributes."""
    found = []
    for word in _RUN.findall(_NO_VALUE.sub(_blank, text)):
        if ord(word[0]) in _HIRAGANA:
            continue
        bare = _KOREAN_CLOSING.sub(_nothing, without_particle(word)) if has_hangul(word) else word.removesuffix("'s")
        if bare and bare not in _STOP_WORDS and bare not in _TIMELY:
            found.append(_SYNONYMS.get(bare, bare) if not has_hangul(bare) else bare)
    return found


def _is_name(spelled: str, word: str) -> bool:
    """Whether `word`, in lower case, is written as a person's name in the statement."""
    at = spelled.casefold().find(word)
    return at >= 0 and _PERSON_NAME.search(spelled[at : at + len(word)]) is not None
