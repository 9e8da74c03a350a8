"""Two opinions decide what a statement is to a memory; where they disagree, both statements stay as they are."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any, cast

import pytest

from perdure.clock import MovedClock
from perdure.errors import ContentFiltered, ProviderError, SettingsError
from perdure.memory.consolidation.candidates import Decision
from perdure.memory.consolidation.judging import (
    EntailmentJudge,
    Judge,
    ModelJudge,
    Pair,
    Settled,
    Topic,
    guard,
    resolve_judge,
    settle,
)
from perdure.models.cross_encoders import CrossEncoder
from perdure.models.offline import OfflineModel
from perdure.models.protocol import ModelCall
from perdure.settings import Settings
from perdure.text.statements import Relation
from tests.memory.archive import LYON, PARIS, Archive, Echo, Grouped, answer, memory
from tests.turns.scripted import Line, Scripted, says

SAME, CHANGES, UNRELATED, UNKNOWN = Relation
HOME = Topic("user", "home")
MET = Pair("I met Nora at the lake.", "Nora and I met at the big lake.", 0.5)


@pytest.mark.parametrize(
    ("judged", "decision", "settled"),
    [
        (SAME, Decision.SAME, Settled(SAME)),
        (SAME, None, Settled(SAME)),
        (SAME, Decision.NEW, Settled(SAME, disputed=True)),
        (SAME, Decision.CHANGES, Settled(UNKNOWN, disputed=True)),
        (SAME, Decision.ENDS, Settled(UNKNOWN, disputed=True)),
        (CHANGES, Decision.SAME, Settled(CHANGES, disputed=True)),
        (CHANGES, Decision.NEW, Settled(UNKNOWN, disputed=True)),
        (CHANGES, Decision.ENDS, Settled(CHANGES)),
        (CHANGES, None, Settled(CHANGES)),
        (UNRELATED, Decision.SAME, Settled(UNRELATED, disputed=True)),
        (UNRELATED, Decision.CHANGES, Settled(UNRELATED, disputed=True)),
        (UNRELATED, None, Settled(UNRELATED)),
        (UNKNOWN, Decision.SAME, Settled(SAME)),
        (UNKNOWN, Decision.NEW, Settled(UNKNOWN)),
        (UNKNOWN, None, Settled(UNKNOWN)),
    ],
)
def test_neither_opinion_reinforces_a_contradiction_or_ends_an_unrelated_memory(
    judged: Relation, decision: Decision | None, settled: Settled
) -> None:
    """The table of the module. A decision about another memory is none about this one."""
    topics = (Topic(), Topic())
    named = decision not in (None, Decision.NEW)
    assert settle(MET, judged, decision, topics, is_named=named) == settled
    other = settle(MET, judged, decision, topics, is_named=False)
    assert other.relation is (settled.relation if judged is not SAME and not named else judged)


def test_the_same_words_are_the_same() -> None:
    """A model that takes a repetition for a change or an end stores nothing twice. The disagreement is recorded."""
    pair = Pair("I live in Lyon.", "I live in lyon", 0.99)
    for decision in (Decision.CHANGES, Decision.ENDS):
        assert settle(pair, SAME, decision, (Topic(), Topic()), is_named=True) == Settled(SAME, disputed=True)


def test_a_change_that_no_rule_finds_needs_one_attribute() -> None:
    """The model alone ends no memory: the memory must be about the same attribute of the same subject."""
    pair = Pair("The user studies law.", "The user became a pilot.")
    for topics, relation in (
        ((HOME, HOME), CHANGES),
        ((HOME, Topic("user", "job")), UNKNOWN),
        ((Topic(),) * 2, UNKNOWN),
    ):
        assert settle(pair, UNKNOWN, Decision.CHANGES, topics, is_named=True).relation is relation
    sisters = Topic("sister", "home")
    assert settle(pair, UNKNOWN, Decision.ENDS, (HOME, sisters), is_named=True) == Settled(UNKNOWN, disputed=True)


def test_a_change_needs_topics_that_may_be_one() -> None:
    """The rules alone end nothing if the topics differ. The model's "changes" outweighs only another attribute."""
    pair = Pair("My flat is near the park.", "My flat is near the sea.")
    friends = Topic("anna", "home"), Topic("friend anna", "home")
    for decision, topics, settled in (
        (None, (HOME, Topic("anna", "home")), Settled(UNKNOWN, disputed=True)),
        (Decision.CHANGES, (HOME, Topic("anna", "home")), Settled(UNKNOWN, disputed=True)),
        (None, (HOME, Topic("user", "job")), Settled(UNKNOWN, disputed=True)),
        (Decision.CHANGES, (HOME, Topic("user", "job")), Settled(CHANGES)),
        (None, friends, Settled(CHANGES)),
        (None, (HOME, Topic("user")), Settled(CHANGES)),
    ):
        assert settle(pair, CHANGES, decision, topics, is_named=decision is not None) == settled


@pytest.mark.parametrize(
    ("attribute", "earlier", "later", "relation"),
    [
        ("pet", "I have a dog.", "I have a cat.", UNKNOWN),
        ("language", "Ich spreche Französisch.", "Ich kann auch Spanisch.", UNKNOWN),
        ("children", "Mon fils est Léo.", "Ma fille est Mia.", UNKNOWN),
        ("allergies", "I can't have nuts.", "Pollen makes me sneeze.", UNKNOWN),
        ("language", "I speak French.", "I don't speak French.", CHANGES),
        ("pet", "I have a dog called Rex.", "I don't have Rex any more.", CHANGES),
        ("studies", "I study law.", "I switched to medicine.", CHANGES),
    ],
)
def test_a_further_value_ends_no_other(attribute: str, earlier: str, later: str, relation: Relation) -> None:
    """A model that takes a second pet for a change ends the first one only by a statement that denies it."""
    topic = Topic("user", attribute)
    for decision in (Decision.CHANGES, Decision.ENDS):
        assert settle(Pair(earlier, later), UNKNOWN, decision, (topic, topic), is_named=True).relation is relation


@pytest.mark.parametrize(
    ("attribute", "earlier", "later", "relation"),
    [
        ("home", "Ik woon in Lyon.", "Ik ben naar Parijs verhuisd.", UNKNOWN),
        ("home", "J'habite à Lyon.", "Lyon est ma ville.", SAME),
        ("home", "Я живу в Москве.", "Я переехал в Казань.", UNKNOWN),
        ("diet", "Je suis végétarien.", "Je mange de nouveau de la viande.", UNKNOWN),
        ("studies", "I study law.", "I switched from law to medicine.", UNKNOWN),
        ("studies", "Ich studiere Jura.", "Ich habe von Jura zu Medizin gewechselt.", UNKNOWN),
        ("marital status", "I am single.", "I got married in June.", UNKNOWN),
        ("phone", "My phone number is 555-0199.", "You can reach me at 555-0199.", SAME),
        ("debt", "I owe Tom 50 euros.", "Tom owes me 50 euros.", UNKNOWN),
        ("debt", "Ich schulde Tom 50 Euro.", "Tom schuldet mir 50 Euro.", UNKNOWN),
        ("rent", "我的房租是每月3000元。", "我每月付3000元房租。", SAME),
    ],
)
def test_one_topic_makes_no_repetition(attribute: str, earlier: str, later: str, relation: Relation) -> None:
    """A model's "same" needs most words, or one topic and the same names or numbers."""
    topic = Topic("user", attribute)
    judged = guard(Pair(earlier, later), 0.92)
    assert judged is UNKNOWN
    assert settle(Pair(earlier, later), judged, Decision.SAME, (topic, topic), is_named=True).relation is relation


def test_a_repetition_that_no_rule_finds_must_be_near() -> None:
    """The model alone merges no statements that have no word in common and are not similar."""
    for similarity, relation in ((None, UNKNOWN), (0.1, UNKNOWN), (0.8, SAME)):
        pair = Pair("The kitchen gets new tiles.", "We renovate where we cook.", similarity)
        assert settle(pair, UNKNOWN, Decision.SAME, (Topic(), Topic()), is_named=True).relation is relation


def test_similar_statements_agree_unless_a_difference_is_found() -> None:
    """Above the threshold of similarity, as before. Spanish has no list of opposites, so one word may be one."""
    assert guard(Pair("I sleep well.", "I sleep badly.", 0.95), 0.92) is CHANGES
    assert guard(Pair("I go to bed at 11.", "I am in bed by 11.", 0.95), 0.92) is SAME
    assert guard(Pair("I go to bed at 11.", "I am in bed by 11.", 0.5), 0.92) is UNKNOWN
    assert guard(Pair("Bebo café.", "Bebo zumo.", 0.95), 0.92) is UNKNOWN
    assert guard(Pair(LYON, "My sister lives in Lyon.", 0.99), 0.92) is UNRELATED
    assert guard(Pair("I prefer tea to coffee.", "I prefer coffee to tea.", 1.0), 0.92) is CHANGES
    assert guard(Pair("I sleep well.", "I slept badly, as a child.", 0.95), 0.92) is UNKNOWN


@pytest.mark.parametrize(
    ("earlier", "later"),
    [
        ("I lent the red cookbook to Sara last summer.", "I lent the red cookbook to Ben last summer."),
        ("I play chess with Tom on Monday.", "I play chess with Tom on Tuesday."),
        ("I ran the marathon in 2019.", "I ran the marathon in 2021."),
        ("I read the first book last winter.", "I read the second book last winter."),
        ("My flight departs at 9.", "My return flight departs at 9."),
        ("Meine Kollegin Anna sitzt im Büro.", "Meine Kollegin Petra sitzt im Büro."),
        ("J'ai prêté le livre rouge à Sara.", "J'ai prêté le livre rouge à Ben."),
    ],
)
def test_similar_statements_of_two_things_are_neither(earlier: str, later: str) -> None:
    """Two names, days, years or things may both be meant, however similar the statements are."""
    assert guard(Pair(earlier, later, 0.97), 0.92) is UNKNOWN


@pytest.mark.parametrize(
    ("earlier", "later", "relation"),
    [
        ("I live in Tromsø.", "I lived in Bodø until last year.", UNKNOWN),
        ("I live in Tromsø.", "If I get the job, I will move to Bodø.", UNKNOWN),
        ("I live in Tromsø.", "I would love to live in Bodø.", UNKNOWN),
        ("I live in Tromsø.", 'My colleague said: "I moved to Bodø."', UNKNOWN),
        ("I live in Tromsø.", "I lived in Tromsø until last year.", CHANGES),
        ("I live in Tromsø.", "I used to live in Oslo and now I live in Bodø.", CHANGES),
        ("我住在成都。", "我以前住在重庆。", UNKNOWN),
        ("Vivo en Cádiz.", "Si consigo el trabajo, me mudo a Huelva.", UNKNOWN),
    ],
)
def test_a_model_ends_nothing_by_what_is_not_so(earlier: str, later: str, relation: Relation) -> None:
    """A question, a condition, a quotation, a wish and another value's past end no memory, whatever the model says."""
    topics = (Topic.of(earlier), Topic.of(later))
    found = settle(Pair(earlier, later), guard(Pair(earlier, later), 0.92), Decision.CHANGES, topics, is_named=True)
    assert found.relation is relation


def test_another_count_of_the_same_is_a_change() -> None:
    """Of an attribute with several values, too: a second daughter changes how many there are."""
    topic = Topic("user", "children")
    for later, relation in (("We have two daughters now.", CHANGES), ("We have two sons now.", UNKNOWN)):
        pair = Pair("We have one daughter.", later)
        assert settle(pair, UNKNOWN, Decision.CHANGES, (topic, topic), is_named=True).relation is relation
        assert settle(pair, UNKNOWN, Decision.SAME, (topic, topic), is_named=True).relation is UNKNOWN


@pytest.mark.parametrize(
    ("line", "relations"),
    [
        (says('["same", "changes"]'), [SAME, CHANGES]),
        (says('Sure:\n```json\n["unrelated", "unrelated"]\n```'), [UNRELATED, UNRELATED]),
        (says('["same"]'), [UNKNOWN, UNKNOWN]),
        (says('["same", "perhaps"]'), [UNKNOWN, UNKNOWN]),
        (says("I would rather not."), [UNKNOWN, UNKNOWN]),
        (ContentFiltered("no"), [UNKNOWN, UNKNOWN]),
    ],
)
def test_a_model_as_the_judge_decides_only_by_a_usable_reply(line: Line, relations: list[Relation]) -> None:
    """After an unusable reply or a refusal the rules decide alone."""
    pairs = [MET, Pair("The user studies law.", "The user became a pilot.")]
    assert ModelJudge(Scripted(line)).judge(pairs, ModelCall(MovedClock(), 60)) == relations


def test_a_model_as_the_judge_reinforces_no_contradiction() -> None:
    """The rules outrank its "same"."""
    judge = ModelJudge(Scripted(says('["same"]')))
    assert judge.judge([Pair("I have 2 cats.", "I have 3 cats.")], ModelCall(MovedClock(), 60)) == [UNKNOWN]


class Entailing:
    """A cross-encoder that gives the scores of a table, by the texts of a pair."""

    labels = ("contradiction", "entailment", "neutral")

    def __init__(self, **table: Sequence[float]) -> None:
        self._table = table

    def scores(self, pairs: Sequence[tuple[str, str]], call: ModelCall) -> list[list[float]]:
        assert call.remaining() > 0
        return [[*self._table[f"{one}{other}"]] for one, other in pairs]


CONTRADICTS, ENTAILS, NEUTRAL, UNSURE = (4.0, 0.0, 0.0), (0.0, 4.0, 0.0), (0.0, 0.0, 4.0), (1.0, 0.5, 0.0)


@pytest.mark.parametrize(
    ("forward", "backward", "found"),
    [
        (ENTAILS, ENTAILS, SAME),
        (ENTAILS, NEUTRAL, UNKNOWN),
        (CONTRADICTS, CONTRADICTS, CHANGES),
        (CONTRADICTS, NEUTRAL, UNKNOWN),
        (NEUTRAL, NEUTRAL, UNRELATED),
        (UNSURE, UNSURE, UNKNOWN),
        (CONTRADICTS, UNSURE, UNKNOWN),
    ],
)
def test_a_cross_encoder_decides_if_it_is_sure_in_both_directions(
    forward: Sequence[float], backward: Sequence[float], found: Relation
) -> None:
    """A statement that entails another one may say more, and is not the same."""
    judge = EntailmentJudge(lambda _: cast("CrossEncoder", Entailing(ab=forward, ba=backward)))
    assert judge.judge([Pair("a", "b")], ModelCall(MovedClock(), 60)) == [found]


def test_a_cross_encoder_reinforces_no_contradiction() -> None:
    """The rules outrank it, as they outrank a model."""
    pair = Pair("I have 2 cats.", "I have 3 cats.")
    both = {f"{pair.earlier}{pair.later}": ENTAILS, f"{pair.later}{pair.earlier}": ENTAILS}
    judge = EntailmentJudge(lambda _: cast("CrossEncoder", Entailing(**both)))
    assert judge.judge([pair], ModelCall(MovedClock(), 60)) == [UNKNOWN]


def test_without_a_usable_cross_encoder_the_rules_decide_alone(caplog: pytest.LogCaptureFixture) -> None:
    """A reranker's model has one score, which says nothing about entailment. The log says what is wrong."""
    other = SimpleNamespace(labels=("label_0",))
    judge = EntailmentJudge(lambda _: cast("CrossEncoder", other))
    assert judge.judge([MET], ModelCall(MovedClock(), 60)) == [UNKNOWN]
    assert "PERDURE_MEMORY__JUDGE names a cross-encoder with the labels label_0: accepted" in caplog.text


def test_a_cross_encoder_that_is_not_there_yet_leaves_the_session_to_a_later_run() -> None:
    """As while the summary model is down."""

    def load(_: ModelCall) -> CrossEncoder:
        raise ProviderError("The hub cannot be reached.", transient=True)

    with pytest.raises(ProviderError):
        EntailmentJudge(load).judge([MET], ModelCall(MovedClock(), 60))


def test_a_judge_is_chosen_by_its_setting(settings: Settings) -> None:
    """`guard` needs no judge. An unknown name stops the program with the accepted ones."""

    def chosen(name: str) -> Judge | None:
        memory = settings.memory.model_copy(update={"judge": name})
        return resolve_judge(settings.model_copy(update={"memory": memory}), OfflineModel())

    assert chosen("guard") is None
    assert isinstance(chosen("model"), ModelJudge)
    assert isinstance(chosen("cross-encoder:mini"), EntailmentJudge)
    with pytest.raises(
        SettingsError,
        match="PERDURE_MEMORY__JUDGE is 'nobody': accepted: guard, model, cross-encoder:NAME",
    ):
        chosen("nobody")


def test_a_consolidation_asks_the_judge_what_the_rules_do_not_tell(archive: Archive) -> None:
    """The judge is asked without an open transaction, and its answer supersedes the earlier memory."""
    earlier, later = "The user studies law.", "The user became a pilot."
    archive.ended(earlier)
    archive.ended(later)
    judge = ModelJudge(Scripted(says('["changes"]')))
    archive.embedder = Grouped()
    counts = archive.consolidator(Echo(), judge=judge).batch()
    assert (counts.stored, counts.superseded) == (1 + 1, 1)
    assert [(row.content, row.replaced_by) for row in archive.known()] == [(earlier, later), (later, None)]


def test_a_dispute_is_recorded(archive: Archive) -> None:
    """The session's outcome counts the comparisons in which the model and the judge disagreed."""
    archive.ended(LYON)
    session_id = archive.ended(PARIS)
    archive.harness.script(answer(LYON), answer(memory(PARIS, decision="same", known=1)))
    archive.consolidator().batch()
    assert archive.session(session_id).consolidation == {
        "stored": 1, "duplicates_merged": 0, "superseded": 1, "disputed": 1,
    }  # fmt: skip


def test_a_memory_holds_since_the_time_that_was_told(archive: Archive) -> None:
    """The earlier memory ends when the later one begins to hold, not when the later one was said."""
    archive.ended(LYON)
    archive.ended(PARIS)
    now = archive.harness.clock.now()
    begins, later = now.replace(year=now.year - 6), now.replace(year=now.year - 1, month=3)
    archive.harness.script(answer(memory(LYON, since=f"{begins:%Y}")), answer(memory(PARIS, since=f"{later:%Y-%m}")))
    archive.consolidator().batch()
    old, new = archive.known()
    assert (old.valid_from, new.valid_to) == (datetime(begins.year, 1, 1, tzinfo=UTC), None)
    assert old.valid_to == new.valid_from == datetime(later.year, 3, 1, tzinfo=UTC)


def test_a_time_to_come_ends_a_memory_then(archive: Archive) -> None:
    """What changes in June holds until June."""
    archive.ended(LYON)
    archive.ended("I live in Paris from June.")
    year = archive.harness.clock.now().year + 1
    later = memory(PARIS, since=f"{year}-06", attribute="home", subject="user", decision="changes", known=1)
    archive.harness.script(answer(memory(LYON, attribute="home", subject="user")), answer(later))
    archive.consolidator().batch()
    ended = {row.content: (row.valid_to, row.replaced_by) for row in archive.known()}
    assert ended == {LYON: (datetime(year, 6, 1, tzinfo=UTC), PARIS), PARIS: (None, None)}


def test_what_was_over_before_ends_nothing_that_holds(archive: Archive) -> None:
    """A former employer is history and ends no later one, whatever the model says."""
    year = archive.harness.clock.now().year
    job: dict[str, Any] = {"subject": "user", "attribute": "employer"}
    archive.ended("I work at Fabrikam.")
    archive.ended("I am with Contoso.")
    archive.harness.script(
        answer(memory("The user works at Fabrikam.", since=f"{year - 2}", **job)),
        answer(memory("The user is with Contoso.", until=f"{year - 3}", decision="changes", known=1, **job)),
    )
    archive.consolidator().batch()
    ended = {row.content: row.valid_to for row in archive.known()}
    assert ended == {
        "The user works at Fabrikam.": None, "The user is with Contoso.": datetime(year - 2, 1, 1, tzinfo=UTC),
    }  # fmt: skip


def test_what_is_new_to_the_model_ends_no_memory(archive: Archive) -> None:
    """The rules take the parents' flat for the user's own one here. The model says that it is new, so both are kept."""
    archive.ended(LYON)
    session_id = archive.ended("We have a flat in Nice.")
    home: dict[str, Any] = {"subject": "user", "attribute": "home"}
    archive.harness.script(answer(memory(LYON, **home)), answer(memory("I live in Nice.", decision="new", **home)))
    archive.consolidator().batch()
    assert {row.content: row.valid_to for row in archive.known()} == {LYON: None, "I live in Nice.": None}
    assert archive.session(session_id).consolidation["disputed"] == 1


def test_a_message_is_merged_in_its_order(archive: Archive) -> None:
    """Of "I live in Lyon. Sorry, I mean Paris." the second one holds, although the model gave it more importance.

    The model was not shown the first one, so its "new" is no opinion about it.
    """
    archive.ended("I live in Lyon. Sorry, I mean Paris.")
    items = [memory(text, weight, sources=[1], decision="new") for text, weight in ((LYON, 0.5), (PARIS, 0.9))]
    archive.harness.script(answer(*items))
    archive.consolidator().batch()
    assert [(row.content, row.replaced_by) for row in archive.known()] == [(LYON, PARIS), (PARIS, None)]


def test_what_is_over_already_is_history(archive: Archive) -> None:
    """A memory "until last year" ends then, and so does what it ends. A time to come ends nothing yet."""
    archive.ended("I work at Contoso.")
    archive.ended("I worked at Contoso until last year.")
    archive.ended("I own a boat until next year.")
    year = archive.harness.clock.now().year
    archive.harness.script(
        answer(memory("I work at Contoso.", since=f"{year - 3}", attribute="employer")),
        answer(memory("I left Contoso.", until=f"{year - 1}", decision="ends", known=1, attribute="employer")),
        answer(memory("I own a boat.", until=f"{year + 1}")),
    )
    archive.consolidator().batch()
    ended = {row.content: row.valid_to for row in archive.known()}
    last = datetime(year, 1, 1, tzinfo=UTC)
    assert ended == {"I work at Contoso.": last, "I left Contoso.": last, "I own a boat.": None}
