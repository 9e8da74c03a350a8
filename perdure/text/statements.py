"""Relates two statements about a person: does the later one repeat the earlier one, change it, or neither?

    "I live in Lyon." + "My home is in Lyon."     → same
    "I live in Lyon." + "I moved to Paris."       → changes: one home, another value
    "I live in Lyon." + "My sister lives in Nice." → unrelated: another subject
    "I live in Lyon." + "I was born by the sea."  → unknown

`reading` reads each statement by rules and short word lists: its subject, its attribute (such as "home") with the
attribute's value, its taste, whether it holds now, and whether it says that something is over. `contradiction` compares
numbers, names and opposites. A statement that the rules cannot read is `UNKNOWN`. `SAME` and `CHANGES` are therefore
rare rather than wrong: a change needs two statements about the present, of one subject, and a repetition needs the same
words in the same order.

Called by the judge `guard` of consolidation, and by the tool `remember`.
"""

from __future__ import annotations

from enum import StrEnum

from perdure.text.contradiction import DifferenceKind, difference, features
from perdure.text.linear import has_hangul, normalized
from perdure.text.patterns import compiled
from perdure.text.reading import (
    DIGITS,
    ENGLISH,
    MAX_CHARS,
    SEVERAL,
    TIMELY,
    WHOLE,
    WISH,
    Mood,
    Statement,
    plain_of,
    read,
    stem,
)
from perdure.text.words import word_list

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


def relate(earlier: str, later: str) -> Relation:
    """The relation of `later` to `earlier`. `SAME` is symmetric."""
    old, new = read(earlier), read(later)
    if old.subject != new.subject:
        return Relation.UNKNOWN if _may_be_one(old.subject, new.subject) else Relation.UNRELATED
    if old.attribute is not None and old.attribute == new.attribute:
        return _of_attribute(old, new, differ=differ(earlier, later))
    if old.taste and new.taste:
        return _of_tastes(old, new, differ=differ(earlier, later), turned=turned(earlier, later))
    if old.frame == new.frame and old.frame and not differ(earlier, later):
        return Relation.SAME
    return _of_topic(old, new, earlier, later)


def differ(earlier: str, later: str) -> bool:
    """Whether the statements cannot be the same: they differ in a number, a name, a denial, a taste or one word.

    They also differ if only one is about the past, and if the roles in them are `turned`.
    """
    old, new = read(earlier), read(later)
    if (old.is_over, old.subject) != (new.is_over, new.subject) or (old.taste * new.taste) < 0:
        return True
    is_of_another = not old.subject and old.frame != new.frame
    is_of_another_time = _differ_in_mood(old, new) or old.is_asserted != new.is_asserted
    if is_of_another or is_of_another_time or turned(earlier, later) or _is_qualified(_both(earlier, later)):
        return True
    found = difference(earlier, later)
    if found is not None:
        is_noun = found.kind is DifferenceKind.NAME and not is_compared(earlier, later)
        is_denied_taste = found.kind is not DifferenceKind.NAME and old.taste == new.taste != 0
        if not is_noun and not (is_denied_taste and old.words == new.words):
            return True
    if old.attribute is not None and old.attribute == new.attribute and old.value and new.value:
        return _value_of(old) != _value_of(new)
    return _differ_in_one_place(old.frame, new.frame)


def comparable(earlier: str, later: str) -> bool:
    """Whether the statements are about one subject, and both hold now, so that one may change the other."""
    old, new = read(earlier), read(later)
    return old.subject == new.subject != "" and old.mood is new.mood is Mood.NOW


def may_end(earlier: str, later: str) -> bool:
    """Whether the later statement can end the earlier one. A question and another value's past or wish cannot."""
    old, new = read(earlier), read(later)
    if not new.is_asserted:
        return False
    has_values = old.attribute is not None and old.attribute == new.attribute and old.value and new.value
    if not has_values or not old.value.isdisjoint(new.value) or new.is_current:
        return True
    return new.mood is not Mood.PAST and WISH.search(later[:MAX_CHARS].casefold()) is None


def denies(earlier: str, later: str) -> bool:
    """Whether one of two statements about the present denies something that the other asserts."""
    old, new = read(earlier), read(later)
    is_opposed = old.is_over != new.is_over or old.taste * new.taste < 0
    same_attribute = old.attribute is not None and old.attribute == new.attribute
    if same_attribute and old.value and new.value:
        is_shared = bool(old.value & new.value)
    else:
        is_told = new.is_over or new.taste < 0 or len(old.words & new.words) > 1 or old.words == new.words
        is_other = _open_otherwise(old, new) or _differ_in_one_place(old.frame, new.frame)
        is_other = is_other or _is_of_some_days(earlier) != _is_of_some_days(later)
        is_shared = is_told and not is_other and _has_topic_of(old, new)
    return comparable(earlier, later) and is_opposed and is_shared


def counts(earlier: str, later: str) -> bool:
    """Whether the statements have the same words and other numbers: "I have a cat" and "I have two cats"."""
    old, new = read(earlier), read(later)
    is_one = old.words == new.words != frozenset() and old.is_over == new.is_over
    numbers = {*features(earlier).numbers} ^ {*features(later).numbers}
    return is_one and bool(numbers) and not _are_years(numbers) and not are_of_two_things(earlier, later)


def turned(earlier: str, later: str) -> bool:
    """Whether the statements differ in who does what to whom, in the order of their numbers, or in before and after.

    They may have the same words: "I owe Tom 50 euros" and "Tom owes me 50 euros".
    """
    old, new = read(earlier), read(later)
    if old.digits != new.digits and sorted(old.digits) == sorted(new.digits):
        return True
    shared = old.words & new.words
    is_reordered = [each for each in old.frame if each in shared] != [each for each in new.frame if each in shared]
    plain = [normalized("NFKC", each[:MAX_CHARS]).casefold() for each in (earlier, later)]
    directed = [_DIRECTED.search(each) is not None or _UNLISTED.search(each) is not None for each in plain]
    swaps = len({_OBJECT.search(each) is not None for each in plain}) > 1
    times = [set(_TIMES.findall(each)) for each in plain]
    return times[0] != times[1] or (is_reordered and (any(directed) or swaps)) or (all(directed) and swaps)


def resemble(earlier: str, later: str) -> bool:
    """Whether the statements have most of their words in common, or no word and the same numbers."""
    old, new = (frozenset(filter(_is_long, read(each).words)) for each in (earlier, later))
    if not old and not new:
        return read(earlier).digits == read(later).digits != ()
    return len(old & new) >= _SHARED_TOPIC * len(old | new)


def anchors(text: str, other: str) -> frozenset[str]:
    """The numbers of a statement, and its words that are written as names.

    The first word has a capital letter in any case, so it counts only if it is a name within the other statement.
    """
    (opening, inner), (_, others) = _capitals(text[:MAX_CHARS]), _capitals(other[:MAX_CHARS])
    return frozenset(inner | (opening & others) | {*features(text).numbers})


def _capitals(text: str) -> tuple[set[str], set[str]]:
    """The first word, and the capitalised words after it."""
    first = _FIRST_WORD.search(text)
    return (set(), set()) if first is None else ({first[0]}, set(_NAME.findall(text[first.end() :])))


def _both(earlier: str, later: str) -> list[str]:
    return [plain_of(normalized("NFKC", each[:MAX_CHARS]).strip()) for each in (earlier, later)]


def _may_be_one(subject: str, other: str) -> bool:
    """Whether two subjects may be one: "friend" and "friend anna", or an unnamed one and any other."""
    one, two = {*subject.split()}, {*other.split()}
    return one <= two or two <= one


def _differ_in_mood(old: Statement, new: Statement) -> bool:
    has_attribute = old.attribute is not None and old.attribute == new.attribute
    return old.mood is not new.mood and (has_attribute or Mood.PAST in (old.mood, new.mood))


def _of_attribute(old: Statement, new: Statement, *, differ: bool) -> Relation:  # noqa: PLR0911 (a table)
    values = _value_of(old), _value_of(new)
    shared, either = values[0] & values[1], values[0] | values[1]
    changes = Relation.CHANGES if old.mood is new.mood is Mood.NOW and old.subject else Relation.UNKNOWN
    if not old.value or not new.value or (not shared and new.may_be_a_place):
        return Relation.UNKNOWN
    if old.attribute in SEVERAL:
        if not shared or (shared not in values and len(shared) < _SAME_TOPIC * len(either)):
            return Relation.UNRELATED
        if old.is_over != new.is_over:
            return changes
        is_same = values[0] == values[1] and not differ and _are_asserted(old, new)
        return Relation.SAME if is_same else Relation.UNKNOWN
    if old.is_over or new.is_over:
        is_named = {stem(each) for each in old.value} <= new.words  # "I quit Initech and started at Hooli"
        return changes if (shared or is_named) and old.is_over != new.is_over else Relation.UNKNOWN
    if old.value == new.value:
        return Relation.UNKNOWN if differ or not _are_asserted(old, new) else Relation.SAME
    is_name = old.attribute in ("name", "manager") and shared not in (old.value, new.value)
    if is_name or (old.head not in new.value and new.head not in old.value):
        return changes
    return Relation.UNKNOWN


def _are_asserted(old: Statement, new: Statement) -> bool:
    """Whether both say of somebody known what holds now, or have the same words.

    "I used to live in Rome" and "Should I move to Rome?" have one value.
    """
    return (bool(old.subject) and old.mood is new.mood is Mood.NOW) or old.frame == new.frame


def _value_of(statement: Statement) -> frozenset[str]:
    """The words of the value; in stems if the attribute has several, such as "egg" for "eggs". Names have no stems."""
    return frozenset(map(stem, statement.value)) if statement.attribute in SEVERAL else statement.value


def _of_tastes(old: Statement, new: Statement, *, differ: bool, turned: bool) -> Relation:
    shared = old.words & new.words
    if turned and old.words == new.words and old.taste == new.taste and old.mood is new.mood is Mood.NOW:
        return Relation.CHANGES  # "I prefer tea to coffee", and then the other way round
    if not shared:
        return Relation.UNRELATED if old.words and new.words and not differ else Relation.UNKNOWN
    if old.taste != new.taste:
        alike = len(shared) >= _SHARED_TOPIC * min(len(old.words), len(new.words))
        return Relation.CHANGES if alike and old.mood is new.mood is Mood.NOW else Relation.UNKNOWN
    return Relation.SAME if old.frame == new.frame and not differ else Relation.UNKNOWN


def _of_topic(old: Statement, new: Statement, earlier: str, later: str) -> Relation:
    """Statements without a known attribute: one topic, and another number or a denial."""
    shared = old.words & new.words
    if not shared or _open_otherwise(old, new) or Mood.PAST in (old.mood, new.mood) or not old.subject:
        return Relation.UNKNOWN
    frames = [tuple(each for each in found.frame if not DIGITS.search(each)) for found in (old, new)]
    if are_of_two_things(earlier, later) or _differ_in_one_place(frames[0], frames[1]):
        return Relation.UNKNOWN
    if old.is_over != new.is_over:
        if _is_of_some_days(earlier) != _is_of_some_days(later):
            return Relation.UNKNOWN  # "I eat meat" and "I don't eat meat on Fridays"
        is_told = len(shared) > 1 or old.words == new.words or (old.words < new.words and new.is_over and not old.taste)
        return Relation.CHANGES if is_told and _has_topic_of(old, new) else Relation.UNKNOWN
    numbers, others = features(earlier).numbers, features(later).numbers
    is_one = old.mood is new.mood and old.attribute == new.attribute
    if numbers and others and numbers != others and is_one and not _are_years({*numbers} ^ {*others}):
        alike = len(shared) >= _SAME_TOPIC * len(old.words | new.words)
        return Relation.CHANGES if alike else Relation.UNKNOWN
    return Relation.UNKNOWN


def _is_of_some_days(text: str) -> bool:
    return _SOME_DAYS.search(text[:MAX_CHARS].casefold()) is not None


_SOME_DAYS = compiled(
    r"\b(?:on |every )?(?:mon|tues|wednes|thurs|fri|satur|sun)days\b|\b(?:on|at) (?:the )?(?:weekends?|night)\b"
    r"|\bduring \pL+"
    r"|\b(?:montag|dienstag|mittwoch|donnerstag|freitag|samstag|sonntag)s\b|\bam wochenende\b"
    r"|\blos (?:lunes|martes|miércoles|jueves|viernes|sábados|domingos)"
    r"|\ble (?:lundi|mardi|mercredi|jeudi|vendredi|samedi|dimanche)\b"
    r"|週末|周末|毎[月火水木金土日]曜|每周|주말"
)


def _open_otherwise(old: Statement, new: Statement) -> bool:
    """Whether one statement begins with somebody or something that the other one does not mention."""
    return not {old.opening} <= {"", *new.words} or not {new.opening} <= {"", *old.words}


def _has_topic_of(old: Statement, new: Statement) -> bool:
    """Whether one statement has the other's words, or most, and no word of its own in place of others."""
    shared, fewest, most = old.words & new.words, *sorted((len(old.words), len(new.words)))
    if len(shared) == fewest:
        return fewest > 0
    return len(shared) >= _SHARED_TOPIC * (most if old.words - new.words and new.words - old.words else fewest)


def are_of_two_things(earlier: str, later: str) -> bool:
    """Whether both statements name what they are about, and another thing: "my phone number", "my work number"."""
    plain = _both(earlier, later)
    named = [_THING.match(each) for each in plain]
    things = [{*found["thing"].split()} - WHOLE - TIMELY - _LINKS for found in named if found is not None]
    return (len(things) == len(named) and things[0] != things[1]) or _is_qualified(plain)


def are_of_one_thing(earlier: str, later: str) -> bool:
    """Whether both statements begin with the name of one thing, such as "my weekly call is"."""
    named = [_THING.match(each) for each in _both(earlier, later)]
    return all(named) and len({found["thing"] for found in named if found is not None}) == 1


def _is_qualified(plain: list[str]) -> bool:
    """Whether one of two statements begins with a word before the thing that the other one begins with."""
    first = [[*filter(None, found.groups())] for each in plain if (found := _OPENING.match(each)) is not None]
    if len(first) < len(plain):
        return False
    return any(len(one) > 1 and one[0] not in WHOLE and one[1] == other[0] for one, other in (first, first[::-1]))


_LINKS = frozenset(word_list("the my our for of in at für die der das den de del la le el du des pour para von"))
_OPENING = compiled(r"(?:my|our|the user's|mein\w*|unser\w*|mon|ma|notre) ([\pL\pM-]+)(?: ([\pL\pM-]+))?")
"""The first two words after a possessive: "return flight" in "my return flight departs at 9"."""

_THING = compiled(
    r"(?:the|das|der|die|el|la|le|my|our|the user's|mein\w*|unser\w*|mis?|nuestr\w+|mon|ma|mes|notre|mi[ao]"
    r"|miei|meus?|minhas?) (?P<thing>[\pL\pM\pN' -]{1,60}?) (?:is|are|ist|sind|beträgt|liegt|es|son|est|sont|è|é|são) "
)


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


_NAME = compiled(r"\p{Lu}[\p{L}\p{M}]+")
_FIRST_WORD = compiled(r"[\p{L}\p{M}']+")
_SHORTEST_LONG = 3


def _is_long(word: str) -> bool:
    """Whether a word can name a topic: a spaced script's shortest words are articles, pronouns and prepositions."""
    return len(word) >= _SHORTEST_LONG or not _SHORT.fullmatch(word)


_SHORT = compiled(r"[\p{Latin}\p{Greek}\p{Cyrillic}\p{Arabic}\p{Hebrew}\p{M}]+")
_DIRECTED = compiled(
    r"\b(?:to|than|from|over|before|after|by|until|owe[sd]?|lend[s]?|lent|borrow\pL*|manage[sd]?|chas\pL+)\b"
    r"|\b(?:als|statt|von|nach|vor|schuld\pL+|leih\pL+|lieber)\b|\b(?:que|al|desde|hasta|deb[eo]n?|prefier\pL+)\b"
    r"|\b(?:au|aux|que|doi[st]|préf\pL+)\b|보다|에서|에게|한테|より|から|まで|に|を|比|从|到|欠|借|多过|胜过|给"
    r"|把|被|爱"
)
"""Words after which it matters what comes first: "I owe Tom" and "Tom owes me" have the same words."""

_OBJECT = compiled(r"\b(?:me|us|him|them|mir|mich|uns|ihm|ihn|te|nous|moi)\b")
_TIMES = compiled(r"\b(?:until|till|before|after|bis|vor|hasta|antes|después)\b")
_UNLISTED = compiled(r"[^\p{Latin}\p{Hangul}\p{Han}\p{Hiragana}\p{Katakana}\p{Common}\p{M}]")
"""A letter of a script for which `_DIRECTED` has no words."""


def is_compared(*texts: str) -> bool:
    """Whether `contradiction` can compare the texts: each has a word that only English has, or is Korean.

    In German each noun has a capital letter, as names do in English, and in Spanish the first word may be a verb.
    """
    return all(has_hangul(text) or ENGLISH.search(text.casefold()) is not None for text in texts)
