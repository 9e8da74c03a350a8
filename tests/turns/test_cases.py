"""Cases in the life of a turn: in its prompt, counted with its ending, learnt from praise, gone when they fail."""

from __future__ import annotations

from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from uuid import UUID

import pytest
from pydantic import ValidationError

from perdure import Agent
from perdure.agents import Agents
from perdure.casebank import archive, cases, executions, reflection, search, sharing
from perdure.casebank.cases import NewCase
from perdure.casebank.runs import prune
from perdure.errors import Conflict, NotFound, ProviderError, SettingsError
from perdure.settings import CaseScope, MemorySettings
from perdure.turns.cancel import cancel
from perdure.turns.feedback import Feedback, give_feedback
from perdure.turns.run.runner import Ran
from tests.casebank.bank import bank
from tests.casebank.questions import TOPICS
from tests.turns.scripted import says
from tests.turns.stage import PATIENCE_S, Stage, until
from tests.turns.test_briefing import _Away
from tests.turns.test_cost import counted

ASKED = "how do I reset the router"
ANSWER = "Hold the button for ten seconds."
DAY_S = 86_400


def _put(stage: Stage, case_id: str = "router", query: str = ASKED, answer: str = ANSWER) -> None:
    vector = stage.embedder.embed([query])[0]
    new = NewCase(case_id, query, answer, query_vector=vector, embedder=stage.embedder.name)
    assert cases.add(stage.database, new, now=stage.clock.now())


def _system(stage: Stage) -> str:
    return stage.model.requests[-1].messages[0].content


def _cases(stage: Stage) -> str:
    """The section of the prompt that quotes cases."""
    return next((part for part in _system(stage).split("\n\n") if "Answered" in part), "")


def _executions(stage: Stage) -> list[tuple[Any, ...]]:
    rows = stage.sql("SELECT case_id, succeeded, feedback, error FROM case_executions ORDER BY executed_at, case_id")
    return [tuple(row) for row in rows]


def _say(stage: Stage, turn: dict[str, Any], score: int) -> None:
    give_feedback(stage.runtime, UUID(turn["turn_id"]), Feedback.model_validate({"score": score}))


def test_what_is_near_is_in_the_prompt_and_counted_with_the_ending(stage: Stage) -> None:
    """The four nearest, quoted as data; a turn that failed says so of them."""
    for word in ("now", "today", "again", "here", "first"):
        _put(stage, f"other {word}", f"how do I reset the router {word}", "red")
    _put(stage)
    stage.ask("please, how do I reset the router?")
    system = _system(stage)
    assert system.index("<recalled_memory ") < system.index(ANSWER) < system.index("</recalled_memory ")
    assert system.count("Answered") == len(_executions(stage)) == 4
    assert ("router", True, None, None) in _executions(stage)
    assert cases.read(stage.database, "router")["usage_count"] == 1
    stage.script(ProviderError("the model is ill"))
    assert stage.ask("how do I reset the router")["status"] == "failed"
    assert ("router", False, None, "PROVIDER_ERROR") in _executions(stage)


def test_without_cases_a_turn_costs_no_statement_more(stage: Stage) -> None:
    """And with some one: the search. The statement that settles the turn records their use, too."""
    for _ in range(2):
        stage.ask()
    with counted(stage.database) as (before, commits):
        stage.ask()
    _put(stage)
    stage.ask(ASKED)
    with counted(stage.database) as (after, with_cases):
        stage.ask(ASKED)
    assert with_cases == commits
    more = Counter(each.split('"')[1] for each in after) - Counter(each.split('"')[1] for each in before)
    assert sorted(more.elements()) == ["casebank.nearest_for_user_384"]
    assert len(_executions(stage)) == 2


def test_a_cancelled_turn_says_nothing_of_its_cases(stage: Stage) -> None:
    """Nobody knows whether it would have served."""
    _put(stage)

    def cancelled(*_given: Any) -> Any:
        cancel(stage.runtime, sent.turn_id)
        return says("too late")

    stage.script(cancelled)
    sent = stage.send(ASKED)
    stage.run(sent.session_id)
    assert ANSWER in _system(stage)
    if stage.turn(sent.turn_id)["status"] == "cancelled":
        assert _executions(stage) == []


@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_use_is_counted_once_wherever_the_process_dies(stage: Stage, moment: Any) -> None:
    """It is one statement with the ending: neither is there without the other."""
    _put(stage)
    sent = stage.send(ASKED)
    with stage.crashing(moment, "turns.settle"):
        stage.run(sent.session_id)
    settled = stage.turn(sent.turn_id)["settled_at"] is not None
    assert len(_executions(stage)) == settled == (moment == "after")
    stage.move(stage.settings.turn.lease_s + 1)
    stage.run(sent.session_id)
    assert stage.turn(sent.turn_id)["status"] == "done"
    assert _executions(stage) == [("router", True, None, None)]
    assert cases.read(stage.database, "router")["usage_count"] == 1


@pytest.mark.parametrize("statement", ["SELECT FROM cases FOR UPDATE", "DELETE FROM cases"])
def test_another_users_open_transaction_delays_no_settlement(stage: Stage, statement: str) -> None:
    """Whatever it has locked, the turn settles under it at once, and its model is asked once."""
    _put(stage)
    stage.ask()
    asked = len(stage.model.requests)
    with stage.database.engine.connect().execution_options(isolation_level="READ COMMITTED") as other, other.begin():
        other.exec_driver_sql(statement)
        sent = stage.send(ASKED)
        stage.sql("SET lock_timeout = 0")  # a wait would be one without an end
        with counted(stage.database) as (_, commits):
            assert stage.run(sent.session_id) == Ran(1)
        turn = stage.turn(sent.turn_id)
        assert (turn["status"], len(stage.model.requests) - asked) == ("done", 1)
        assert commits.count("turns.settle") == 1
        assert _executions(stage) == [("router", True, None, None)]
    executions.count(stage.database)
    counted_now = [each["usage_count"] for each in cases.list_cases(stage.database)]
    assert counted_now == ([1] if "UPDATE" in statement else [])
    assert bool(_executions(stage)) == bool(counted_now)


def test_unrelated_cases_reach_no_prompt_and_are_not_used(stage: Stage) -> None:
    """Ten of other topics: neither shown nor recorded, so that a case that nobody asks for becomes inactive."""
    for number, (query, *_) in enumerate(TOPICS[-10:]):
        _put(stage, f"case {number}", query)
    stage.ask(ASKED)
    assert ANSWER not in _system(stage)
    assert _executions(stage) == []
    everything = stage.settings.casebank.model_copy(update={"min_similarity": 0.0})
    stage.settings = stage.settings.model_copy(update={"casebank": everything})
    stage.ask(ASKED)
    assert _cases(stage).count("Answered") == len(_executions(stage)) > 0


def test_one_users_words_are_shown_to_nobody_else(stage: Stage) -> None:
    """An imported case is everybody's, a learnt one its user's; with the scope `all` each is everybody's."""
    stage.script(says(ANSWER))
    _say(stage, stage.ask(ASKED), 1)
    _put(stage, "imported", "what do I do if the router does not reset", "Unplug it.")
    stage.ask(ASKED, user_id="bob")
    assert ANSWER not in _system(stage)
    assert "Unplug it." in _cases(stage)
    stage.ask(ASKED)
    assert ANSWER in _cases(stage)
    shared = stage.settings.casebank.model_copy(update={"scope": CaseScope.ALL})
    stage.settings = stage.settings.model_copy(update={"casebank": shared})
    stage.ask(ASKED, user_id="bob")
    assert ANSWER in _cases(stage)


def test_a_shared_case_is_everybodys_until_it_is_given_back(stage: Stage) -> None:
    """An administrator's decision, from the praise of one user to the prompt of another."""
    stage.script(says(ANSWER))
    _say(stage, stage.ask(ASKED), 1)
    [learnt] = cases.list_cases(stage.database)
    sharing.share(stage.database, learnt["case_id"], "an administrator")
    stage.ask(ASKED, user_id="bob")
    assert ANSWER in _cases(stage)
    assert len(_executions(stage)) == 1
    sharing.unshare(stage.database, learnt["case_id"], "an administrator")
    stage.ask(ASKED, user_id="bob")
    assert ANSWER not in _system(stage)


def test_an_agent_has_cases_of_its_own_bank(stage: Stage) -> None:
    """What is praised of its turns is stored there and enters no other agent's prompt; `None` and False: no bank."""
    stage.agents = Agents(
        [
            Agent("assistant", "You help."),
            Agent("support", "You help.", casebank="support"),
            Agent("alone", "You help.", casebank=None),
            Agent("silent", "You help.", casebank=False),
        ]
    )

    def asks(agent: str) -> str:
        stage.script(says(f"{ANSWER} Says {agent}."))
        turn = stage.ask(ASKED, agent=agent)
        shown = _cases(stage)
        _say(stage, turn, 1)
        return shown

    for agent in ("assistant", "support", "alone", "silent"):
        assert asks(agent) == ""
    assert sorted(each["bank"] for each in cases.list_cases(stage.database)) == ["common", "support"]
    shown = {agent: asks(agent) for agent in ("assistant", "support", "alone", "silent")}
    assert "Says assistant." in shown["assistant"]
    assert "Says support." not in shown["assistant"]
    assert "Says support." in shown["support"]
    assert "Says assistant." not in shown["support"]
    assert shown["alone"] == shown["silent"] == ""
    stage.agents = Agents([Agent("another", "You help.")])
    turn_id = stage.sql("SELECT turn_id FROM turns WHERE agent = 'support' ORDER BY accepted_at DESC")[0].turn_id
    count = len(cases.list_cases(stage.database))
    give_feedback(stage.runtime, turn_id, Feedback(score=1))
    assert len(cases.list_cases(stage.database)) == count, "its agent is gone, and so is its bank's name"


@pytest.mark.parametrize("casebank", ["", "a b", True, 7])
def test_a_bank_that_cannot_be_named_stops_the_start(casebank: Any) -> None:
    """With the agent's name and what is accepted."""
    with pytest.raises(SettingsError, match=r"agent 'a' has casebank=.*accepted"):
        Agent("a", "You help.", casebank=casebank)


def test_cases_of_others_cost_a_turn_nothing(stage: Stage) -> None:
    """A user who may see none of the bank's cases pays no search; with the scope `all` they do."""
    stage.script(says(ANSWER))
    _say(stage, stage.ask(ASKED), 1)

    def searches() -> list[str]:
        with counted(stage.database) as (statements, _):
            stage.ask(ASKED, user_id="bob")
        return [each for each in statements if "EXECUTE" in each and "casebank." in each]

    assert searches() == []
    shared = stage.settings.casebank.model_copy(update={"scope": CaseScope.ALL})
    stage.settings = stage.settings.model_copy(update={"casebank": shared})
    assert len(searches()) == 1


def test_a_case_that_finds_no_room_is_not_counted(stage: Stage) -> None:
    """The budget is that of what is recalled."""
    _put(stage, answer="x" * 1_500)
    memory = MemorySettings(budget_semantic=0)
    stage.settings = stage.settings.model_copy(update={"memory": memory})
    stage.ask(ASKED)
    assert "xxx" not in _system(stage)
    assert _executions(stage) == []


def test_while_the_embedder_is_away_turns_go_on_without(stage: Stage) -> None:
    """A case costs nobody a reply."""
    _put(stage)
    stage.embedder = _Away()
    assert stage.ask(ASKED)["status"] == "done"
    assert ANSWER not in _system(stage)


def test_praise_is_learnt_and_found_when_its_user_asks_again(stage: Stage) -> None:
    """Once, however often it comes; blame of an answer nobody praised teaches nothing."""
    stage.script(says(ANSWER), says("no idea"))
    praised, blamed = stage.ask(ASKED), stage.ask("what is the weather like")
    for _ in range(2):
        _say(stage, praised, 1)
    _say(stage, blamed, -1)
    [learnt] = cases.list_cases(stage.database)
    assert (learnt["query"], learnt["response_text"]) == (ASKED, ANSWER)
    stage.ask("tell me, how do I reset the router")
    assert ANSWER in _system(stage)
    kept = stage.sql("SELECT feedback FROM turns WHERE turn_id = %(id)s", id=blamed["turn_id"])
    assert kept[0].feedback == {"score": -1, "comment": None}


def test_what_is_learnt_while_its_user_is_erased_goes_too(stage: Stage) -> None:
    """The erasure waits for the feedback that has begun; feedback that comes after finds no turn."""
    turn = stage.ask(ASKED, user_id="zoe")
    waiting = "SELECT 1 FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
    with ThreadPoolExecutor(1) as pool:
        erasing: list[Any] = []

        def hook(moment: str, name: str) -> None:
            if (moment, name) == ("before", "turns.feedback"):
                erasing.append(pool.submit(stage.runtime.eraser.erase, "zoe"))
                until(lambda: stage.sql(waiting), "the erasure waits")

        with stage.hooked(hook):
            _say(stage, turn, 1)
        erased = erasing[0].result(PATIENCE_S)
    assert (erased.rows["cases"], erased.rows["turns"]) == (1, 1)
    assert cases.list_cases(stage.database) == []
    with pytest.raises(NotFound):
        _say(stage, turn, 1)


def test_only_a_reply_can_be_praised(stage: Stage) -> None:
    """A turn that has none yet is refused with its status, and one that failed is no case."""
    sent = stage.send()
    good = Feedback(score=1, comment="thanks")
    with pytest.raises(Conflict, match="accepted"):
        give_feedback(stage.runtime, sent.turn_id, good)
    with pytest.raises(NotFound):
        give_feedback(stage.runtime, UUID(int=1), good)
    stage.script(ProviderError("ill"))
    stage.run(sent.session_id)
    give_feedback(stage.runtime, sent.turn_id, good)
    assert cases.list_cases(stage.database) == []


@pytest.mark.parametrize(
    "given", [{}, {"score": 0}, {"score": "1"}, {"score": 1.5}, {"score": True}, {"score": 1, "x": 1}]
)
def test_what_is_no_feedback_is_refused(given: dict[str, Any]) -> None:
    """With the name of what is wrong."""
    with pytest.raises(ValidationError, match=r"score|x"):
        Feedback.model_validate(given)


def test_the_story_of_a_case(stage: Stage) -> None:
    """Learnt from praise, used, blamed, rated, archived by a weekly run, restored: by turns alone, the clock moved."""
    stage.script(says(ANSWER))
    _say(stage, stage.ask(ASKED), 1)
    [case_id] = [each["case_id"] for each in cases.list_cases(stage.database)]
    for number in range(11):
        turn = stage.ask(ASKED)
        assert ANSWER in _system(stage)
        if number > 1:  # of the first two nobody says anything: they succeeded
            _say(stage, turn, -1)
    assert cases.read(stage.database, case_id)["success_rate"] is None
    assert reflection.reflect(stage.database).flagged == [case_id]
    assert round(cases.read(stage.database, case_id)["success_rate"]) == 18
    parts = bank(stage.database, stage.clock)
    assert prune.run(parts)["details"]["spared"][0]["rule"] == "recent_access"
    stage.move(8 * DAY_S)
    assert prune.run(parts)["details"]["removed"] == [case_id]
    stage.ask(ASKED)
    assert ANSWER not in _cases(stage)
    archive.restore(stage.database, case_id)
    stage.ask(ASKED)
    assert ANSWER in _cases(stage)
    assert search.search(stage.database, stage.embedder.embed([ASKED])[0], stage.embedder.name, 1)[0].case_id == case_id
