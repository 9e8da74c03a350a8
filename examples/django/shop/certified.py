"""What `perdure certify shop.certified` plays: the shop is to be as if each call had happened once."""

from typing import Any
from uuid import UUID

import django

django.setup()

from django.contrib.auth import get_user_model  # noqa: E402 (Django's models need the settings)

from perdure.testing import Certification, Scenario, call  # noqa: E402 (as above)
from shop.agents import add_note, assistant, cancel_order, orders, place_order, refund, search_articles  # noqa: E402
from shop.models import Article, Order  # noqa: E402

__all__ = ["assistant", "certification"]


def shop() -> dict[str, Any]:
    """What the tools change: the stock, and the orders."""
    articles = Article.objects.order_by("pk").values("name", "stock")
    placed = Order.objects.order_by("pk").values("pk", "status", "note", "pieces")
    return {"articles": list(articles), "orders": list(placed)}


def placed(number: int, status: Order.Status) -> int:
    """The number of an order of the customer, which is placed once."""
    made = {"customer": customer, "article": pencil, "pieces": 1, "status": status}
    return Order.objects.get_or_create(request=UUID(int=number), defaults=made)[0].pk


customer, _ = get_user_model().objects.get_or_create(username="certified")
pencil, _ = Article.objects.get_or_create(name="Pencil, certified", defaults={"price": 1, "stock": 1_000})
noted = placed(1, Order.Status.PLACED)
unwanted = placed(2, Order.Status.PLACED)
broken = placed(3, Order.Status.SHIPPED)

certification = Certification(
    [
        Scenario(
            [call(search_articles, "pencil"), call(orders)],
            call(place_order, pencil.name, pieces=1),
            user_id=str(customer.pk),
        ),
        Scenario(
            call(place_order, pencil.name, pieces=2),
            [call(add_note, noted, note="Ring twice."), call(cancel_order, unwanted)],
            call(refund, broken),
            user_id=str(customer.pk),
        ),
    ],
    world=shop,
)
