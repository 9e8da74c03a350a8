"""`/v1/conversations`: lists and changes a user's conversations. Callers choose the key of each conversation."""

from __future__ import annotations

from functools import partial
from typing import Annotated

from fastapi import APIRouter, Body, Request

from perdure.access.tenants import UserKey
from perdure.channels.http import parameters
from perdure.channels.http.auditing import audited, describe
from perdure.channels.http.body import StrictRoute
from perdure.channels.http.dependencies import TheGateway, TheUsers
from perdure.channels.http.schemas.answer import WITH_BODY, WITH_KEY, problems
from perdure.channels.http.schemas.conversations import ChangeConversation, Conversation
from perdure.runtime import Runtime
from perdure.sessions.conversations import change_conversation, list_conversations

router = APIRouter(
    prefix="/conversations", tags=["sessions"], route_class=StrictRoute, responses=problems(*WITH_KEY, 400, 404)
)

_DEFAULT_LIMIT = 100


@router.get("", response_description="The conversations, the one with the newest activity first.")
async def list_(
    gateway: TheGateway,
    users: TheUsers,
    *,
    user_id: parameters.Owner = None,
    archived: parameters.Archived = None,
    limit: parameters.ConversationLimit = _DEFAULT_LIMIT,
) -> list[Conversation]:
    """List a user's conversations. With a user token, `user_id` is the token's user by default."""
    user = users.queried(user_id)
    return await gateway.in_thread(partial(_list, gateway.runtime, user, limit, archived=archived))


@router.patch(
    "/{conversation}",
    response_description="The conversation as it is now.",
    responses=problems(*WITH_BODY),
    dependencies=[audited("conversations.change", "conversation")],
)
async def change(
    conversation: parameters.ConversationPath,
    changes: Annotated[ChangeConversation, Body()],
    *,
    request: Request,
    gateway: TheGateway,
    users: TheUsers,
    user_id: parameters.Owner = None,
) -> Conversation:
    """Set a conversation's title, archive it, restore it, or leave it out of memory.

    Archiving a conversation ends its live session. The next message to an archived conversation
    restores the conversation. With `remember: false`, nothing of the conversation becomes a memory from now on, and no
    search in other conversations finds its messages.
    """
    user = users.queried(user_id)
    describe(request, user=user)
    return await gateway.in_thread(partial(_change, gateway.runtime, user, conversation, changes))


def _list(runtime: Runtime, user: UserKey, limit: int, *, archived: bool | None) -> list[Conversation]:
    rows = list_conversations(runtime.database, user, limit, archived=archived)
    return [Conversation.model_validate(row) for row in rows]


def _change(runtime: Runtime, user: UserKey, conversation: str, changes: ChangeConversation) -> Conversation:
    changed = change_conversation(
        runtime.database,
        runtime.wake,
        user,
        conversation,
        title=changes.title,
        archived=changes.archived,
        remember=changes.remember,
    )
    return Conversation.model_validate(changed)
