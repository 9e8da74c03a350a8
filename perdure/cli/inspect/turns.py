"""`perdure turns` and `perdure approvals`: turns, their results, and decisions about calls that wait for approval."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal
from uuid import UUID

import typer

from perdure.cli import connecting
from perdure.cli.audited import audited
from perdure.cli.display import (
    MOST_LISTED,
    AsJson,
    prints_on_stderr,
    write_fields,
    write_json,
    write_table,
    write_text,
)
from perdure.cli.errors import WRONG_USAGE, Failure

if TYPE_CHECKING:
    from perdure.database.engine import Database
    from perdure.settings import Settings

commands = typer.Typer(help="Turns and their results.", no_args_is_help=True)
approvals = typer.Typer(help="Tool calls that wait for a person.", no_args_is_help=True)

CallId = Annotated[str, typer.Argument(metavar="CALL", help="The call's id, as `perdure turns show` prints it.")]
TurnId = Annotated[str, typer.Argument(metavar="ID", help="The turn's id, as `perdure send` prints it.")]
Status = Literal["accepted", "running", "waiting_approval", "parked", "done", "failed", "cancelled"]
"""Has the values of `perdure.database.tables.TURN_STATUSES`. A test checks this."""

_COLUMNS = ("turn_id", "session_id", "user_id", "status", "attempts", "error", "accepted_at", "settled_at", "tenant")
_WAITING_COLUMNS = (
    "turn_id",
    "call_id",
    "tool",
    "arguments",
    "approver",
    "user_id",
    "agent",
    "waiting_since",
    "expires_at",
)


@commands.command("list")
def list_(
    user: Annotated[str | None, typer.Option(help="Only turns of this user.")] = None,
    tenant: connecting.OnlyTenant = None,
    session: Annotated[str | None, typer.Option(metavar="ID", help="Only turns of this session.")] = None,
    status: Annotated[Status | None, typer.Option(help="Only turns with this status.")] = None,
    limit: Annotated[int, typer.Option(min=1, max=MOST_LISTED, help="The most turns to list.")] = 100,
    *,
    as_json: AsJson = False,
) -> None:
    """List turns, newest first."""
    from perdure.turns.reading import list_turns

    session_id = None if session is None else connecting.parse_id(session, "session")
    key, named = connecting.parse_user(user, tenant)
    with connecting.database() as database:
        found = list_turns(database, user=key, tenant=named, session_id=session_id, status=status, limit=limit)
    if as_json:
        write_json(found)
        return
    rows = [{**turn, "error": turn["error"] and turn["error"]["code"]} for turn in found]
    write_table(_COLUMNS, rows)


@commands.command()
def show(turn_id: TurnId, *, as_json: AsJson = False) -> None:
    """Show a turn."""
    from perdure.turns.reading import read_attempt_error, read_turn

    wanted = connecting.parse_id(turn_id, "turn")
    with connecting.opened() as (settings, database):
        turn = read_turn(database, wanted)
        turn["attempt_error"] = read_attempt_error(database, wanted)
        turn["cost_usd"] = _cost(settings, database, wanted) if turn["usage"] else None
    if as_json:
        write_json(turn)
        return
    flat = {
        **turn,
        "reply": turn["reply"] and turn["reply"]["text"],
        "stop_reason": turn["reply"] and turn["reply"].get("stop_reason"),
        "error": turn["error"] and f"{turn['error']['code']}: {turn['error']['message']}",
        "delayed": turn["delayed"] and f"{turn['delayed']['code']}: {turn['delayed']['message']}",
        "waiting_for": turn["waiting_for"] and _awaited(turn["waiting_for"]),
        "usage": [f"{count} {name}" for name, count in (turn["usage"] or {}).items() if count is not None],
        "pending_approvals": [
            f"{_pending_call(each)}, approver: {each['approver']}" for each in turn["pending_approvals"]
        ],
        "pending_calls": [_pending_call(each) for each in turn["pending_calls"]],
        "decisions": [
            f"{each['call_id']}: {each['tool']}: {each['decision']} by {each['decided_by']} at {each['decided_at']}"
            for each in turn["decisions"]
        ],
        "children": [
            f"{each['call_id']}: {each['tool']}: turn {each['turn_id']} of {each['agent']}: {each['status']}"
            for each in turn.get("children", [])
        ],
    }
    write_fields({name: value for name, value in flat.items() if value not in (None, [])})


def _cost(settings: Settings, database: Database, turn_id: UUID) -> str | None:
    from perdure.errors import SettingsError
    from perdure.turns.costs import cost_of

    try:
        found = cost_of(database, turn_id, settings, connecting.load_agents(settings))
    except SettingsError as error:
        sys.stderr.write(f"perdure: the cost is unknown, because the agents cannot be loaded: {error}\n")
        return None
    return None if found is None else f"{found.normalize():f}"


def _awaited(waiting: dict[str, Any]) -> str:
    if waiting["kind"] == "user":
        return f"the user's answer to {waiting['name']}, until {waiting['until']}: {waiting['question']}"
    progress = "" if waiting["progress"] is None else f"; its progress: {waiting['progress']}"
    return f"the {waiting['kind']} {waiting['name']}, until {waiting['until']}{progress}"


@commands.command()
def prompt(
    turn_id: TurnId,
    step: Annotated[int | None, typer.Option(min=1, help="Only the model call with this number.")] = None,
    *,
    as_json: AsJson = False,
) -> None:
    """Show what the model calls of a turn were given.

    Texts come from the rows that a prompt was made of. A note marks what was erased, forgotten or changed since.
    """
    from perdure.turns.prompts import read_prompts

    wanted = connecting.parse_id(turn_id, "turn")
    with connecting.opened() as (settings, database):
        found = read_prompts(database, settings, connecting.load_agents(settings), wanted, step=step)
    if as_json:
        write_json(found)
        return
    for each in found["steps"]:
        write_fields({name: value for name, value in each.items() if name != "parts"})
        for part in each["parts"]:
            about = {**part, "ids": " ".join(part.get("ids", ())), "scores": " ".join(map(str, part.get("scores", ())))}
            shown = [about[name] for name in ("role", "ids", "scores", "note") if about.get(name)]
            write_text(f"\n{part['kind']}, {part['tokens']} tokens{''.join(f'; {one}' for one in shown)}")
            calls = [f"{call['name']}({call['arguments']})" for call in part.get("tool_calls", ())]
            write_text("\n".join(filter(None, [part["text"], *calls])) or "-")
        write_text("")


@commands.command()
def export(turn_id: TurnId) -> None:
    """Print a settled turn as a bundle for tests, in JSON.

    `perdure.testing.recorded` replays it. The bundle has the user's messages, the memories that recall finds now, and
    the results of tools.
    """
    from perdure.turns.recording import record

    wanted = connecting.parse_id(turn_id, "turn")
    with connecting.runtime() as runtime:
        write_json(record(runtime, wanted))


@commands.command()
def replay(
    bundle: Annotated[Path, typer.Argument(help="The file that `perdure turns export` has printed.", dir_okay=False)],
    model: Annotated[
        str | None, typer.Option(help="Ask this model, as in PERDURE_MODEL, instead of giving the recorded replies.")
    ] = None,
    agent: Annotated[
        str | None, typer.Option(metavar="NAME", help="Let this agent answer instead of the recorded one.")
    ] = None,
    *,
    as_json: AsJson = False,
) -> None:
    """Run an exported turn again, and show where it departs.

    Of an exported session, each turn runs after the recorded turns before it. No server is needed, and no tool runs:
    the recorded results answer the calls. The agents are those of PERDURE_AGENTS. The exit status is 1 if a turn
    departs.
    """
    from perdure.errors import SettingsError
    from perdure.settings import Settings
    from perdure.testing.recorded import recorded
    from perdure.testing.scripted import ScriptExhausted

    settings = Settings.load()
    agents = connecting.load_agents(settings)
    try:
        found = recorded(bundle)
    except (OSError, SettingsError) as error:
        raise Failure(f"{bundle}: {error}", WRONG_USAGE) from error
    departs, shown, said = False, list[dict[str, Any]](), list[str]()
    for turn in found.turns:
        name = agent or turn.bundle["agent"]
        own = agents.find(name)
        if own is None:
            raise Failure(
                f"PERDURE_AGENTS is {settings.agents}, which has no agent {name!r}: --agent names one", WRONG_USAGE
            )
        try:
            with prints_on_stderr():
                made = turn.replay(own, model=model, settings=settings, agents=list(agents))
        except ScriptExhausted as error:
            raise Failure(
                f"the turn departs: {error}".replace("pass replay(…, model=…)", "name one with --model")
            ) from error
        departs = departs or bool(made.difference)
        kept = {"departs": bool(made.difference), **asdict(made.difference), "not_recorded": list(made.not_recorded)}
        shown.append({**kept, "not_reproduced": list(turn.not_reproduced)})
        said += [f"turn {turn.bundle['turn_id']}:"] if len(found.turns) > 1 else []
        said += [str(made.difference), *(f"not recorded: {each}" for each in made.not_recorded)]
    if as_json:
        write_json(shown if len(found.turns) > 1 else shown[0])
    else:
        write_text("\n".join(said))
    if departs:
        raise typer.Exit(1)


@commands.command()
@audited("turns.cancel", "turn_id", ("tenant", "agent"))
def cancel(
    turn_id: Annotated[str | None, typer.Argument(metavar="[ID]", help="The turn's id.", show_default=False)] = None,
    user: Annotated[str | None, typer.Option(help="All unsettled turns of this user.")] = None,
    tenant: Annotated[str | None, typer.Option(help="All unsettled turns of this tenant.")] = None,
    agent: Annotated[str | None, typer.Option(help="All unsettled turns of this agent.")] = None,
    *,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only count the turns of --user and the like.")] = False,
    as_json: AsJson = False,
) -> None:
    """Cancel a turn, or all of a user, tenant or agent.

    A turn that a worker runs is cancelled at its next safe point. Any other unsettled turn is cancelled immediately.
    With several options, only turns to which all apply are cancelled. Messages that arrive meanwhile run: `perdure
    pause` keeps them waiting.
    """
    from perdure.turns.cancel import cancel as cancel_turn
    from perdure.turns.reading import read_turn

    whom = any((user, tenant, agent))
    if whom == (turn_id is not None) or (dry_run and not whom):
        raise Failure("Pass either a turn's id, or --user, --tenant or --agent.", WRONG_USAGE)
    if turn_id is None:
        _cancel_all(user, tenant, agent, dry_run=dry_run, as_json=as_json)
        return
    wanted = connecting.parse_id(turn_id, "turn")
    with connecting.runtime() as runtime:
        cancel_turn(runtime, wanted)
        status = read_turn(runtime.database, wanted)["status"]
    if as_json:
        write_json({"turn_id": str(wanted), "status": status})
    sys.stderr.write(f"Cancel requested. The turn is {status}.\n")


def _cancel_all(user: str | None, tenant: str | None, agent: str | None, *, dry_run: bool, as_json: bool) -> None:
    from perdure.turns import pauses
    from perdure.turns.cancel import cancel_all

    key, named = connecting.parse_user(user, tenant)
    with connecting.runtime() as runtime:
        if dry_run:
            turns = pauses.count(runtime.database, tenant=named, user=key, agent=agent)
        else:
            turns = cancel_all(runtime, tenant=named, user=key, agent=agent)
    if as_json:
        write_json({"cancelled": not dry_run, "turns": turns})
    else:
        write_text(f"{turns} unsettled turns {'would be' if dry_run else 'are'} cancelled")


@commands.command()
@audited("turns.retry", "turn_id")
def retry(turn_id: TurnId, *, as_json: AsJson = False) -> None:
    """Try a failed or cancelled turn again.

    Its messages are accepted as a new turn of the conversation. A repeated command returns the same new turn.
    """
    from perdure.turns.inbox.again import retry as try_again

    wanted = connecting.parse_id(turn_id, "turn")
    with connecting.runtime() as runtime:
        accepted = try_again(runtime, wanted)
    if as_json:
        write_json({
            "turn_id": str(accepted.turn_id),
            "session_id": str(accepted.session_id),
            "duplicate": accepted.duplicate,
        })  # fmt: skip
    else:
        write_text(f"turn {accepted.turn_id} is accepted")


@commands.command()
@audited("turns.decide", "turn_id", ("approve", "call_id"))
def approve(
    turn_id: TurnId,
    call_id: CallId,
    arguments: Annotated[
        str | None, typer.Option(help="A JSON object: the arguments to run the call with, instead of the model's.")
    ] = None,
    *,
    as_json: AsJson = False,
) -> None:
    """Approve a tool call that waits for approval.

    The turn continues and runs the call.
    """
    given = {} if arguments is None else {"arguments": _object(arguments)}
    _decide(turn_id, {"call_id": call_id, "decision": "approve", **given}, as_json=as_json)


@commands.command()
@audited("turns.decide", "turn_id", ("deny", "call_id"))
def deny(turn_id: TurnId, call_id: CallId, *, as_json: AsJson = False) -> None:
    """Deny a tool call that waits for approval.

    The model receives the denial as the call's result.
    """
    _decide(turn_id, {"call_id": call_id, "decision": "deny"}, as_json=as_json)


@commands.command()
@audited("turns.answer", "turn_id", ("call_id",))
def answer(
    turn_id: TurnId,
    call_id: CallId,
    result: Annotated[str | None, typer.Argument(help="The call's result: JSON, or text.")] = None,
    error: Annotated[
        str | None, typer.Option(help="The error with which the call failed, instead of a result.")
    ] = None,
    *,
    as_json: AsJson = False,
) -> None:
    """Bring the result of a tool call that runs outside perdure.

    The turn continues when each of these calls has its result. The first result of a call counts.
    """
    from perdure.turns.calls.outside import answer as bring
    from perdure.turns.calls.outside import parse_result
    from perdure.turns.reading import read_turn

    wanted = connecting.parse_id(turn_id, "turn")
    if (result is None) == (error is None):
        raise Failure("Pass either a result or --error.", WRONG_USAGE)
    given = parse_result({"call_id": call_id, **({"error": error} if result is None else {"result": _value(result)})})
    with connecting.runtime() as runtime:
        bring(runtime, wanted, given)
        left = len(read_turn(runtime.database, wanted)["pending_calls"])
    if as_json:
        write_json({"turn_id": str(wanted), "call_id": call_id, "left": left})
    waiting = f"{left} calls of the turn still wait for results." if left else "The turn continues."
    sys.stderr.write(f"Recorded. {waiting}\n")


@approvals.callback()
def _keep_list() -> None:
    """Make `list` a subcommand: with a single command, typer would omit its name."""


@approvals.command("list")
def list_approvals(
    user: Annotated[str | None, typer.Option(help="Only calls of this user.")] = None,
    tenant: connecting.OnlyTenant = None,
    limit: Annotated[int, typer.Option(min=1, max=MOST_LISTED, help="The most calls to list.")] = 100,
    *,
    as_json: AsJson = False,
) -> None:
    """List the tool calls that wait, longest wait first.

    `perdure turns approve TURN CALL` and `perdure turns deny TURN CALL` decide.
    """
    from perdure.access.tenants import tenant_of
    from perdure.text.untrusted import shown_json
    from perdure.turns.calls.waiting import list_waiting

    key, named = connecting.parse_user(user, tenant)
    with connecting.database() as database:
        found = list_waiting(database, user=key, tenant=named, all_tenants=named is None, limit=limit)
    if as_json:
        write_json([{**call.body, "tenant": tenant_of(call.user)} for call in found])
        return
    rows = [
        {
            **call.body,
            "arguments": shown_json(call.body["arguments"]),
            "tenant": tenant_of(call.user),
        }
        for call in found
    ]
    columns = (*_WAITING_COLUMNS, "tenant")
    write_table(columns, rows)


def _decide(turn_id: str, given: dict[str, Any], *, as_json: bool) -> None:
    from perdure.turns.calls.approvals import OPERATOR, decide, parse_decision
    from perdure.turns.reading import read_turn

    wanted = connecting.parse_id(turn_id, "turn")
    decision = parse_decision(given)
    with connecting.runtime() as runtime:
        decide(runtime, wanted, decision, OPERATOR)
        left = len(read_turn(runtime.database, wanted)["pending_approvals"])
    if as_json:
        write_json({"turn_id": str(wanted), "call_id": given["call_id"], "decision": given["decision"], "left": left})
    waiting = f"{left} calls of the turn still wait for approval." if left else "The turn continues."
    sys.stderr.write(f"Decided. {waiting}\n")


def _pending_call(call: dict[str, Any]) -> str:
    from perdure.text.untrusted import shown_json

    return f"{call['call_id']}: {call['tool']}({shown_json(call['arguments'])}) until {call['expires_at']}"


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _object(text: str) -> dict[str, Any]:
    from perdure.text.untrusted import load_object

    try:
        return load_object(text)
    except ValueError as error:
        raise Failure(f"--arguments cannot be used: {error}.", WRONG_USAGE) from None
