"""Cases are answered questions. Prompts quote them, their uses are counted, and failing cases are archived."""

from __future__ import annotations

from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from uuid import UUID

import pytest
from pydantic import ValidationError

from perdure import Agent
from perdure.access.tenants import UserKey
from perdure.agents import Agents
from perdure.casebank import archive, cases, executions, reflection, search, sharing
from perdure.casebank.cases import NewCase
from perdure.casebank.runs import prune
from perdure.errors import (
    BudgetExhausted,
    CircuitBreakerOpen,
    Conflict,
    ContentFiltered,
    DeadlineExceeded,
    NotFound,
    PerdureError,
    ProviderError,
    RateLimited,
    SettingsError,
)
from perdure.settings import CaseScope, MemorySettings
from perdure.turns.cancel import cancel
from perdure.turns.feedback import Feedback, give_feedback
from perdure.turns.lease.claim import Ran
from tests.casebank.bank import bank
from tests.casebank.questions import TOPICS
from tests.turns.harness import PATIENCE_S, Harness, until
from tests.turns.prompt.test_briefing import _Away
from tests.turns.scripted import calls, says, system_text
from tests.turns.test_cost import counted

QUESTION = "how do I reset the router"
ANSWER = "Hold the button for ten seconds."
DAY_S = 86_400


def _put(harness: Harness, case_id: str = "router", query: str = QUESTION, answer: str = ANSWER) -> None:
    vector = harness.embedder.embed([query])[0]
    new = NewCase(case_id, query, answer, query_vector=vector, embedder=harness.embedder.name)
    assert cases.add(harness.database, new, now=harness.clock.now())


def _system(harness: Harness) -> str:
    return system_text(harness.model.requests[-1])


def _cases(harness: Harness) -> str:
    """The section of the prompt that quotes cases."""
    return next((part for part in _system(harness).split("\n\n") if "Answered" in part), "")


def _executions(harness: Harness) -> list[tuple[Any, ...]]:
    rows = harness.sql("SELECT case_id, succeeded, feedback, error FROM case_executions ORDER BY executed_at, case_id")
    return [tuple(row) for row in rows]


def _score(harness: Harness, turn: dict[str, Any], score: int) -> None:
    give_feedback(harness.runtime, UUID(turn["turn_id"]), Feedback.model_validate({"score": score}))


def test_near_cases_are_in_the_prompt_and_counted_when_the_turn_settles(harness: Harness) -> None:
    """The prompt quotes the four nearest cases. A failed turn counts as a failed use of the cases in its prompt."""
    for word in ("now", "today", "again", "here", "first"):
        _put(harness, f"other {word}", f"how do I reset the router {word}", "red")
    _put(harness)
    harness.ask("please, how do I reset the router?")
    system = _system(harness)
    assert system.index("<recalled_memory ") < system.index(ANSWER) < system.index("</recalled_memory ")
    assert system.count("Answered") == len(_executions(harness)) == 4
    assert ("router", True, None, None) in _executions(harness)
    assert cases.read(harness.database, "router")["usage_count"] == 1
    harness.script(ContentFiltered("filtered"))
    assert harness.ask("how do I reset the router")["status"] == "failed"
    assert ("router", False, None, "CONTENT_FILTERED") in _executions(harness)


@pytest.mark.parametrize(
    "error",
    [
        ProviderError("the model failed"),
        RateLimited("too many requests"),
        DeadlineExceeded("no answer in time"),
        CircuitBreakerOpen("open"),
        BudgetExhausted("spent"),
    ],
    ids=lambda error: error.code,
)
def test_an_outage_is_no_use_of_the_cases(harness: Harness, error: PerdureError) -> None:
    """A turn that fails because a service is unavailable does not show whether the case would have helped."""
    _put(harness)
    harness.script(error)
    turn = harness.ask(QUESTION)
    assert ANSWER in _system(harness)
    assert turn["error"]["code"] == error.code
    assert _executions(harness) == []


@pytest.mark.usefixtures("prepared")
def test_cases_cost_a_turn_one_statement(harness: Harness) -> None:
    """Cases add one statement to a turn, the search. The settling statement records the use of the cases."""
    for _ in range(2):
        harness.ask()
    with counted(harness.database) as (before, commits):
        harness.ask()
    _put(harness)
    harness.ask(QUESTION)
    with counted(harness.database) as (after, with_cases):
        harness.ask(QUESTION)
    assert with_cases == commits
    more = Counter(each.split('"')[1] for each in after) - Counter(each.split('"')[1] for each in before)
    assert sorted(more.elements()) == ["casebank.nearest_for_user_384"]
    assert len(_executions(harness)) == 2


def test_a_cancelled_turn_records_no_use_of_its_cases(harness: Harness) -> None:
    """A cancelled turn does not show whether the case in its prompt would have helped."""
    _put(harness)

    def cancelled(*_given: Any) -> Any:
        cancel(harness.runtime, sent.turn_id)
        return calls(("look", {}))

    harness.script(cancelled)
    sent = harness.send(QUESTION)
    harness.run(sent.session_id)
    assert ANSWER in _system(harness)
    assert harness.turn(sent.turn_id)["status"] == "cancelled"
    assert _executions(harness) == []


@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_use_is_counted_once_wherever_the_process_dies(harness: Harness, moment: Any) -> None:
    """One statement records the use of the case and settles the turn, so a crash leaves both or neither."""
    _put(harness)
    sent = harness.send(QUESTION)
    with harness.crashing(moment, "turns.settle"):
        harness.run(sent.session_id)
    settled = harness.turn(sent.turn_id)["settled_at"] is not None
    assert len(_executions(harness)) == settled == (moment == "after")
    harness.move(harness.settings.turn.lease_s + 10)
    harness.run(sent.session_id)
    assert harness.turn(sent.turn_id)["status"] == "done"
    assert _executions(harness) == [("router", True, None, None)]
    assert cases.read(harness.database, "router")["usage_count"] == 1


@pytest.mark.parametrize("statement", ["SELECT FROM cases FOR UPDATE", "DELETE FROM cases"])
def test_another_users_open_transaction_delays_no_settlement(harness: Harness, statement: str) -> None:
    """A turn settles while another transaction holds locks on `cases`. The model is called once."""
    _put(harness)
    harness.ask()
    requests_before = len(harness.model.requests)
    with harness.database.engine.connect().execution_options(isolation_level="READ COMMITTED") as other, other.begin():
        other.exec_driver_sql(statement)
        sent = harness.send(QUESTION)
        harness.sql("SET lock_timeout = 0")  # a wait for a lock would never end
        with counted(harness.database) as (_, commits):
            assert harness.run(sent.session_id) == Ran(1)
        turn = harness.turn(sent.turn_id)
        assert (turn["status"], len(harness.model.requests) - requests_before) == ("done", 1)
        assert commits.count("turns.settle") == 1
        assert _executions(harness) == [("router", True, None, None)]
    executions.count(harness.database)
    counted_now = [each["usage_count"] for each in cases.list_cases(harness.database)]
    assert counted_now == ([1] if "UPDATE" in statement else [])
    assert bool(_executions(harness)) == bool(counted_now)


def test_unrelated_cases_reach_no_prompt_and_are_not_used(harness: Harness) -> None:
    """Ten cases of unrelated topics are neither shown nor recorded as used."""
    for number, (query, *_) in enumerate(TOPICS[-10:]):
        _put(harness, f"case {number}", query)
    harness.ask(QUESTION)
    assert ANSWER not in _system(harness)
    assert _executions(harness) == []
    everything = harness.settings.casebank.model_copy(update={"min_similarity": 0.0})
    harness.settings = harness.settings.model_copy(update={"casebank": everything})
    harness.ask(QUESTION)
    assert _cases(harness).count("Answered") == len(_executions(harness)) > 0


def test_a_learnt_case_is_shown_to_no_other_user(harness: Harness) -> None:
    """Every user sees imported cases. By default, only the user whose praise created a case sees that case."""
    harness.script(says(ANSWER))
    _score(harness, harness.ask(QUESTION), 1)
    _put(harness, "imported", "what do I do if the router does not reset", "Unplug it.")
    harness.ask(QUESTION, user_id="bob")
    assert ANSWER not in _system(harness)
    assert "Unplug it." in _cases(harness)
    harness.ask(QUESTION)
    assert ANSWER in _cases(harness)
    shared = harness.settings.casebank.model_copy(update={"scope": CaseScope.ALL})
    harness.settings = harness.settings.model_copy(update={"casebank": shared})
    harness.ask(QUESTION, user_id="bob")
    assert ANSWER in _cases(harness)


def test_a_shared_case_is_shown_to_all_users_until_it_is_unshared(harness: Harness) -> None:
    """After an administrator shares a learnt case, it is in other users' prompts until it is unshared."""
    harness.script(says(ANSWER))
    _score(harness, harness.ask(QUESTION), 1)
    [learnt] = cases.list_cases(harness.database)
    sharing.share(harness.database, learnt["case_id"], "an administrator")
    harness.ask(QUESTION, user_id="bob")
    assert ANSWER in _cases(harness)
    assert len(_executions(harness)) == 1
    sharing.unshare(harness.database, learnt["case_id"], "an administrator")
    harness.ask(QUESTION, user_id="bob")
    assert ANSWER not in _system(harness)


def test_an_agent_uses_only_cases_of_its_own_bank(harness: Harness) -> None:
    """An agent's prompts contain only cases of the agent's bank. `casebank=None` or `False` turns cases off."""
    harness.agents = Agents(
        [
            Agent("assistant", "You help."),
            Agent("support", "You help.", casebank="support"),
            Agent("alone", "You help.", casebank=None),
            Agent("silent", "You help.", casebank=False),
        ]
    )

    def asks(agent: str) -> str:
        harness.script(says(f"{ANSWER} Says {agent}."))
        turn = harness.ask(QUESTION, agent=agent)
        shown = _cases(harness)
        _score(harness, turn, 1)
        return shown

    for agent in ("assistant", "support", "alone", "silent"):
        assert asks(agent) == ""
    assert sorted(each["bank"] for each in cases.list_cases(harness.database)) == ["common", "support"]
    shown = {agent: asks(agent) for agent in ("assistant", "support", "alone", "silent")}
    assert "Says assistant." in shown["assistant"]
    assert "Says support." not in shown["assistant"]
    assert "Says support." in shown["support"]
    assert "Says assistant." not in shown["support"]
    assert shown["alone"] == shown["silent"] == ""
    harness.agents = Agents([Agent("another", "You help.")])
    turn_id = harness.sql("SELECT turn_id FROM turns WHERE agent = 'support' ORDER BY accepted_at DESC")[0].turn_id
    count = len(cases.list_cases(harness.database))
    give_feedback(harness.runtime, turn_id, Feedback(score=1))
    assert len(cases.list_cases(harness.database)) == count, "the bank of a removed agent is unknown"


@pytest.mark.parametrize("casebank", ["", "a b", True, 7])
def test_an_invalid_casebank_is_a_settings_error(casebank: Any) -> None:
    """The error names the agent and the accepted values."""
    with pytest.raises(SettingsError, match=r"agent 'a' has casebank=.*accepted"):
        Agent("a", "You help.", casebank=casebank)


@pytest.mark.usefixtures("prepared")
def test_cases_of_other_users_cause_no_search(harness: Harness) -> None:
    """If no case of the bank is visible to the user, no search runs. With the scope `all`, the search runs."""
    harness.script(says(ANSWER))
    _score(harness, harness.ask(QUESTION), 1)

    def searches() -> list[str]:
        with counted(harness.database) as (statements, _):
            harness.ask(QUESTION, user_id="bob")
        return [each for each in statements if "EXECUTE" in each and "casebank." in each]

    assert searches() == []
    shared = harness.settings.casebank.model_copy(update={"scope": CaseScope.ALL})
    harness.settings = harness.settings.model_copy(update={"casebank": shared})
    assert len(searches()) == 1


def test_a_case_beyond_the_budget_is_not_counted(harness: Harness) -> None:
    """A case beyond the budget of recalled text is not in the prompt, so its use is not recorded."""
    _put(harness, answer="x" * 1_500)
    memory = MemorySettings(budget_semantic=0)
    harness.settings = harness.settings.model_copy(update={"memory": memory})
    harness.ask(QUESTION)
    assert "xxx" not in _system(harness)
    assert _executions(harness) == []


def test_turns_run_without_cases_while_the_embedder_is_unavailable(harness: Harness) -> None:
    """Cases are found by vectors only. While the embedder is unavailable, turns are answered without cases."""
    _put(harness)
    harness.embedder = _Away()
    assert harness.ask(QUESTION)["status"] == "done"
    assert ANSWER not in _system(harness)


def test_the_case_of_withdrawn_praise_is_archived(harness: Harness) -> None:
    """The last feedback counts: an answer that was praised by mistake enters no prompt until it is praised again."""
    harness.script(says(ANSWER))
    turn = harness.ask(QUESTION)
    for score in (1, -1, -1):
        _score(harness, turn, score)
    [learnt] = cases.list_cases(harness.database)
    assert learnt["status"] == "archived"
    assert cases.read(harness.database, learnt["case_id"])["history"][-1]["reason"] == "its praise was withdrawn"
    harness.ask(QUESTION)
    assert ANSWER not in _cases(harness)
    for _ in range(2):
        _score(harness, turn, 1)
    assert [each["status"] for each in cases.list_cases(harness.database)] == ["active"]
    harness.ask(QUESTION)
    assert ANSWER in _cases(harness)


@pytest.mark.parametrize("stays", ["shared", "praised elsewhere", "archived by a run"])
def test_a_case_that_rests_on_more_than_its_praise_is_not_withdrawn(harness: Harness, stays: str) -> None:
    """What an administrator, a pruning run or the praise of another turn that used the case has decided stands."""
    harness.script(says(ANSWER), says("Press it."))
    turn = harness.ask(QUESTION)
    _score(harness, turn, 1)
    [learnt] = cases.list_cases(harness.database)
    if stays == "shared":
        sharing.share(harness.database, learnt["case_id"], "the test")
    elif stays == "praised elsewhere":
        _score(harness, harness.ask(QUESTION), 1)
    else:
        harness.move(100 * DAY_S)
        assert prune.run(bank(harness.database, harness.clock))["details"]["archived"] == [learnt["case_id"]]
    for score in (-1, 1):
        _score(harness, turn, score)
        found = cases.read(harness.database, learnt["case_id"])["status"]
        assert found == ("archived" if stays == "archived by a run" else "active")


def test_equal_praised_answers_are_one_case(harness: Harness) -> None:
    """Praise of the same answer counts as a use of its case. Another answer, user or bank has a case of its own."""
    harness.agents = Agents([Agent("assistant", "You help."), Agent("other", "You help.", casebank="other")])
    harness.script(*[says(ANSWER)] * 5, says("Another."))
    turns = [harness.ask(QUESTION) for _ in range(3)]
    turns += [harness.ask(QUESTION, user_id="bob"), harness.ask(QUESTION, agent="other"), harness.ask(QUESTION)]
    for each in turns:
        _score(harness, each, 1)
        _score(harness, each, 1)
    found = cases.list_cases(harness.database)
    assert len(found) == 4
    [first] = [each for each in found if each["usage_count"]]
    assert first["usage_count"] == 2
    assert reflection.reflect(harness.database).rated == 1
    _score(harness, turns[1], -1)
    reflection.reflect(harness.database)
    assert cases.read(harness.database, first["case_id"])["success_rate"] == 50


def test_equal_cases_take_one_place_in_the_prompt(harness: Harness) -> None:
    """Imported and shared cases may equal the user's own, and must not take the places of different ones."""
    for number in range(6):
        _put(harness, f"equal {number}", QUESTION.upper() if number % 2 else QUESTION)
    _put(harness, "different", f"{QUESTION} again", "Unplug it.")
    harness.ask(QUESTION)
    assert _cases(harness).count(ANSWER) == 1
    assert "Unplug it." in _cases(harness)


def test_praise_is_learnt_and_found_when_its_user_asks_again(harness: Harness) -> None:
    """Repeated praise of a reply stores one case, which a later prompt contains. A negative score stores no case."""
    harness.script(says(ANSWER), says("no idea"))
    praised, blamed = harness.ask(QUESTION), harness.ask("what is the weather like")
    for _ in range(2):
        _score(harness, praised, 1)
    _score(harness, blamed, -1)
    [learnt] = cases.list_cases(harness.database)
    assert (learnt["query"], learnt["response_text"]) == (QUESTION, ANSWER)
    harness.ask("tell me, how do I reset the router")
    assert ANSWER in _system(harness)
    kept = harness.sql("SELECT feedback FROM turns WHERE turn_id = %(id)s", id=blamed["turn_id"])
    assert kept[0].feedback == {"score": -1, "comment": None}


def test_a_case_learnt_during_an_erasure_is_erased_too(harness: Harness) -> None:
    """The erasure waits for feedback in progress, and erases the learnt case. Later feedback raises `NotFound`."""
    turn = harness.ask(QUESTION, user_id="zoe")
    waiting = "SELECT 1 FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
    with ThreadPoolExecutor(1) as pool:
        erasing: list[Any] = []

        def hook(moment: str, name: str) -> None:
            if (moment, name) == ("before", "turns.feedback"):
                erasing.append(pool.submit(harness.runtime.eraser.erase, UserKey("zoe")))
                until(lambda: harness.sql(waiting), "the erasure waits")

        with harness.hooked(hook):
            _score(harness, turn, 1)
        erased = erasing[0].result(PATIENCE_S)
    assert (erased.rows["cases"], erased.rows["turns"]) == (1, 1)
    assert cases.list_cases(harness.database) == []
    with pytest.raises(NotFound):
        _score(harness, turn, 1)


def test_only_a_reply_can_be_praised(harness: Harness) -> None:
    """Feedback on an unsettled turn raises `Conflict`. Praise of a failed turn stores no case."""
    sent = harness.send()
    good = Feedback(score=1, comment="thanks")
    with pytest.raises(Conflict, match="accepted"):
        give_feedback(harness.runtime, sent.turn_id, good)
    with pytest.raises(NotFound):
        give_feedback(harness.runtime, UUID(int=1), good)
    harness.script(ProviderError("ill"))
    harness.run(sent.session_id)
    give_feedback(harness.runtime, sent.turn_id, good)
    assert cases.list_cases(harness.database) == []


@pytest.mark.parametrize(
    "given", [{}, {"score": 0}, {"score": "1"}, {"score": 1.5}, {"score": True}, {"score": 1, "x": 1}]
)
def test_malformed_feedback_is_rejected(given: dict[str, Any]) -> None:
    """The error names the invalid field."""
    with pytest.raises(ValidationError, match=r"score|x"):
        Feedback.model_validate(given)


def test_the_life_cycle_of_a_case(harness: Harness) -> None:
    """A case is learnt from praise, used, rated down by negative feedback, archived by a prune run and restored."""
    harness.script(says(ANSWER))
    _score(harness, harness.ask(QUESTION), 1)
    [case_id] = [each["case_id"] for each in cases.list_cases(harness.database)]
    for number in range(11):
        turn = harness.ask(QUESTION)
        assert ANSWER in _system(harness)
        if number > 1:  # the first two turns get no feedback and count as successes
            _score(harness, turn, -1)
    assert cases.read(harness.database, case_id)["success_rate"] is None
    assert reflection.reflect(harness.database).flagged == [case_id]
    assert round(cases.read(harness.database, case_id)["success_rate"]) == 18
    parts = bank(harness.database, harness.clock)
    assert prune.run(parts)["details"]["spared"][0]["rule"] == "recent_access"
    harness.move(8 * DAY_S)
    assert prune.run(parts)["details"]["removed"] == [case_id]
    harness.ask(QUESTION)
    assert ANSWER not in _cases(harness)
    archive.restore(harness.database, case_id)
    harness.ask(QUESTION)
    assert ANSWER in _cases(harness)
    assert (
        search.search(harness.database, harness.embedder.embed([QUESTION])[0], harness.embedder.name, 1)[0].case_id
        == case_id
    )
