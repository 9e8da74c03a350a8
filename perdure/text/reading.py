"""Reads one statement about a person: whom it is about, which attribute it tells, what it likes, and when it holds.

    "My sister lives in Nice." → the sister's home is Nice, now
    "I no longer eat meat."    → the user, no attribute; it says that something is over

The module knows no meaning. It has rules and short word lists in English, German, French, Spanish, Korean, Japanese and
Chinese, and some in Portuguese and Italian. What the rules cannot read stays empty. `statements` relates two statements
that were read.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache

from perdure.text.contradiction import without_numbers
from perdure.text.linear import has_hangul, normalized
from perdure.text.patterns import Match, Pattern, compiled
from perdure.text.words import without_particle, word_list

USER = "user"
"""The subject of a statement of the user about themselves."""

MAX_CHARS = 1_000
"""The most characters of a statement that are read. A memory has no more."""

_CACHED = 2_000


SEVERAL = frozenset({"allergy", "child", "hobby", "language", "pet", "sibling", "taste"})
"""The attributes of which a subject has several values. A further value leaves the others as they are."""

SINGLE = frozenset({"age", "birthday", "employer", "home", "manager", "name", "occupation", "phone"})
"""The attributes of which a subject has one value at a time. A new value ends the earlier one."""


class Mood(StrEnum):
    """When a statement holds: now, ahead (a plan, a wish, a condition), or not now (the past, a question)."""

    NOW = "now"
    AHEAD = "ahead"
    PAST = "past"


@dataclass(frozen=True, slots=True)
class Statement:
    """What the rules read in one statement.

    `subject` is `USER`, another person, animal or thing such as "sister" or "friend anna", a name, or empty for another
    subject that the rules cannot name. `value` has the words of the attribute's value, `head` the word next to
    the attribute's cue. `words` are those that carry meaning. `is_over`: it denies or ends something. `taste`: 1
    likes,
    -1 dislikes, 0 neither. `frame` has the words in their order, and `digits` the numbers in digits.
    `opening`: the first word, if the statement does not begin with the user. `is_current`: it says "now" or the like.
    `may_be_a_place`: its employer may be a place, as in the Spanish "trabajo en Madrid", and it does not say "now".
    `is_asserted`: it is no question, condition or quotation.
    """

    subject: str
    attribute: str | None
    head: str
    value: frozenset[str]
    words: frozenset[str]
    is_over: bool
    taste: int
    frame: tuple[str, ...]
    mood: Mood
    digits: tuple[str, ...]
    opening: str
    is_current: bool
    may_be_a_place: bool
    is_asserted: bool


@lru_cache(_CACHED)
def read(text: str) -> Statement:
    """Read one statement, in linear time."""
    spelled = normalized("NFKC", text[:MAX_CHARS]).strip()
    plain = plain_of(spelled)
    cue = _cue(spelled, plain)
    found = _DISLIKES.search(plain) or _LIKES.search(plain)
    taste = 0 if found is None else -1 if _DISLIKES.search(plain) else 1
    is_over, is_current = _OVER.search(plain) is not None, _NOW.search(plain) is not None
    bare = _EMPTY.sub(_blank, _DISLIKES.sub(_blank, _LIKES.sub(_blank, without_numbers(plain))))
    frame = tuple(_words(bare))
    # "do not like" is a dislike, and denies nothing else
    taste_at = len(plain) if found is None else found.start()
    return Statement(
        _manager_of(plain, cue) if cue.name == "manager" else _subject(spelled, plain, cue, taste_at),
        cue.name,
        cue.head,
        cue.value,
        frozenset(frame),
        is_over and not taste,
        -taste if is_over and taste > 0 else taste,
        frame,
        _mood(plain),
        tuple(DIGITS.findall(plain)),
        _opening(plain, frame),
        is_current,
        cue.name == "employer" and not is_current and not is_over and _AT_A_PLACE.search(plain) is not None,
        _UNASSERTED.search(plain) is None,
    )


def plain_of(spelled: str) -> str:
    """A statement in lower case, without elisions ("j'habite"), articles before "mio", and the Spanish "he"."""
    plain = spelled.casefold().replace("ß", "ss").replace("’", "'")  # noqa: RUF001 (the character to replace)
    return _SPANISH_HAVE.sub(_participle, _ARTICLED.sub(_owned, _ELIDED.sub(_whole_word, plain)))


_ELIDED = compiled(r"(?:^|[^\pL\pM'])(?:[cdjlmnst]|qu)'[\p{Latin}]")
_ARTICLED = compiled(r"(?:^|[^\pL\pM])(?:il|la|i|le|o|a|os|as) (?:mi[aeo]|miei|nostr[aeio]|meus?|minhas?|noss[ao]s?)\b")
_ELISIONS = {"c": "ce", "qu": "que"} | {each: f"{each}e" for each in "djlmnst"}


def _whole_word(found: Match) -> str:
    before, _, letter = found[0].partition("'")
    elided = before.lstrip(" ")
    prefix = next(each for each in ("qu", elided[-1]) if elided.endswith(each))
    return f"{before.removesuffix(prefix)}{_ELISIONS[prefix]} {letter}"


_SPANISH_HAVE = compiled(r"(?:^|[ ,])he \pL+[ai]do\b")
"""What would read as the English "he"."""


def _participle(found: Match) -> str:
    return f" {found[0].rpartition(' ')[2]}"


def _owned(found: Match) -> str:
    article, _, owner = found[0].rpartition(" ")
    return f"{article[: -len(article.lstrip(' (,'))]} {owner}" if article[:1] in " (," else owner


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
    really very much any st nd rd th
    anymore more these days one lot lots each every all usually better last month since longer turned out wrong
    als am an auf bei das dem den der des die ein eine einen einer einem es für fuer gern gerne habe hat ich im in ist
    ihr inzwischen jetzt mein meine meinem meinen meiner meines nach nun sehr sein seit unser unsere um und viel von
    vom wir zu zum zur nutzer nutzerin benutzer doch mehr uhr findet statt will möchte werde wird liegt betragt
    beträgt zahle bin haben
    a al ahora con de del desde el en es esta está este la las lo los me mi mis mucho muy mío nuestra nuestro o para
    por
    que se ser son soy su sus tengo tiene un una unos y ya usuario usuaria he hemos fue hace pago
    actualmente cada más error nos hemos tenemos
    je j' tu nous vous le la les un une du de au aux à en y et ou que qui ce cet cette ces est sont suis avons ont
    mon ma mes notre très trop maintenant désormais toujours actuellement depuis pour par sur chez avec mois dernier
    dernière an ans utilisateur utilisatrice se pas plus ne finalement encore beaucoup
    eu sou não meu minha meus minhas nosso nossa é o os as do da dos das no na nos nas em um uma agora tenho tem há
    desde já mais
    io i gli mio mia miei nostro nostra ho ha di del della dal alla al una uno sono ora adesso più non è
    저 나 제 내 우리 저희 사용자 안 못 그 이제 지금 현재 매우 아주 정말 매주 모두 있어요 있습니다 있다 있고
    이에요 예요 입니다
    이다 했어요 합니다 한다 해요 거예요 겁니다 월 원이에요 원입니다 원이다 더 이상 때문에 씨예요 씨입니다
    だ です ます
    """)
)
_EMPTY = compiled(
    r"月 |私|僕|俺|うち|ユーザー|今|毎週|每个|每|现在|用户"
    r"|我|你|的|了|是|非常|特别|十分|在|有|很|也|都|和|就|对|說|说|这|那"
    r"|一个|个|个|從|从|起|到|不再|再|不|没|被|医生|给|付|元|円|月に|症"
    r"|allergisch|allergies?|allergy|allergic|allergien?|alergias?|al[eé]rgic[oa]s?|알레르기가?는?|알러지가?"
    r"|アレルギー|过敏"
    r"|allergi(?:ques?|es?)\b|al[eé]rgic[oa]s?"
    r"|\b(?:after all|not?|never|no longer|don't|doesn't|nicht|keinen?|keine[rm]?|nunca|jamais|não|non|je ai"
    r"|al final|finalmente|finalement|in the end|actually|storniert)\b|取消|中止|취소\p{Hangul}*"
    r"|\b(?:cancell?ed|plan(?:s|ned|ning)?|going|abgesagt|planen?|geplant|cancelado|vamos|prévo\pL+"
    r"|annul\pL+)\b|cancelé|계획\p{Hangul}*|計画|计划"
)
"""What carries no meaning of its own: pronouns and particles of scripts without spaces, cues, and denials."""

_ENDINGS = ("ungen", "ers", "ing", "es", "en", "er", "ed", "s", "e", "n", "o", "a")
_SHORTEST_STEM = 3
_SYNONYMS = {
    "kid": "child", "kids": "child", "children": "child", "meeting": "treffen", "viaje": "visitar", "trip": "visit",
    "apartment": "flat", "mum": "mother", "mom": "mother", "dad": "father",
    "flight": "fly", "flug": "flieg",
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
        if word not in _STOP_WORDS and bare not in _STOP_WORDS and not _KOREAN_NUMERAL.fullmatch(word):
            found.append(stem(bare))
    return found


def stem(word: str) -> str:
    if has_hangul(word):
        return _KOREAN_ENDING.sub(_nothing, word) or word
    word = _SYNONYMS.get(word, word.removesuffix("'s"))
    if word.endswith(("o", "a", "os", "as")) and word.removesuffix("s") in _PARTIES:
        return word.removesuffix("s")  # "hijo" and "hija" have one stem, and are two persons
    for ending in _ENDINGS if word.isalpha() else ():
        if word.endswith(ending) and len(word) - len(ending) >= _SHORTEST_STEM:
            return word[: -len(ending)]
    return word


_KOREAN_NUMERAL = compiled(
    r"(?:열|스물|스무|서른|마흔|쉰|예순|일흔|여든|아흔)?(?:한|하나|두|둘|세|네|다섯|여섯|일곱|여덟|아홉)?"
)
_KANA_ENDING = compiled(
    r"\p{Hiragana}{0,2}(?:は|が|を|に|で|と|の|も|へ|から|です|でした|だ|ます|ました|まし|いて|いる|います|して"
    r"|した|しま|て|た|る"
    r"|もう|ません|ではありません|あります|ある|なり|なりました|なっ|った|いい)*"
)
_KOREAN_ENDING = compiled(
    "(?:이에요|예요|입니다|이다|이야|해요|합니다|하다|한다|했어요|하고|하지|워요|우고|셔요|시지|시는|아요|어요|습니다|는다|고|요|다)$"
)


DIGITS = compiled(r"\p{Nd}+(?:[.,:]\p{Nd}+)*")


# --- denials and tastes -------------------------------------------------------------------

_OVER = compiled(
    r"\bn(?:e |')(?:\pL+ ){0,4}(?:pas|plus|jamais|aucune?|rien)\b|\bannul(?:é\pL*|ons|er?)\b|\bannulé|\barrêté de\b"
    r"|\b(?:não|non|smesso di|deixei de|parei de|dejado|avons quitté|ai quitté)\b|\b(?:cancelei|cancelé"
    r"|annullat\pL+|dejé)"
    r"|\bis off\b|\b(?:has|have) gone\b|\bwent away\b|治り|治った|克服|\b(?:outgr[eo]wn?|fell through"
    r"|decided against|fällt aus|ausgefallen|entfällt)\b|过敏.{0,4}(?:好了|痊愈)"
    r"|\b(?:not|no longer|never|don't|doesn't|didn't|isn't|aren't|won't|can't|stopped|quit|cancell?ed|called off)\b"
    r"|\b(?:gave up|is gone|left)\b"
    r"|\b(?:nicht|kein(?:e|en|er|em)?|nie|abgesagt|storniert|aufgehört|ist weg|gekündigt|verlassen)\b"
    r"|\bno [^,]|\b(?:nunca|cancel(?:ado|amos|é)|dej(?:é|ado) de)\b"
    r"|더 ?이상|않|(?:^| )안 |없[어습는다]|아니|취소|그만|못해|끊었"
    r"|ません|ない|なく|なか|じゃな|やめ|中止|取り?消|キャンセル"
    r"|不过敏|不[^错同管过]|没|取消|戒了"
)
_LIKES = compiled(
    r"\b(?:adore[sd]?|adoren?t|aim(?:e|es|ons|ent)|favou?rite|gosto|gosta|piacc?i\w*|piace|amo|adoro)\b"
    r"|\bpréf(?:è|é)r\pL+|大好き"
    r"|\b(?:like[sd]?|lov(?:e|es|ed)|enjoy(?:s|ed)?|prefer(?:s|red)?|mag|liebe|liebt|gern|gerne|bevorzuge)\b"
    r"|\b(?:gusta[n]?|encanta[n]?|adoro|prefiero)\b|좋아|즐겨|好き|喜欢|喜歡|爱[^好]"
)
_DISLIKES = compiled(
    r"\bdétest(?:e|es|ons|ent)\b|\b(?:can't|cannot|can not) (?:stand|bear)\b|\bloathe[sd]?\b|\bnicht ausstehen\b"
    r"|\bno (?:soporto|soporta|aguanto)\b|\bne supporte pas\b|\bnão suporto\b|\bnon sopporto\b|\bodei[oa]\b"
    r"|苦手|大嫌い"
    r"|\b(?:hate[sd]?|dislike[sd]?|detest[s]?|hasse|hasst|verabscheue|odi[oa]|detesto)\b|싫|嫌い|讨厌|討厭"
)


# --- when it holds ------------------------------------------------------------------------

_PAST = compiled(
    r"[?\x{ff1f}\x{061f}]|^(?:who|what|when|where|which|why|how|wer|was|wann|wo|wie|quién|qué|cuándo|dónde|cómo) "
    r"|\b(?:used to|formerly|previously|was|were|had|ate|back then|ago|while i|when i was)\b"
    r"|\b(?:liked|loved|hated|enjoyed|preferred|disliked)\b|\bas an? (?:\pL+ )?(?:child|kid|student|teenager|boy)\b"
    r"|\b(?:until|till|bis|hasta) (?:\pL+ )?(?:1[89]|20)\pN\pN\b|\b(?:from|between) (?:1[89]|20)\pN\pN (?:to|and)\b"
    r"|\b(?:as if|if|whether|falls|wenn|ob|cuando era|de niñ[oa]|de pequeñ[oa]|de joven)\b|(?:^|[ ,])si "
    r"|\b(?:former|ex|previous|frühere[rnsm]?|vorige[rnsm]?|anterior|ancien(?:ne)?)\b|前の|之前|以前的"
    r"|\b(?:früher|fruher|damals|einst|als (?:kind|student|studentin|jugendliche[r]?)|ehemalige?[rsn]?|war|hatte)\b"
    r"|\b(?:arbeitete[n]?|wohnte[n]?|lebte[n]?|mochte|liebte|hasste|gewohnt|gelebt)\b"
    r"|\b(?:antes|antiguamente|vivía\pL*|viví|vivió|trabajab\pL+|trabajé|trabajó|me llamaba|era|fui|gustaba[n]?)\b"
    r"|\b(?:habitai[st]|vivai[st]|travaillai[st]|avai[st]|aimai[st]|autrefois|auparavant|jadis|jusqu'\pL+)\b"
    r"|(?:^|[ '])étai[st]\b|\bil y a (?:\pN+|\pL+) (?:ans?|mois|jours|semaines)\b|\b(?:quand|lorsque) je\b|\bavant,"
    r"|\b(?:morav|trabalhav|gostav|abitav|viv[ei]v|lavorav|piacev)\pL*|\bvivia|\bprima (?:viv|abit|lavor|er)\pL+"
    r"|살았|일했|근무했|다녔|거주했|좋아했|싫어했|어릴 때|어렸을|예전|옛날|만약|까요"
    r"|住んでいま?した|住んでいた|住んでた|働いていま?した|働いていた|勤めていま?した|勤めていた"
    r"|暮らしていま?した|好きでした|嫌いでした"
    r"|子供の頃|子どもの頃|以前|昔|かつて|もし|ですか|ますか"
    r"|小时候|曾经|曾在|从前|当时|过去|年轻时|如果|吗|[住叫去来做学]过"
    r"|\pN年に?.*ま?した"
)
_NOW = compiled(
    r"\b(?:now|currently|these days|nowadays|any ?more|no longer|since|jetzt|nun|inzwischen|mittlerweile|seit"
    r"|nicht mehr)\b"
    r"|\b(?:ahora|actualmente|desde|ya no|maintenant|désormais|actuellement|depuis|ne .*plus|agora|adesso|ora)\b"
    r"|지금|이제|현재|요즘|今|現在|现在|目前|如今"
)
_AT_A_PLACE = compiled(r"\btrabaj\pL+ en\b|\btrabalh\pL+ n[oa]\b|에서 ?(?:일|근무)|で働|に勤|で勤務|工作|上班")

_QUOTED = (
    r"[:\x{ff1a},] ?[\"'“„«\x{2018}「『]|[」』] ?(?:と|って)(?:言|い[いっ]|話|聞)"
    r"|[“„«「『\"][^”»」』\"]*(?:\b(?:i|i'm|ich|je|yo|io|eu)\b|[我私僕俺])"
)
"""What someone said, or what is quoted with a first person: it may be another's word."""

WISH = compiled(
    r"\b(?:would|i'd|wish\pL*|dream\pL*|might|ideally|one day|someday|würde|möchte|träum\pL*|gustaría"
    r"|encantaría|quisiera|sueño)\b"
    r"|\b(?:voudrai\pL+|aimerai\pL+|rêv\pL+|gostaria|vorrei|sogno)\b|싶|たい|想|希望|梦想"
)

_UNASSERTED = compiled(
    rf"{_QUOTED}|\b(?:imagin\pL+|suppos(?:e|ing)|stell dir vor|angenommen|supongamos|supón|supposons)\b"
    rf"|[?\x{{ff1f}}\x{{061f}}]|(?:^|[ ,])(?:as if|if|whether|falls|wenn|ob|si)\b"
    r"|想像して|假设|想象|상상|もし|たら、|なら、|すれば|ですか|ますか|만약|까요|如果|要是|假如|吗"
)
"""A question, a condition or a quotation."""

_DWELT = compiled(
    r"\b(?:lived|worked|resided|been based)\b|\b(?:ai|as|a|avons|ont) (?:\pL+ )?(?:habité|vécu|travaillé)"
)
_PERFECT = compiled(
    r"(?:\b(?:have|has)|'ve|'s) (?:\pL+ )?(?:lived|worked|been based)\b.*\b(?:since|for)\b"
    r"|\bsince\b.*(?:\b(?:have|has)|'ve|'s) (?:\pL+ )?(?:lived|worked|been based)\b"
)
"""What began in the past and still holds: "I have lived in Lyon since 2010"."""

_AHEAD = compiled(
    r"\b(?:would|will|'ll|wish\pL*|want[s]?|dream\pL*|think\pL* (?:about|of)|thought|plan\pL*|consider\pL*|might)\b"
    r"|\b(?:could|should|shall|maybe|perhaps|probably|hop(?:e|es|ing) to|going to|about to|one day|soon|next \pL+)\b"
    r"|\b(?:mov(?:e|es|ing) to|(?:i|we|he|she|they|user) may|i'd|looking (?:for|at)|almost|nearly|ideal|imagin\pL+)\b"
    r"|\b(?:someday|würde\pL*|möchte\pL*|will|wollen|werde|wird|träum\pL*|traum\pL*|denke|überleg\pL*"
    r"|vielleicht|bald)\b"
    r"|\b(?:nächste[nsmr]?|zieh(?:e|t) nach|wünsch\pL*)\b"
    r"|\b(?:quier\pL+|quisiera|gustaría\pL*|encantaría\pL*|sueñ\pL+|pienso|planeo|quizás?|tal vez|próxim[oa])\b"
    r"|\b(?:voy a|vamos a|mudar\pL*)\b"
    r"|\b(?:voudrai\pL+|aimerai\pL+|souhait\pL+|veux|veut|voulons|rêv\pL+|pens(?:e|ons)|envisag\pL+|compte|bientôt)\b"
    r"|\b(?:prochaine?|peut-être|prévo\pL+|un jour|demain|(?:vais|va|allons|vont) \pL+(?:er|ir|re))\b"
    r"|\b(?:gostaria|quero|queria|vorrei|voglio|vogliamo|penso|sogno)\b"
    r"|다음|내년|싶|예정|생각|계획|할 거|갈 거|아마|つもり|予定|たいです|たいと|来年|来月|来週|かもしれ|夢"
    r"|想|打算|计划|希望|可能|也许|梦想|明年|下个月|下周|将来|将要|准备"
)


_CALLED_OFF = compiled(
    r"\b(?:was|were|wurde|war|fue|ce était|a été|è stat[oa]|foi) (?:an? |ein |une? |un )?"
    r"(?:cancell?ed|called off|mistake|error|abgesagt|storniert|gestrichen|irrtum|fehler|cancelad[oa]"
    r"|annulé\pL*|erreur|annullat[oa]|errore)"
)
"""What ended a plan or corrects a fact: it is said in the past, and holds now."""


def _mood(plain: str) -> Mood:
    plain = _CALLED_OFF.sub(_blank, plain)
    if _PAST.search(plain) or _UNASSERTED.search(plain) or (_DWELT.search(plain) and not _PERFECT.search(plain)):
        return Mood.PAST
    return Mood.AHEAD if _AHEAD.search(plain) else Mood.NOW


# --- subjects ----------------------------------------------------------------------------

_PARTIES = {
    word: party
    for party, words in {
        "sister": "sister schwester hermana sœur soeur irmã sorella 여동생 누나 언니 妹 姉 姐姐 妹妹",
        "brother": "brother bruder hermano frère irmão fratello 남동생 형 오빠 兄 弟 哥哥 弟弟",
        "mother": "mother mum mom mutter madre mère maman mama mãe 어머니 엄마 母 妈妈 母亲",
        "father": "father dad vater padre père papa pai 아버지 아빠 父 爸爸 父亲",
        "wife": "wife ehefrau frau esposa mujer femme épouse moglie 아내 妻 妻子 老婆 太太",
        "husband": "husband ehemann mann marido esposo mari époux marito 남편 夫 丈夫 老公",
        "partner": (
            "partner girlfriend boyfriend novia novio partnerin pareja copine copain compagne compagnon "
            "conjointe conjoint 여자친구 남자친구 彼女 彼氏 女朋友 男朋友"
        ),
        "son": "son sohn sohnes hijo fils filho figlio 아들 息子 儿子",
        "daughter": "daughter tochter hija fille filha figlia 딸 娘 女儿",
        "friend": "friend freund freundin amigo amiga ami amie amico amica 친구 友達 友人 朋友",
        "neighbour": (
            "neighbour neighbor nachbar nachbarin vecino vecina voisin voisine vizinho vizinha vicino vicina "
            "이웃 隣人 邻居"
        ),
        "colleague": "colleague kollege kollegin colega collègue compañero compañera collega 동료 同僚 同事",
        "dog": "dog hund hundes perro perra chien chienne cachorro cão cane 강아지 犬 狗",
        "cat": "cat katze kater gato gata chat chatte gatto gatta 고양이 猫",
        "parents": "parents eltern padres pais genitori 부모님 両親 父母 爸妈",
        "grandmother": (
            "grandmother grandma granny oma grossmutter abuela grand-mère mamie avó nonna 할머니 외할머니 "
            "祖母 奶奶 外婆 姥姥"
        ),
        "grandparents": "grandparents grosseltern abuelos grands-parents 祖父母 조부모 爷爷奶奶",
        "grandfather": (
            "grandfather grandpa opa grossvater abuelo grand-père papi avô nonno 할아버지 외할아버지 祖父 "
            "爷爷 外公 姥爷"
        ),
        "uncle": "uncle onkel tío oncle tio zio 삼촌 외삼촌 叔父 伯父 叔叔 舅舅 伯伯",
        "aunt": "aunt tante tía tia zia 이모 고모 叔母 伯母 阿姨 姑姑 姨妈",
        "cousin": "cousin cousine primo prima 사촌 従兄 従妹 従弟 従姉 表哥 表弟 表姐 表妹 堂哥 堂弟",
        "nephew": "nephew neffe sobrino neveu 조카 甥 侄子 外甥",
        "niece": "niece nichte sobrina nièce 조카딸 姪 侄女 外甥女",
        "children": (
            "children kids kinder hijos enfants filhos figli 子供 子ども 子供たち 子どもたち 孩子 孩子们 아이들"
        ),
        "flatmate": "flatmate roommate housemate mitbewohner mitbewohnerin colocataire 룸메이트 室友",
    }.items()
    for word in words.split()
}
_FIRST_PERSON = frozenset(
    word_list(
        "i i'm i've i'd i'll we we're we've ich wir user nutzer nutzerin benutzer usuario usuaria yo nosotros"
        " je nous utilisateur utilisatrice eu io noi"
    )
)
_POSSESSIVES = compiled(
    r"(?:my|our|his|her|their|user's|mein\w*|unser\w*|mis?|nuestr\w+|sus?|mon|ma|mes|notre|nos|minha?|meus?"
    r"|mi[ao]|miei|nostr[aeio]|noss[ao]s?|sa|ses|leurs?)"
)
_TOLD = frozenset({*_FIRST_PERSON, "me", "mir", "mí", "uns", "nos"})
_THIRD_PERSON = frozenset(
    word_list(
        "he he's she she's it it's they they're they've who who's which er sie ella él ellos ellas quien"
        " il elle elles ele ela"
    )
)
_OWN = frozenset(
    word_list("name names age job life family alter familie leben edad nombre familia vida nom âge famille title beruf")
)
"""What a user has and is not another: "my age is now 34" is about the user."""

_OWN_CUE = compiled(
    r"^(?:name|home|house|flat|apartment|job|occupation|employer|allerg(?:y|ies|ie|ien)\b|zuhause|arbeitgeber"
    r"|beruf|casa|hogar|empresa"
    r"|nombre|alergia|manager|boss|chef|jef|nom\b|maison|appartement|domicile|employeur|métier|profession|travail est)"
)
WHOLE = frozenset(
    word_list(
        "new current full real own present actual nueva nuevo neue neuer neues neuen aktuelle aktueller jetziger"
        " nouveau nouvelle actuel actuelle"
    )
)
"""What may stand before a user's attribute. Others name a part or another one: "my middle name", "my first job"."""

_NOT_NOUNS = frozenset(
    word_list("""
    is are was were be been has have had does do did don't doesn't isn't aren't not no longer never now also still just
    always currently recently already both all really too moved lives works ist sind hat haben nicht nie jetzt auch
    noch
    gerade schon seit está están es son tiene ya se ahora también too, and und y est sont ai ont ne pas plus
    maintenant désormais aussi et
    """)
)
_AND = frozenset(word_list("and und y et"))
_PREPOSITIONS = frozenset(
    word_list("in from at of with on near for who that aus von bei mit de del con que en à au chez dans avec qui")
)
_FIRST_VERB = compiled(
    r"^(?:viv(?:o|imos)|mud(?:é|amos|o)|trabaj(?:o|amos)|tengo|me llam|i'm"
    r"|(?:wohne|lebe|arbeite|heisse|ziehe|bin|am)\b|(?:habit|vis|viv|travaill|ai |me appell|déménag)\pL*)"
)
_NAMED = compiled(
    r"^(?P<name>\p{Lu}[\p{L}\p{M}]+) (?:lives?|moved|works?|is|has|likes|loves|hates|prefers|wohnt|lebt|arbeitet|heißt"
    r"|habite|vit|travaille|est|aime|adore|déteste|ist|hat|mag|liebt|vive|trabaja|es|tiene|se)\b"
)
_OWNED = compiled(r"\b(?:my|mein|meine|mi|mon|ma|mio|mia|meu|minha)\b")
_NOT_NAMED = frozenset(
    word_list("""
    he she it this that there what who everybody everyone nobody i user er sie es das dies der die wer alle jeder ese
    il elle on nous vous ce je cela
    esto eso ella él todo nadie
    """)
)
_SPANISH_FIRST = compiled(r"^(?:ahora |ya no |ya |en \w+ |desde \w+ )?(?:\w+[oé]|me|soy|estoy|voy|he|tengo)\b")
_UNSPACED_PARTY = compiled(
    r"^(?:私の|うちの|僕の|我的|我家的|我家|我|用户的|用户|ユーザーの)?(?P<which>[大二三四小]|第[二三]个"
    r"|另一[个只])?(?P<party>"
    + "|".join(sorted((word for word in _PARTIES if ord(word[0]) in range(0x3400, 0xA000)), key=len, reverse=True))
    + r")(?P<rest>.?)"
)
_UNSPACED_THIRD = compiled(r"^(?:彼ら?|あの人)[はがのも]|^[他她]|^(?:그|그녀|걔|그들)(?:는|은|가|이|의) ")
_UNSPACED_NAME = compiled(
    r"^の([\p{Han}\p{Katakana}ー]{1,4}|\p{Hiragana}{2,4}?)(?:ちゃん|くん|さん)?[はが]"
    r"|^([小阿]?\p{Han}{1,2}?)(?:今年|现在|已经)?(?:\pN+岁|住在|搬|在)"
)
"""The name after a relative: "娘の花は", "我女儿小花"."""

_NO_NAME = compiled(r"頃|今年?|现在?|已经?|目前|也|都|不|没|名前|年齢|年|家|仕事|職業|誕生日|体重|名字|生日")
_TASTER = compiled(
    r"^([\p{Han}\p{Katakana}ー]{1,6}(?:たち|さん)?)は.+が.*(?:好き|嫌|苦手)"
    r"|^(?:我的|我们?家的?)?(\p{Han}{1,6}?)(?:也|都|很|非常|最|不再?)*(?:喜欢|喜歡|讨厌|討厭)"
)
"""Who likes something, if it is said before the thing: "子供たちは寿司が嫌い"."""

_UNSPACED_TOPIC = compiled(
    r"^(?:(?:私|うち|僕|俺)の)?(?P<topic>[\p{Han}\p{Katakana}ーさんくちゃ]{2,8}?)(?:は|が)(?:.*(?:住|働|勤"
    r"|引っ?越)|\pN+歳)"
    r"|^(?:(?:私|うち|僕|俺)の)?(?P<owner>[\p{Han}\p{Katakana}ー]{1,8}?)の名前は"
    r"|^我的(?P<noun>\p{Han}{2,4}?)(?:的名字)?(?:现在|今年)?(?:叫|住在|搬|\pN+岁|在.{1,8}(?:工作|上班))"
    r"|^(?P<named>\p{Han}{2,4}?)(?:现在|已经)?(?:住在|搬到|在.+(?:工作|上班))"
)
_KOREAN_TOPIC = compiled(
    r"^(?:(?:제|내|우리|저희|나의|저의) (?:\p{Hangul}+ )?)?(?P<topic>\p{Hangul}{2,4}?)(?:은|는|이|가) "
    r"(?:.*(?:살|산다|이사|일해|일한|근무|다니|다녀|이직)|\pN+ ?(?:살|세))"
)
_NO_TOPIC = compiled(
    r"周末|平时|早上|晚上|每天|从小|一直|其实|最近|特别|非常|不|也|很|最|都|已经|目前|後来"
    r"|私|僕|俺|我|用户|ユーザー|家|今|仕事|職業|저|나|사용자|집|직업|월|회사|现在|从|銀行|学校|住|搬|올해|지금"
    r"|현재|요즘|이제|이름|名|年齢|年龄|工作|职业"
)
_KOREAN_OWNED = ("이름", "나이", "집", "직업", "생일")
_KOREAN_QUALIFIERS = frozenset(word_list("첫째 둘째 셋째 큰 작은 막내 다른 전"))


def _subject(spelled: str, plain: str, cue: _Cue, taste_at: int) -> str:  # noqa: PLR0911 (each way to name it)
    """Whom the statement is about. A statement that names nobody is about the user.

    `taste_at`: where it says what is liked, or its end.
    """
    unspaced = _unspaced_subject(plain)
    if unspaced is not None:
        return unspaced
    tokens = plain.replace(",", " ").replace(".", " ").split()
    if has_hangul(plain):
        return _korean_party(tokens) or _topic(plain, cue)
    if _SPACELESS.search(plain):
        return _topic(plain, cue)
    if cue.name is None and taste_at == len(plain):
        return _party(tokens, plain) or _named(spelled, plain) or USER
    start = taste_at if cue.name is None else cue.start
    found = _possessor(spelled, plain, cue) if cue.name is not None else _before(_bare(plain[:start]), "")
    if found is not None:
        return found
    named = _named(spelled, plain)
    if named is not None:
        return _party(tokens, plain) or named
    opens = all(each in _STOP_WORDS or each in _NOT_NOUNS or each in TIMELY for each in _bare(plain[:start]))
    is_told = not _TOLD.isdisjoint(tokens) if cue.name is None else _FIRST_VERB.search(plain[start:]) is not None
    return USER if opens or is_told or _SPANISH_FIRST.match(plain) else ""


def _unspaced_subject(plain: str) -> str | None:
    """Another person, or who likes something, at the beginning of a statement in Japanese, Chinese or Korean."""
    if _UNSPACED_THIRD.match(plain):
        return ""
    party = _UNSPACED_PARTY.match(plain)
    if party is not None:
        named = _UNSPACED_NAME.match(plain[party.end() - len(party["rest"]) :])
        name = next(filter(None, named.groups())) if named is not None else ""
        is_owned = plain[0] in "我用" or bool(name) or party["rest"] in "はがのも住在叫今现搬是有没不对的已喜讨也爱"
        name = "" if _NO_NAME.fullmatch(name) else name
        return f"{party['which'] or ''} {_PARTIES[party['party']]} {name}".strip() if is_owned else USER
    taster = _TASTER.match(plain)
    topic = None if taster is None else next(filter(None, taster.groups()))
    return None if topic is None or _NO_TOPIC.search(topic) else str(topic)


_SPACELESS = compiled(r"[\p{Han}\p{Hiragana}\p{Katakana}]")


def _bare(text: str) -> list[str]:
    return [each for token in text.split() if (each := token.strip('.,;:!"()-'))]


def _topic(plain: str, cue: _Cue) -> str:
    """The topic of a statement in Korean, Japanese or Chinese that has an attribute."""
    found = _KOREAN_TOPIC.match(plain) or _UNSPACED_TOPIC.match(plain) if cue.name not in (None, "allergy") else None
    topic = next((each for each in found.groups() if each), None) if found is not None else None
    return topic if topic is not None and not _NO_TOPIC.search(topic) else USER


def _opening(plain: str, frame: tuple[str, ...]) -> str:
    """`Statement.opening`. It is empty for the scripts without spaces and for Korean, which often omit the user."""
    tokens = _bare(plain)
    if not tokens or _SPACELESS.search(plain) or has_hangul(plain):
        return ""
    if tokens[0] in _THIRD_PERSON:
        return tokens[0]
    is_users = not _FIRST_PERSON.isdisjoint(tokens) and not _POSSESSIVES.fullmatch(tokens[0])
    return frame[0] if frame and not is_users else ""


def _korean_party(tokens: list[str]) -> str | None:
    for at, token in enumerate(tokens[:5]):
        bare = token if token in _PARTIES else without_particle(token)
        owns = at + 1 < len(tokens) and tokens[at + 1].startswith(_KOREAN_OWNED)
        if bare in _PARTIES and (token[len(bare) :] in ("은", "는", "이", "가", "의", "도") or owns):
            which = tokens[at - 1] if at and tokens[at - 1] in _KOREAN_QUALIFIERS else ""
            return f"{which} {_PARTIES[bare]}".strip()
    return None


def _party(tokens: list[str], plain: str) -> str | None:
    """The relative, animal or user that is named first; for a statement without an attribute."""
    for at, token in enumerate(tokens[:5]):
        word = token.removesuffix("'s")
        party = _PARTIES.get(word, _PARTIES.get(word.removesuffix("s")))
        if party is not None and (at == 0 or _POSSESSIVES.fullmatch(tokens[at - 1])):
            return party
        if token in _FIRST_PERSON or (at == 0 and _SPANISH_FIRST.match(plain) and not _POSSESSIVES.fullmatch(token)):
            return USER
    return None


def _named(spelled: str, plain: str) -> str | None:
    named = _NAMED.match(spelled)
    if named is None or named["name"].casefold() in _NOT_NAMED or _OWNED.search(plain):
        return None
    return str(named["name"].casefold())


def _possessor(spelled: str, plain: str, cue: _Cue) -> str | None:
    """The subject of an attribute: within the cue ("the name of my dog is"), or nearest before it."""
    within = plain[cue.start : cue.end].split()
    for at, token in enumerate(within[1:-1], start=1):
        if _POSSESSIVES.fullmatch(token):
            return _PARTIES.get(within[at + 1], within[at + 1])
    tokens = _bare(plain[: cue.start])
    if tokens and tokens[-1] in ("que", "qui", "che") and plain[cue.start :].startswith(("se ", "si ")):
        return ""  # "tengo una hermana que se llama Ana"
    while tokens and tokens[-1] in _NOT_NOUNS - _AND:
        tokens.pop()
    is_owned = any(map(_POSSESSIVES.fullmatch, tokens[-_MOST_OF_A_NAME:]))
    is_named = len(tokens) > 1 and not is_owned and _FIRST_PERSON.union(_AND).isdisjoint((tokens[-1], tokens[-2]))
    if is_named and _is_name_in_english(spelled, plain, tokens[-1]) and not _OWN_CUE.search(plain[cue.start :]):
        return ""  # "I heard that Tom moved to Rome"
    return _before(_bare(plain[: cue.start]), plain[cue.start : cue.end])


def _manager_of(plain: str, cue: _Cue) -> str:
    """Whose manager it is: the user's, unless another one has it ("my wife's boss", "her boss")."""
    before = _bare(plain[: cue.start])
    is_others = any(each.endswith(("'s", "s'")) and not each.startswith("user") for each in before)
    is_whole = not before or not plain[cue.start].isascii() or before[-1] in WHOLE or _POSSESSIVES.fullmatch(before[-1])
    if not is_whole and not plain[cue.start].isspace():
        return ""  # "my project manager"
    return "" if is_others or not _THIRD_PERSON.isdisjoint(before) or _OTHERS.search(plain) else USER


_OTHERS = compiled(
    r"\b(?:his|her|their|ihre?|seine?|leur|of my|of our|mein\w* (?:frau|mann\w*|freund\w*|bruders?|schwester)s?"
    r"|de mi|de ma|de mon)\b"
    r"|(?:남편|아내|친구|동생|형|누나|언니|오빠|아들|딸|부모님|엄마|아빠)의"
    r"|[妻夫父母兄弟姉妹子友]の|(?:妻子|丈夫|哥哥|弟弟|姐姐|妹妹|朋友|爸爸|妈妈|儿子|女儿)的"
)


def _before(tokens: list[str], cue: str) -> str | None:
    """The last person, animal or thing in `tokens`, the words before a verb; `None` if they have none."""
    for at in reversed(range(max(0, len(tokens) - _MOST_BEFORE), len(tokens))):
        token = tokens[at]
        if token in _FIRST_PERSON:
            if at and tokens[at - 1] in ("that", "which", "where"):
                return ""
            # "I have a cousin living in Rome" is about another, but "I have a cat allergy" is not
            is_users = _OWN_CUE.search(cue) or not cue or not any(map(_PARTIES.get, tokens[at:]))
            return USER if is_users else ""  # which sister, in "I have a sister called Ann", another one does not tell
        if token in _THIRD_PERSON:
            return ""
        if _POSSESSIVES.fullmatch(token) and tokens[at + 1 : at + 2] not in _NO_POSSESSIONS:
            return _possessed(token, tokens[at + 1 :], cue)
    return None


_NO_POSSESSIONS: tuple[list[str], ...] = ([], ["hemos"], ["han"], ["sono"], ["siamo"])
"""What follows where the French "nos" and the Italian "mi" are pronouns, or "Mia" is a name: "nos hemos mudado"."""

_MOST_BEFORE = 12
_MOST_OF_A_NAME = 4


def _possessed(owner: str, words: list[str], cue: str) -> str:
    """What "my …" names before the cue: another subject, or the user if it is an attribute of theirs."""
    is_genitive = any(word.endswith(("'s", "s'")) for word in words)
    is_user = owner not in ("his", "her", "their", "su", "sus", "sa", "ses", "leur", "leurs")
    if not is_genitive and _OWN_CUE.search(cue):
        is_whole = cue.startswith("al") or WHOLE.issuperset(words)
        return USER if is_user and is_whole else ""
    noun: list[str] = []
    for word in words:
        if word in _PREPOSITIONS or (word in _NOT_NOUNS and noun):
            break
        noun.append(word.removesuffix("'s").removesuffix("s'"))
        if word.endswith(("'s", "s'")):
            break  # "my mother's egg allergy" is hers
    if not noun or noun[-1] in _OWN:
        return USER if is_user else ""
    return " ".join(_PARTIES.get(each, each) for each in noun[:_MOST_OF_A_NAME])


ENGLISH = compiled(r"\b(?:i|i'm|i've|my|the|user|user's|is|are|we|does|don't|lives|works|likes)\b")

# --- attributes --------------------------------------------------------------------------

_AFTER = {
    "home": (
        r"\b(?:liv(?:e|es|ed|ing)|resid(?:e|es|ing)) (?:now )?(?:in|at)\b|\bbased (?:now )?in\b"
        r"|\bmov(?:e|es|ed|ing) to\b|\brelocated to\b"
        r"|\b(?:home|house|flat|apartment) is (?:now )?in\b"
        r"|\b(?:wohn|leb)(?:e|t|en)\b(?: \pL+){0,3}? in\b|\bnach (\S+) (?:um)?gezogen|\bzieh(?:e|t) nach\b"
        r"|\bzuhause ist (?:jetzt )?in\b|\bin (\S+) zu hause\b"
        r"|\bviv(?:o|e|imos)\b(?: ahora)? en\b|\bmud\pL+ a\b|\b(?:casa|hogar) est[aá](?: ahora)? en\b"
        r"|\b(?:habit(?:e|es|ons|ent)|viv(?:ons|ent)|vi[st]|résid\pL+|loge)\b(?: maintenant| désormais)? (?:à"
        r"|au|aux|en|dans)\b"
        r"|\b(?:habit(?:e|es|ons|ent)|viv(?:ons|ent)|vi[st]|résid\pL+|loge)\b(?: maintenant| désormais)? à "
        r"|\b(?:déménagé|emménagé|déménage|installée?s?) (?:à|au|aux|en|dans) |\b(?:maison|appartement"
        r"|domicile) est (?:maintenant )?(?:à|au|en) "
        r"|\bresid(?:o|e|imos)\b(?: ahora)? en\b|\bin (\S+) daheim\b|\bbased out of\b|\bsettled in\b|\bmov(?:e"
        r"|es|ed|ing) into\b"
        r"|\bmor(?:o|a|amos)\b(?: agora)? (?:em|no|na)\b|\bmudei(?:-me)? para\b|\babit(?:o|a"
        r"|iamo)\b(?: ora)? a\b|\btrasferit[oaie] a\b"
        r"|집은 ?(\S+)에 있|(?:家|自宅)は|住在|搬到|搬去|家在"
    ),
    "employer": (
        r"\bwork(?:s|ed|ing)? (?:at|for)\b|\bjoined\b|\bemployer is\b"
        r"|\barbeite[tn]?\b(?: \pL+){0,2}? (?:bei|für)\b|\barbeitgeber ist\b"
        r"|\btrabaj\pL+(?: ahora)? (?:en|para)\b|\bempresa es\b"
        r"|\btravaill(?:e|es|ons|ent)\b(?: maintenant| désormais)? (?:chez|pour)\b|\bemployeur est\b|\brejoint\b"
        r"|\bemployed (?:at|by)\b|\bstarted at\b|\bbei (\S+) (?:angestellt|beschäftigt)"
        r"|\btrabalh(?:o|a|amos)\b(?: agora)? (?:na|no|para)\b|\blavor(?:o|a|iamo)\b(?: ora)? (?:alla|per)\b"
        r"|在([^在]{1,8})(?:工作|上班|任职)|跳槽到|入职"
    ),
    "occupation": (
        r"\bwork(?:s|ed|ing)? as\b|\bjob is\b|\boccupation is\b|\barbeite[tn]?\b(?: \pL+){0,2}? als\b|\bberuf ist\b"
        r"|\btrabaj\pL+(?: ahora)? como\b|\btravaille\b(?: maintenant| désormais)? (?:comme|en tant que)\b"
        r"|\b(?:métier|profession|travail) est\b|직업은|(?:仕事|職業)は|(?:职业|工作)(?:现在|目前)?是"
    ),
    "name": (
        r"\bname is\b|\bname's\b|\b(?:am|is|are|i'm) (?:now |also )?(?:called|named)\b"
        r"|\bheiss(?:e|t|en)\b|\bname(?: \pL+){0,2} ist\b"
        r"|\bname of (?:my|our|his|her|their|the user's) \pL+ is\b|\b(?:me|se) appelle\b|\bnom(?: \pL+){0,3} est\b"
        r"|\bmeu nome(?: agora)? é |\b(?:mi|si) chiam[oa]\b"
        r"|\b(?:me|se) llam[oa]\b|\bnombre(?: de mi \pL+)? es\b|이름은|名前は|名字是|叫|[犬猫]は(.+)と(?:いい|言い)"
    ),
    "manager": (
        r"\b(?:manager|boss) is\b|\bchef(?:in)? ist(?: jetzt)?\b|\bjef[ea] es(?: ahora)?\b"
        r"|\b(?:chef(?:fe)?|patronn?e?|responsable|supérieure?) est\b(?: maintenant| désormais)?|상사는|上司は"
        r"|(?:上司|老板)(?:现在|目前)?是"
    ),
    "allergy": (
        r"\ballerg(?:ic|ies|y)(?: to)?\b|\ballergi(?:e|en|sch)(?: gegen)?\b"
        r"|(\pL{3,})allergien?\b|\ballergi(?:ques?|es?|c[aohe]+)\b(?: (?:aux?|à|a|alle?|al)\b)?"
        r"|\bal[eé]rgi(?:a|as|co|ca)(?: a(?:l| los| las)?)?\b"
        r"|(?:알레르기|알러지)(?:가|는|도|를)?|アレルギー|过敏"
    ),
    "age": (
        r"\b(?:i am|i'm|is|turned)(?: now)? (\pN{1,3})(?: years old|$|\.$|[.!,;] | today| now)"
        r"|\b(?:bin|ist)(?: ich)?(?: jetzt)? (\pN{1,3}) jahre alt\b|\bich (?:bin|werde)(?: jetzt"
        r"| inzwischen)? (\pN{1,3})(?:$|\.$|[.!,;] )"
        r"|\b(?:ai|a) (?:maintenant |désormais |déjà )?(\pN{1,3}) ans\b|\b(?:tenho|ho)(?: agora"
        r"| ora)? (\pN{1,3}) an(?:os|ni)\b"
        r"|\b(?:tengo|tiene)(?: ahora)? (\pN{1,3}) años|(\pN{1,3}) ?(?:살|세)(?:이에요|예요|입니다|이다|$)"
        r"|(\pN{1,3})歳(?:です|にな|だ|。|$)|(\pN{1,3})岁(?:了|。|\x{ff0c}|$)"
    ),
}  # fmt: skip
_BEFORE = {
    "home": r"在住|(?:에서?|으?로) ?(?:지금 |이제 )?(?:살|산다|거주|이사)|(?:に|へ)(?:住|引っ?越)|で暮ら",
    "employer": r"에서 ?(?:일|근무)|에 ?(?:다니|다녀|입사|취직)|으?로 ?이직|で働|に勤|に転職|に入社|で勤務",
    "manager": r" is my (?:manager|boss)\b| ist meine? chef(?:in)?\b| es mi jef[ea]\b| est (?:mon|ma) (?:chef|patron)",
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
    r"|已经|好了|と(?:言|申)|\bje ai\b|\b(?:is|are|has|have|went) (?:gone|over|away)(?: away)?\b|\bmonths?\b"
    r"|\bweeks?\b|\byears?\b"
)
TIMELY = frozenset(
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


@dataclass(frozen=True, slots=True)
class _Cue:
    """An attribute, the word of its value next to the words that show it, its value, and where these words stand."""

    name: str | None = None
    head: str = ""
    value: frozenset[str] = frozenset()
    start: int = 0
    end: int = 0


_NOWHERE = compiled(
    r"^ ?(?:an?|the|my|our|his|her|their|this|that|one|eine[rmn]?|ein|meine[rmn]?|unsere[rmn]?|una?|mi|nuestra"
    r"|la|el|un|les?|leur|mon|ma|notre|um|uma)\b"
)
_GERMAN_ARTICLE = compiled(r"^ ?(?:ein|mein|unser)")
_NO_HOME = compiled(r"\b(?:office|team|shift|department|version|slack)\b")
_NO_EMPLOYER = compiled(
    r"^ ?(?:me|us|him|her|them|you|everyone|myself|home|night|weekends|mein|casa|remoto|línea|mí|la noche|moi"
    r"|nous|mon|ma)\b"
)


def _is_read(name: str, spelled: str, tail: str, shown: str, value: list[str]) -> bool:
    """Whether the cue has the attribute's sense, unlike "I moved to the night shift" and "I joined a choir"."""
    if name == "home" and _NOWHERE.match(tail):
        is_place = not _GERMAN_ARTICLE.match(tail) or " in " in tail
        return is_place and any(_is_spelled_as_name(spelled, each) for each in value)
    if name == "home" and (shown.startswith("settled") or "into" in shown):
        return bool(value) and any(_is_spelled_as_name(spelled, each) for each in value)
    if name == "employer" and shown.startswith(("joined", "rejoint", "started")):
        return not _NOWHERE.match(tail) and bool(value) and _is_spelled_as_name(spelled, value[0])
    return not (_NO_HOME.search(tail) if name == "home" else _NO_EMPLOYER.match(tail) if name == "employer" else None)


def _is_age(spelled: str, plain: str, found: Match) -> bool:
    """Whether "is 43" is an age: of somebody, unlike "my shoe size is 43"."""
    before = _bare(plain[: found.start()])
    if not found[0].startswith("is ") or "years old" in found[0] or not before:
        return True
    owner = before[-1].removesuffix("'s")
    is_person = owner in _PARTIES or owner in _THIRD_PERSON or owner in _FIRST_PERSON or owner in _OWN
    return is_person or _is_spelled_as_name(spelled, owner)


def _is_name_in_english(spelled: str, plain: str, word: str) -> bool:
    return ENGLISH.search(plain) is not None and _is_spelled_as_name(spelled, word)


def _is_spelled_as_name(spelled: str, word: str) -> bool:
    at = spelled.casefold().find(word)
    return at >= 0 and spelled[at : at + 1].isupper()


def _cue(spelled: str, plain: str) -> _Cue:  # noqa: C901 (a table)
    """The first known attribute of the statement."""
    for name, (after, before) in _CUES.items():
        found, behind = (after.search(plain), True) if after is not None else (None, True)
        if found is None and before is not None:
            found, behind = before.search(plain), False
        if found is None:
            continue
        within = next((each for each in found.groups() if each), "")
        if name == "age" and not _is_age(spelled, plain, found):
            continue
        if name == "age":
            return _Cue(name, within, frozenset([within]), found.start(), found.end())
        rest = _values(plain[: found.start()]), _values(plain[found.end() :])
        value = [*rest[0], *rest[1]]
        if name == "allergy":
            value = [*_values(within), *value]
        else:
            value = [each for each in _values(within) or rest[behind] or rest[not behind] if each not in _PARTIES]
        if not _is_read(name, spelled, plain[found.end() :], found[0], value):
            continue
        if not value:
            return _Cue(name, start=found.start(), end=found.end())
        head = value[0] if behind else value[-1]
        if name == "manager" and not _is_name(spelled, head):
            continue
        return _Cue(name, head, frozenset(value), found.start(), found.end())
    return _Cue()


def _values(text: str) -> list[str]:
    """The words of a value: without particles, pronouns, times and the cues of other attributes."""
    found = []
    for word in _RUN.findall(_NO_VALUE.sub(_blank, text)):
        if ord(word[0]) in _HIRAGANA:
            continue
        bare = _KOREAN_CLOSING.sub(_nothing, without_particle(word)) if has_hangul(word) else word.removesuffix("'s")
        if bare and bare not in _STOP_WORDS and bare not in TIMELY:
            found.append(_SYNONYMS.get(bare, bare) if not has_hangul(bare) else bare)
    return found


def _is_name(spelled: str, word: str) -> bool:
    """Whether `word`, in lower case, is written as a person's name in the statement."""
    at = spelled.casefold().find(word)
    return at >= 0 and _PERSON_NAME.search(spelled[at : at + len(word)]) is not None
