"""The shop's tables: what it sells, and what its customers have ordered."""

from django.conf import settings
from django.db import models


class Article(models.Model):
    """What the shop sells."""

    name = models.CharField(max_length=100, unique=True)
    price = models.DecimalField(max_digits=8, decimal_places=2)
    stock = models.PositiveIntegerField()

    def __str__(self) -> str:
        return f"{self.name}, {self.price} euros, {self.stock} in stock"


class Order(models.Model):
    """An order of one article. `request` is the id of the tool call, or of the form, that has placed it."""

    class Status(models.TextChoices):
        PLACED = "placed"
        SHIPPED = "shipped"
        CANCELLED = "cancelled"
        REFUNDED = "refunded"

    customer = models.ForeignKey(settings.AUTH_USER_MODEL, models.CASCADE)
    article = models.ForeignKey(Article, models.PROTECT)
    pieces = models.PositiveIntegerField()
    status = models.CharField(max_length=10, choices=Status, default=Status.PLACED)
    note = models.CharField(max_length=200, blank=True)
    request = models.UUIDField(unique=True)

    def __str__(self) -> str:
        return f"order {self.pk}: {self.pieces} of {self.article.name}, {self.status}"
