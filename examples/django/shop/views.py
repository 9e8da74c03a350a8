"""The shop's view, which stores an order and sends the agent a message about it."""

from django import forms
from django.contrib.auth.decorators import login_required
from django.db import connection, transaction
from django.http import HttpRequest, JsonResponse
from django.views.decorators.http import require_POST

import perdure
from shop import ordering


class OrderForm(forms.Form):
    """An order. `request` is an id that the page chooses, so that a repeated request places no second order."""

    article = forms.CharField()
    pieces = forms.IntegerField(min_value=1)
    request = forms.UUIDField()


@login_required
@require_POST
@transaction.atomic
def order(request: HttpRequest) -> JsonResponse:
    """In one transaction, place an order and send the agent a message about it."""
    form, user_id = OrderForm(request.POST), str(request.user.pk)
    if not form.is_valid():
        return JsonResponse({"errors": form.errors}, status=400)
    given = form.cleaned_data
    try:
        placed = ordering.place(user_id, given["article"], given["pieces"], given["request"])
    except perdure.ToolError as error:
        return JsonResponse({"errors": {"article": [str(error)]}}, status=400)
    sent = perdure.send(
        connection,
        user_id=user_id,
        text=f"I have placed {placed}",
        conversation="orders",
        message_id=str(given["request"]),
    )
    return JsonResponse({"turn_id": str(sent.turn_id)})
