"""`/v1/schedules`: users' schedules."""

from __future__ import annotations

from functools import partial
from http import HTTPStatus
from typing import Annotated
from uuid import UUID

from fastapi import APIRouter, Body, Depends, Request, Response

from perdure.access.tenants import UserKey
from perdure.channels.http import parameters
from perdure.channels.http.auditing import audited, describe
from perdure.channels.http.body import StrictRoute
from perdure.channels.http.dependencies import TheCaller, TheGateway, TheUsers
from perdure.channels.http.gateway import Gateway
from perdure.channels.http.parameters import parse_id
from perdure.channels.http.schemas.answer import WITH_BODY, WITH_KEY, problems
from perdure.channels.http.schemas.schedules import ChangeSchedule, NewSchedule, NewScheduleBody, Schedule
from perdure.errors import NotFound
from perdure.ids import new_id
from perdure.runtime import Runtime
from perdure.timetable import reminders

router = APIRouter(prefix="/schedules", tags=["schedules"], route_class=StrictRoute, responses=problems(*WITH_KEY, 400))


async def _schedule(schedule_id: parameters.IdPath, gateway: TheGateway, caller: TheCaller) -> UUID:
    parsed = parse_id(schedule_id, "schedule")
    owner = await gateway.in_thread(partial(reminders.owner, gateway.runtime.database, parsed))
    if not caller.is_operator and not caller.may_see(owner):
        raise NotFound("There is no such schedule.")
    return parsed


TheSchedule = Annotated[UUID, Depends(_schedule)]
"""The id of the schedule in the path. A caller without access to the schedule gets 404."""


@router.post(
    "",
    status_code=HTTPStatus.CREATED,
    response_description="The schedule.",
    responses=problems(*WITH_BODY, 404, 409),
    dependencies=[audited("schedules.add")],
)
async def add(body: NewScheduleBody, request: Request, gateway: TheGateway, users: TheUsers) -> Schedule:
    """Schedule a text that is sent to the agent as a message from the user.

    The text is sent once, at the time `at`, or repeatedly, at the times of the expression `cron`. Times without an
    offset are local to `timezone`. If a clock change skips a local time, the text is sent at the first instant after
    the gap. If a local time occurs twice, the text is sent at the first occurrence. An expression of intervals, such as
    `*/15 * * * *`, follows the clocks instead: no interval is skipped.
    """
    user = users.key(body.user_id)
    describe(request, user=user)
    made = await gateway.in_thread(partial(_add, gateway.runtime, user, body))
    describe(request, note=str(made.schedule_id))
    return made


@router.get("", response_description="The schedules, the next due first.", responses=problems(404))
async def list_(gateway: TheGateway, users: TheUsers, user_id: parameters.Owner = None) -> list[Schedule]:
    """List a user's schedules. With a user token, `user_id` is the token's user by default.

    With an admin key without a tenant, `user_id` may be omitted: the list then covers all users, up to a limit.
    """
    user = None if user_id is None and users.all_users else users.queried(user_id)
    found = await gateway.in_thread(partial(reminders.list_reminders, gateway.runtime.database, user))
    return [Schedule.model_validate(each) for each in found]


@router.patch(
    "/{schedule_id}",
    response_description="The schedule as it is now.",
    responses=problems(*WITH_BODY, 404, 409),
    dependencies=[audited("schedules.pause", "schedule_id")],
)
async def change(
    schedule_id: TheSchedule, changes: Annotated[ChangeSchedule, Body()], request: Request, gateway: TheGateway
) -> Schedule:
    """Pause a schedule, or resume it. Times that pass during the pause are skipped."""
    describe(request, note="paused" if changes.paused else "resumed")
    runtime = gateway.runtime
    changed = await gateway.in_thread(
        partial(reminders.pause, runtime.database, runtime.clock, runtime.settings, schedule_id, paused=changes.paused)
    )
    return Schedule.model_validate(changed)


@router.delete(
    "/{schedule_id}",
    status_code=HTTPStatus.NO_CONTENT,
    response_class=Response,
    response_description="Removed.",
    responses=problems(404),
    dependencies=[audited("schedules.remove", "schedule_id")],
)
async def remove(schedule_id: TheSchedule, gateway: TheGateway) -> Response:
    """Remove a schedule."""
    await gateway.in_thread(partial(_remove, gateway, schedule_id))
    return Response(status_code=HTTPStatus.NO_CONTENT)


def _add(runtime: Runtime, user: UserKey, body: NewSchedule) -> Schedule:
    if body.agent is not None:
        runtime.agents.get(body.agent)
    moment = reminders.parse_moment(runtime.settings, runtime.clock.now(), body.at, body.cron, body.timezone)
    new = reminders.NewReminder(
        new_id(runtime.clock),
        user,
        body.text,
        moment,
        body.channel,
        conversation=body.conversation,
        agent=body.agent,
    )
    return Schedule.model_validate(reminders.add(runtime.database, runtime.settings, new))


def _remove(gateway: Gateway, schedule_id: UUID) -> None:
    database = gateway.runtime.database
    reminders.remove(database, schedule_id, reminders.owner(database, schedule_id))
