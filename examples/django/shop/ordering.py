"""Placing and changing orders. The views and the agent's tools use the same functions."""

from uuid import UUID

from django.db import transaction
from django.db.models import F

from perdure import ToolError
from shop.models import Article, Order


@transaction.atomic
def place(customer_id: str, name: str, pieces: int, request: UUID) -> Order:
    """Place an order, and take its pieces from the stock. The same `request` again returns the same order.

    Raises:
        ToolError: there is no such article, or not enough of it; the model reads the message.
    """
    article = Article.objects.select_for_update().filter(name__iexact=name).first()
    if article is None:
        raise ToolError(f"The shop sells no {name!r}. Search the articles first.")
    placed = Order.objects.filter(request=request).first()
    if placed is not None:
        return placed
    if not 1 <= pieces <= article.stock:
        raise ToolError(f"{pieces} pieces cannot be ordered: {article.stock} are in stock.")
    Article.objects.filter(pk=article.pk).update(stock=F("stock") - pieces)
    return Order.objects.create(customer_id=customer_id, article=article, pieces=pieces, request=request)


@transaction.atomic
def close(customer_id: str, number: int, ended: Order.Status, *, begun: Order.Status) -> Order:
    """Cancel or refund an order, and put its pieces back. An order that is closed in this way stays as it is.

    Raises:
        ToolError: the customer has no such order, or its status is not `begun`.
    """
    order = Order.objects.select_for_update().filter(pk=number, customer_id=customer_id).first()
    if order is None:
        raise ToolError(f"The customer has no order {number}.")
    if order.status == ended:
        return order
    if order.status != begun:
        raise ToolError(f"That is impossible: {order}.")
    Article.objects.filter(pk=order.article_id).update(stock=F("stock") + order.pieces)
    order.status = ended
    order.save(update_fields=["status"])
    return order
