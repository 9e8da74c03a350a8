"""docs/http.md is generated from /openapi.json, and the gateway answers the page's examples as documented."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from uuid import UUID

import pytest
from httpx2 import Response
from starlette.testclient import TestClient

from perdure import Agent, external_tool, tool
from perdure.access.tenants import UserKey
from perdure.agents import Agents
from perdure.casebank import cases
from perdure.casebank.cases import NewCase
from perdure.casebank.runs import prune, state
from perdure.channels.http.app import create_app
from perdure.channels.http.schemas.answer import RUN_ID, SESSION_ID, TURN_ID, Answer
from perdure.channels.http.schemas.operating import DELIVERY_ID
from perdure.channels.notices import bank_of
from perdure.errors import ProviderError
from perdure.resilience.registry import Breakers
from perdure.runtime import Runtime
from perdure.settings import BreakerSettings, CasebankSettings, PruneApproval
from perdure.turns.run.loop import Runner
from tests.casebank.bank import put
from tests.channels.conftest import BASE_URL
from tests.channels.test_casebank_routes import Working
from tests.files.contents import png
from tests.memory.remembering import add_memory
from tests.repository.http_reference import OPENAI, PAGE, PATH, Example, document, examples, page
from tests.turns.scripted import Scripted, calls, says

DOCUMENT = document()
EXAMPLES = list(examples(DOCUMENT))


def test_the_page_is_up_to_date() -> None:
    """The page equals the output of `make docs` for the current routes."""
    assert PAGE.read_text(encoding="utf-8") == page(DOCUMENT)


def test_each_route_is_on_the_page() -> None:
    """Each route has an example on the page, or is in the page's table of OpenAI-compatible routes."""
    tags = {
        f"{method.upper()} {path}": operation["tags"]
        for path, methods in DOCUMENT["paths"].items()
        for method, operation in methods.items()
    }
    written = PAGE.read_text(encoding="utf-8")

    assert tags.keys() - {each.route for each in EXAMPLES} == {route for route, tag in tags.items() if tag == [OPENAI]}
    assert [route for route in tags if f"### {route}\n" not in written and f"| `{route}` |" not in written] == []


def _answers(kind: type[Answer] = Answer) -> Iterator[type[Answer]]:
    for each in kind.__subclasses__():
        yield each
        yield from _answers(each)


def test_the_examples_of_responses_are_valid() -> None:
    """Each example of a response is valid for its model, and the model's JSON equals the example."""
    schemas = DOCUMENT["components"]["schemas"]
    checked = 0
    for kind in _answers():
        for example in schemas.get(kind.__name__, {}).get("examples", ()):
            assert kind.model_validate(example).model_dump(mode="json", exclude_unset=True) == example, kind
            checked += 1
    assert checked > 15


@tool(requires_approval=True, effect="idempotent")
def pay(amount: int) -> str:
    """Pay an amount."""
    return f"paid {amount}"


@pytest.fixture
def agents() -> Agents:
    """An agent with a tool that needs an approval, and one that a client runs."""
    return Agents([Agent("assistant", "You pay.", [pay, external_tool("scan", "Scan a barcode.")])])


class ExampleGateway:
    """A gateway whose database has rows for the examples. `ids` maps each printed id to the id of a real row."""

    def __init__(self, runtime: Runtime, example: Example) -> None:
        decided = example.path.endswith(("/approve", "/reject"))
        limits = CasebankSettings(load_percent=100, approval=PruneApproval.MANUAL if decided else PruneApproval.AUTO)
        wanted = {"approval": calls(("pay", {"amount": 5})), "results": calls(("scan", {}))}
        model = Scripted(wanted.get(example.path.rpartition("/")[2], says("12 * 7 is 84.")))
        waker = Working()
        settings = runtime.settings.model_copy(update={"casebank": limits})
        self.runtime = replace(runtime, settings=settings, wake=waker, models=lambda _name: model)
        waker.runtime = self.runtime
        self._threads = waker.threads
        self.route = example.route
        self.client = TestClient(create_app(self.runtime, lambda: True), base_url=BASE_URL)
        self.ids: dict[str, str] = {}

    def fill(self) -> None:
        """Create a schedule, and a turn that is settled.

        For an example of the approval route, the turn waits for an approval instead, and for one of the results, for a
        client. The examples about deliveries, pauses and turns that are tried again find one.
        """
        named = {"conversation": PATH["conversation"], "metadata": {"page": "/calendar"}}
        message = {"user_id": "ann", "text": "pay", **named}
        if self.route.startswith("POST /v1/deliveries"):
            message |= {"reply_to": {"url": "https://shop.example/replies"}}
        sent = self.client.post("/v1/messages", json=message).json()
        if self.route.endswith("/retry"):
            self.client.post(f"/v1/turns/{sent['turn_id']}/cancel")
        runner = Runner(self.runtime, owner="test")
        runner.run(UUID(sent["session_id"]))
        runner.close()
        if self.route == "DELETE /v1/pauses":
            self.client.post("/v1/pauses", json={"user_id": "ann"})
        for each in self.client.get("/v1/deliveries").json():
            self.ids[DELIVERY_ID] = each["delivery_id"]
        turn = self.client.get(f"/v1/turns/{sent['turn_id']}").json()
        reminder = {"user_id": "ann", "text": "tea", "cron": "0 17 * * *"}
        scheduled = self.client.post("/v1/schedules", json=reminder).json()
        memory_id = add_memory(self.runtime, UserKey("ann"), "The user lives in Lyon.")
        self.ids[PATH["memory_id"]] = memory_id
        uploaded = self.client.post("/v1/files?user_id=ann", content=png()).json()
        self.ids |= {TURN_ID: sent["turn_id"], SESSION_ID: sent["session_id"]}
        self.ids |= {PATH["schedule_id"]: scheduled["schedule_id"], PATH["file_id"]: uploaded["file_id"]}
        self.ids.update(("call_0", each["call_id"]) for each in turn["pending_approvals"] + turn["pending_calls"])

    def add_case(self, status: str) -> None:
        """Add the case that the examples name, with `ann` as its author."""
        query = "reset the router"
        embedder = self.runtime.embedder
        [vector] = embedder.embed([query])
        case = NewCase(PATH["case_id"], query, "so", query_vector=vector, embedder=embedder.name, status=status)
        case = replace(case, user_id=UserKey("ann"))
        assert cases.add(self.runtime.database, case, now=self.runtime.clock.now())

    def add_run(self) -> None:
        """Request a pruning run, and advance the run until it ends or waits for an approval."""
        put(self.runtime.database, "low", usage=20, rate=10)
        run_id = state.request(self.runtime.database, self.runtime.clock, dry_run=False)
        prune.advance(bank_of(self.runtime))
        self.ids[RUN_ID] = str(run_id)

    def ask(self, example: Example) -> Response:
        """Send the example's request, with real ids in place of the printed ids."""
        path, body = example.path, json.dumps(example.body)
        for printed, real in self.ids.items():
            path, body = path.replace(printed, real), body.replace(printed, real)
        if example.route == "POST /v1/files":
            return self.client.post(path, content=png())
        return self.client.request(example.method, path, json=json.loads(body))

    def close(self) -> None:
        """Wait for the threads that advance the pruning runs."""
        for thread in self._threads:
            thread.join()


@pytest.mark.long
@pytest.mark.parametrize("example", EXAMPLES, ids=[f"{each.route} {number}" for number, each in enumerate(EXAMPLES)])
def test_the_gateway_answers_as_documented(runtime: Runtime, redis_url: str, example: Example) -> None:
    """Each example is sent as printed, except for its ids. The response has the printed status and members."""
    breakers = Breakers(BreakerSettings(failure_threshold=1), runtime.clock, redis_url)
    with pytest.raises(ProviderError):
        breakers.get(PATH["name"]).execute(_fail, 5)
    served = ExampleGateway(replace(runtime, breakers=breakers), example)
    with served.client:
        served.fill()
        if "{case_id}" in example.route:
            served.add_case("archived" if "restore" in example.route else "active")
        if "{run_id}" in example.route:
            served.add_run()
        answer = served.ask(example)
    assert answer.status_code == example.status, answer.text
    if isinstance(example.answer, dict):
        assert answer.json().keys() == example.answer.keys()
    served.close()
    breakers.close()


def _fail() -> None:
    raise ProviderError("down", transient=True)
