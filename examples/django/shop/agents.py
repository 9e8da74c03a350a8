"""The shop's agent. Its tools use Django's models; perdure closes their connections after each call."""

from django.contrib.auth import get_user_model

from perdure import Agent, ToolContext, ToolError, TurnContext, tool
from shop import ordering
from shop.models import Article, Order


@tool(effect="pure")
def search_articles(words: str) -> list[str]:
    """Find articles by words of their names; all articles, if there are no words."""
    found = Article.objects.order_by("name")
    for word in words.split():
        found = found.filter(name__icontains=word)
    return [str(each) for each in found[:20]]


@tool(effect="pure")
def orders(context: ToolContext) -> list[str]:
    """List what the customer has ordered, the newest first."""
    mine = Order.objects.filter(customer_id=context.user_id).select_related("article")
    return [str(each) for each in mine.order_by("-pk")[:20]]


@tool(effect="idempotent")
def place_order(article: str, pieces: int, context: ToolContext) -> str:
    """Order an article by its exact name."""
    return str(ordering.place(context.user_id, article, pieces, context.effect_id))


@tool(effect="idempotent")
async def add_note(order: int, note: str, context: ToolContext) -> str:
    """Add a note for the packers to an order that is not shipped."""
    mine = Order.objects.filter(pk=order, customer_id=context.user_id, status=Order.Status.PLACED)
    if not await mine.aupdate(note=note[:200]):
        raise ToolError(f"The customer has no order {order} that can still be changed.")
    return "The packers will read it."


@tool(effect="idempotent", requires_approval=True)
def cancel_order(order: int, context: ToolContext) -> str:
    """Cancel an order that is not shipped; the customer confirms it."""
    return str(ordering.close(context.user_id, order, Order.Status.CANCELLED, begun=Order.Status.PLACED))


@tool(effect="idempotent", requires_approval=True, approver="staff")
def refund(order: int, context: ToolContext) -> str:
    """Refund an order that was shipped; a member of the staff approves it."""
    return str(ordering.close(context.user_id, order, Order.Status.REFUNDED, begun=Order.Status.SHIPPED))


def may_approve(user_id: str, approval: dict) -> bool:
    """Whether a user of Django may decide about a waiting call: staff, but not about the person's own."""
    users = get_user_model().objects.filter(pk=user_id, is_staff=True)
    return approval["user_id"] != user_id and users.exists()


def instructions(turn: TurnContext) -> str:
    """Tell the agent the customer's name, as Django has it."""
    name = get_user_model().objects.values_list("username", flat=True).get(pk=turn.user_id)
    return f"You take the orders of {name}, a customer of a shop for office supplies. Be brief."


assistant = Agent(
    "assistant",
    instructions,
    tools=[search_articles, orders, place_order, add_note, cancel_order, refund],
    max_steps=12,
)
