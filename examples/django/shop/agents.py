"""The shop's agent. Its tools use Django's models; perdure closes their connections after each call."""

from django.contrib.admin.models import CHANGE, LogEntry
from django.contrib.auth import get_user_model

from perdure import Agent, ToolContext, tool


@tool(effect="pure")
def orders(context: ToolContext) -> list[str]:
    """List what the customer has ordered."""
    return list(LogEntry.objects.filter(user_id=context.user_id).values_list("object_repr", flat=True))


@tool(effect="pure")
async def count_orders(context: ToolContext) -> int:
    """Count what the customer has ordered."""
    return await LogEntry.objects.filter(user_id=context.user_id).acount()


@tool(effect="idempotent", requires_approval=True, approver="staff")
def refund(item: str, context: ToolContext) -> str:
    """Refund an order of the customer; a member of the staff approves it."""
    entry = {"user_id": context.user_id, "action_flag": CHANGE, "object_repr": item}
    _, is_new = LogEntry.objects.get_or_create(object_id=str(context.effect_id), defaults=entry)
    return f"{item} is refunded" if is_new else f"{item} was refunded before"


def may_approve(user_id: str, approval: dict) -> bool:
    """Whether a user of Django may decide about a waiting call: staff, but not about the person's own."""
    users = get_user_model().objects.filter(pk=user_id, is_staff=True)
    return approval["user_id"] != user_id and users.exists()


assistant = Agent("assistant", instructions="You help the customers of a shop.", tools=[orders, count_orders, refund])
