"""The routes `/v1/consolidation` and `/v1/casebank`, and the feedback route: responses and required keys."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from uuid import uuid4

import pytest
from pydantic import SecretStr
from sqlalchemy.exc import IntegrityError
from starlette.testclient import TestClient

from perdure.casebank import cases, sharing
from perdure.casebank.cases import NewCase
from perdure.casebank.runs import prune, state
from perdure.channels.http.app import create_app
from perdure.channels.http.schemas.casebank import NearCases, Pruned, PruningProgress, PruningRun
from perdure.channels.http.schemas.turns import Turn
from perdure.channels.notices import bank_of
from perdure.runtime import Runtime
from perdure.settings import CasebankSettings, PruneApproval
from tests.casebank.bank import put, statuses
from tests.channels.conftest import ADMIN_KEY, BASE_URL, SERVICE_KEY
from tests.channels.test_bad_input import refused
from tests.conftest import RecordingWaker
from tests.turns.harness import until

_WAITING = 40
"""The number of waiting requests. It exceeds the number of the gateway's threads."""


class Working(RecordingWaker):
    """A waker that does a worker's job: it advances the CaseBank's pruning run in a new thread."""

    def __init__(self) -> None:
        super().__init__()
        self.runtime: Runtime | None = None
        self.threads: list[threading.Thread] = []

    def casebank(self) -> bool:
        """Advance the pruning run in a new thread."""
        assert self.runtime is not None
        self.threads.append(threading.Thread(target=prune.advance, args=(bank_of(self.runtime),)))
        self.threads[-1].start()
        return super().casebank()


@contextmanager
def _gateway(runtime: Runtime, *, without_workers: bool = False, **limits: Any) -> Iterator[TestClient]:
    """Yields a client of a gateway. Unless `without_workers`, threads advance the CaseBank's pruning runs."""
    changed = runtime.settings.model_copy(update={"casebank": CasebankSettings(load_percent=100, **limits)})
    waker = RecordingWaker() if without_workers else Working()
    parts = replace(runtime, settings=changed, wake=waker)
    if isinstance(waker, Working):
        waker.runtime = parts
    with TestClient(create_app(parts, lambda: True), base_url=BASE_URL) as client:
        yield client
    for thread in waker.threads if isinstance(waker, Working) else ():
        thread.join()


@pytest.fixture
def bank(runtime: Runtime) -> None:
    """Stores five cases: one with a low success rate, two duplicates, one inactive, one protected by its high usage."""
    put(runtime.database, "low", usage=20, rate=10)
    put(runtime.database, "one", vector=[1.0, 0.0], usage=9)
    put(runtime.database, "same", vector=[1.0, 0.0], usage=3)
    put(runtime.database, "a/sleeper", idle_days=91)
    put(runtime.database, "used", usage=501, rate=10)


@pytest.mark.usefixtures("bank")
def test_a_dry_run_shows_what_a_run_then_does(runtime: Runtime) -> None:
    """A real run does what the dry run planned. A case whose id contains a slash can be restored."""
    with _gateway(runtime) as client:
        planned = client.post("/v1/consolidation/dry-run")
        assert planned.status_code == 200
        Pruned.model_validate(planned.json())
        assert planned.json()["dry_run"] is True
        dry = client.get(f"/v1/consolidation/runs/{planned.json()['run_id']}").json()
        PruningRun.model_validate(dry)
        assert (dry["dry_run"], dry["phase"], dry["outcome"]) == (True, "done", None)
        assert dry["plan"]["details"] == planned.json()["details"]
        assert set(statuses(runtime.database).values()) == {"active"}
        done = client.post("/v1/consolidation/run", json={})
        assert done.status_code == 200
        Pruned.model_validate(done.json())
        result = done.json()
        assert result["details"] == planned.json()["details"]
        assert [result[f"{what}_cases"] for what in ("removed", "merged", "archived")] == [1, 1, 1]
        assert result["details"]["merged"] == [{"keeper": "one", "removed": "same", "similarity": 1.0}]
        assert result["details"]["spared"][0]["rule"] == "protected_usage"
        shown = client.get(f"/v1/consolidation/runs/{result['run_id']}").json()
        PruningRun.model_validate(shown)
        assert (shown["phase"], shown["outcome"]["removed_cases"]) == ("done", 1)
        restored = client.post("/v1/consolidation/restore/a%2Fsleeper")
        assert (restored.status_code, restored.json()) == (200, {"case_id": "a/sleeper", "status": "restored"})
        assert statuses(runtime.database)["a/sleeper"] == "active"
        for nothing in ("a/sleeper", "nobody", "%00"):
            refused(client.post(f"/v1/consolidation/restore/{nothing}"), 404, "NOT_FOUND")


@pytest.mark.long
@pytest.mark.usefixtures("bank")
def test_a_plan_waits_for_approval(runtime: Runtime) -> None:
    """A request for a run that needs approval gets 202.

    While the run waits for approval, no other run can start. A run can be approved or rejected only once.
    """
    with _gateway(runtime, approval=PruneApproval.MANUAL) as client:
        first = client.post("/v1/consolidation/run")
        assert (first.status_code, first.json()["phase"]) == (202, "waiting_approval")
        assert first.json()["removed_cases"] == 1
        refused(client.post("/v1/consolidation/run"), 409, "CONFLICT")
        path = f"/v1/consolidation/runs/{first.json()['run_id']}"
        rejected = client.post(f"{path}/reject")
        assert (rejected.status_code, rejected.json()["phase"]) == (202, "rejected")
        refused(client.post(f"{path}/approve"), 409, "CONFLICT")
        second = client.post("/v1/consolidation/run").json()
        approved = client.post(f"/v1/consolidation/runs/{second['run_id']}/approve")
        PruningRun.model_validate(approved.json())
        assert approved.status_code == 202
    assert statuses(runtime.database)["low"] == "archived"  # a worker has applied the plan


@pytest.mark.usefixtures("bank")
def test_a_run_that_is_not_finished_in_time_goes_on(runtime: Runtime) -> None:
    """If a run or dry run does not finish within `wait`, the response is 202 with the run's id.

    The run is listed, and a worker finishes it later.
    """
    with _gateway(runtime, without_workers=True) as client:
        begun = [client.post(f"/v1/consolidation/{kind}?wait=0") for kind in ("run", "dry-run")]
        for answer, dry in zip(begun, (False, True), strict=True):
            PruningProgress.model_validate(answer.json())
            standing = (answer.status_code, answer.json()["dry_run"], answer.json()["phase"])
            assert standing == (202, dry, "planning")
        ids = [answer.json()["run_id"] for answer in begun]
        again = [client.post(f"/v1/consolidation/{kind}?wait=0.1").json()["run_id"] for kind in ("run", "dry-run")]
        assert again == ids, "a second request returns the waiting run"
        listed = client.get("/v1/consolidation/runs").json()
        assert [PruningProgress.model_validate(each).dry_run for each in listed] == [True, False]
        assert [each["run_id"] for each in listed] == ids[::-1]
        assert client.get("/v1/consolidation/runs?limit=1").json() == listed[:1]
        for wrong in ("wait=-1", "wait=nan", "wait=soon"):
            refused(client.post(f"/v1/consolidation/run?{wrong}"), 400, "INVALID_REQUEST")
        refused(client.get("/v1/consolidation/runs?limit=0"), 400, "INVALID_REQUEST")

        bank = bank_of(runtime)
        assert (prune.advance(bank) or {})["run_id"] == ids[0]
        planned = prune.advance(bank) or {}
        assert (planned["run_id"], planned["dry_run"], planned["phase"]) == (ids[1], True, "done")
        assert prune.advance(bank) is None
        for run_id in ids:
            assert client.get(f"/v1/consolidation/runs/{run_id}").json()["phase"] == "done"
    assert statuses(runtime.database)["used"] == "active"


@pytest.mark.exhaustive
@pytest.mark.usefixtures("bank")
def test_requests_that_wait_for_a_run_hold_no_thread(runtime: Runtime) -> None:
    """More requests can wait for a run than the gateway has threads, because a waiting request occupies no thread."""
    with _gateway(runtime, without_workers=True) as client, ThreadPoolExecutor(_WAITING) as callers:
        waits = [callers.submit(client.post, "/v1/consolidation/dry-run?wait=3") for _ in range(_WAITING)]
        gateway = client.app.state.gateway  # type: ignore[attr-defined]  # the type of `app` has no `state`
        until(lambda: gateway._waiting_requests == _WAITING, "all requests wait")
        assert client.get("/v1/consolidation/runs").status_code == 200
        assert gateway._waiting_requests == _WAITING
        assert len({each.result().json()["run_id"] for each in waits}) == 1


def test_a_dry_run_cannot_be_applied(runtime: Runtime) -> None:
    """A check constraint keeps dry runs out of the phases that remove cases."""
    state.request(runtime.database, runtime.clock, dry_run=True)
    with (
        runtime.database.engine.connect() as connection,
        pytest.raises(IntegrityError, match="case_runs_dry_run_check"),
    ):
        connection.exec_driver_sql("UPDATE case_runs SET phase = 'notifying'")


def test_invalid_runs_are_refused(client: TestClient, rows: Callable[[], dict[str, int]]) -> None:
    """Invalid requests start no run, and are only recorded. The route of real runs refuses the member `dry_run`."""
    before = rows()
    refused(client.post("/v1/consolidation/run", json={"dry_run": True}), 400, "INVALID_REQUEST")
    refused(client.post("/v1/consolidation/run", content=b"["), 400, "INVALID_REQUEST")
    for name in (uuid4(), "none"):
        refused(client.get(f"/v1/consolidation/runs/{name}"), 404, "NOT_FOUND")
        for decided in ("approve", "reject"):
            refused(client.post(f"/v1/consolidation/runs/{name}/{decided}"), 404, "NOT_FOUND")
    assert rows() == before


def test_runs_need_an_admin_key(runtime: Runtime) -> None:
    """Routes about runs and shared cases refuse a missing key with 401 and a service key with 403.

    With a service key, a search needs a `user_id` and cannot include archived cases.
    """
    keys = {"api_keys": (SecretStr(SERVICE_KEY),), "admin_keys": (SecretStr(ADMIN_KEY),)}
    guarded = replace(runtime, settings=runtime.settings.model_copy(update=keys))
    run = f"/v1/consolidation/runs/{uuid4()}"
    with TestClient(create_app(guarded, lambda: True), base_url=BASE_URL) as client:
        routes = [("POST", f"/v1/consolidation/{each}") for each in ("run", "dry-run", "restore/a")]
        routes += [
            ("GET", "/v1/consolidation/runs"),
            ("GET", run),
            ("POST", f"{run}/approve"),
            ("POST", f"{run}/reject"),
            ("POST", "/v1/casebank/cases/a/share"),
            ("DELETE", "/v1/casebank/cases/a/share"),
        ]
        for method, path in routes:
            refused(client.request(method, path), 401, "UNAUTHORIZED")
            refused(client.request(method, path, headers={"Authorization": f"Bearer {SERVICE_KEY}"}), 403, "FORBIDDEN")
        refused(client.get("/v1/casebank/search?q=x"), 401, "UNAUTHORIZED")
        service, admin = ({"Authorization": f"Bearer {key}"} for key in (SERVICE_KEY, ADMIN_KEY))
        refused(client.get("/v1/casebank/search?q=x", headers=service), 403, "FORBIDDEN")
        assert client.get("/v1/casebank/search?q=x&user_id=ana", headers=service).is_success
        assert client.get("/v1/casebank/search?q=x", headers=admin).is_success
        archived = "/v1/casebank/search?q=x&user_id=ana&include_archived=true"
        refused(client.get(archived, headers=service), 403, "FORBIDDEN")
        assert client.post("/v1/consolidation/dry-run?wait=0", headers=admin).is_success


def test_cases_are_searched(client: TestClient, runtime: Runtime) -> None:
    """A search returns the `k` nearest cases, and includes archived cases on request. A blank question is refused."""
    for name, query, status in (("a", "reset the router", "active"), ("b", "reset the router now", "archived")):
        vector = runtime.embedder.embed([query])[0]
        new = NewCase(name, query, "so", query_vector=vector, embedder=runtime.embedder.name, status=status)
        cases.add(runtime.database, new, now=runtime.clock.now())
    answer = client.get("/v1/casebank/search", params={"q": "reset the router"})
    NearCases.model_validate(answer.json())
    [found] = answer.json()["results"]
    assert (found["case_id"], round(found["similarity"], 3)) == ("a", 1.0)
    both = client.get("/v1/casebank/search", params={"q": "reset the router now", "include_archived": True, "k": 5})
    assert [each["case_id"] for each in both.json()["results"]] == ["b", "a"]
    for wrong in ("", "?q=", "?q=%20", "?q=x&k=0", "?q=x&k=101", "?q=x&k=many"):
        refused(client.get(f"/v1/casebank/search{wrong}"), 400, "INVALID_REQUEST")


def _add(runtime: Runtime, case_id: str, **more: Any) -> None:
    query = "reset the router"
    vector = runtime.embedder.embed([query])[0]
    new = NewCase(case_id, query, "so", query_vector=vector, embedder=runtime.embedder.name, **more)
    assert cases.add(runtime.database, new, now=runtime.clock.now())


def _found(client: TestClient, **parameters: str) -> set[str]:
    answer = client.get("/v1/casebank/search", params={"q": "reset the router", **parameters})
    NearCases.model_validate(answer.json())
    return {each["case_id"] for each in answer.json()["results"]}


def test_a_search_for_a_user_finds_the_cases_that_their_prompts_may_quote(client: TestClient, runtime: Runtime) -> None:
    """With `user_id`, a search finds the user's cases and cases without an author.

    Banks that no agent uses are not searched. Without `user_id`, a search finds all cases.
    """
    _add(runtime, "anas", user_id="ana")
    _add(runtime, "bobs", user_id="bob")
    _add(runtime, "imported")
    _add(runtime, "of a bank that no agent has", user_id="ana", bank="support")
    assert _found(client, user_id="ana") == {"anas", "imported"}
    assert _found(client, user_id="zoe") == {"imported"}
    assert _found(client, user_id="ana", bank="common") == {"anas", "imported"}
    assert _found(client, user_id="ana", bank="support") == set()
    assert len(_found(client)) == 4
    assert _found(client, bank="support") == {"of a bank that no agent has"}
    assert _found(client, bank="support", include_archived="true") == {"of a bank that no agent has"}
    for wrong in ("user_id=", "bank=", "bank=a%20b"):
        refused(client.get(f"/v1/casebank/search?q=x&{wrong}"), 400, "INVALID_REQUEST")


def test_a_user_token_sees_no_other_authors_name(runtime: Runtime) -> None:
    """A search with a user token finds shared cases of other users, without the ids of these users."""
    keys = {"api_keys": (SecretStr(SERVICE_KEY),), "secret_key": SecretStr("a secret of this test, long enough")}
    guarded = replace(runtime, settings=runtime.settings.model_copy(update=keys))
    _add(runtime, "anas", user_id="ana")
    _add(runtime, "bobs", user_id="bob")
    sharing.share(runtime.database, "anas", "an administrator")
    with TestClient(create_app(guarded, lambda: True), base_url=BASE_URL) as client:
        service = {"Authorization": f"Bearer {SERVICE_KEY}"}
        token = client.post("/v1/tokens", json={"user_id": "bob", "ttl_s": 60}, headers=service).json()["token"]
        for key, authors in ((token, {"anas": None, "bobs": "bob"}), (SERVICE_KEY, {"anas": "ana", "bobs": "bob"})):
            headers = {"Authorization": f"Bearer {key}"}
            found = client.get("/v1/casebank/search?q=reset the router&user_id=bob", headers=headers).json()["results"]
            assert {each["case_id"]: each["user_id"] for each in found} == authors


def test_an_administrator_shares_a_case(client: TestClient, runtime: Runtime) -> None:
    """All users find a shared case until it is unshared. The case's history records each change and who made it."""
    _add(runtime, "a/case", user_id="ana")
    _add(runtime, "imported")
    path = "/v1/casebank/cases/a%2Fcase/share"
    shared = client.post(path)
    assert (shared.status_code, shared.json()["case_id"]) == (200, "a/case")
    assert _found(client, user_id="bob") == {"a/case", "imported"}
    assert client.post("/v1/casebank/cases/a/case/share").json() == shared.json(), "sharing again changes nothing"
    back = client.delete(path)
    assert back.json() == {"case_id": "a/case", "shared_at": None}
    assert client.delete(path).json() == back.json()
    assert _found(client, user_id="bob") == {"imported"}
    events = cases.read(runtime.database, "a/case")["history"]
    assert [(each["event"], each["details"]) for each in events[1:]] == [
        ("shared", {"by": "an admin key"}),
        ("unshared", {"by": "an admin key"}),
    ]
    for nothing in ("nobody", "%00"):
        refused(client.post(f"/v1/casebank/cases/{nothing}/share"), 404, "NOT_FOUND")
        refused(client.delete(f"/v1/casebank/cases/{nothing}/share"), 404, "NOT_FOUND")
    refused(client.post("/v1/casebank/cases/imported/share"), 409, "CONFLICT")


def test_feedback_is_accepted(
    client: TestClient, say: Callable[..., dict[str, Any]], run: Callable[[str], None], runtime: Runtime
) -> None:
    """After the reply, feedback gets 202. Before the reply, feedback gets 409."""
    sent = say("what is 12*7+5?")
    path = f"/v1/turns/{sent['turn_id']}/feedback"
    refused(client.post(path, json={"score": 1}), 409, "CONFLICT")
    run(sent["session_id"])
    answer = client.post(path, json={"score": 1, "comment": "right"})
    assert answer.status_code == 202
    Turn.model_validate(answer.json())
    assert [each["query"] for each in cases.list_cases(runtime.database)] == ["what is 12*7+5?"]
    for wrong in ({}, {"score": 2}, {"score": 1, "comment": 5}, {"score": 1, "comment": "x" * 2_001}):
        refused(client.post(path, json=wrong), 400, "INVALID_REQUEST")
    refused(client.post(f"/v1/turns/{uuid4()}/feedback", json={"score": 1}), 404, "NOT_FOUND")
