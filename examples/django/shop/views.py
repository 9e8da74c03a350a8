"""The shop's view, which stores an order and sends the agent a message about it."""

from django.contrib.admin.models import ADDITION, LogEntry
from django.contrib.auth.decorators import login_required
from django.db import connection, transaction
from django.http import HttpRequest, JsonResponse
from django.views.decorators.http import require_POST

import perdure


@login_required
@require_POST
@transaction.atomic
def order(request: HttpRequest) -> JsonResponse:
    """In one transaction, record an order in Django's admin log and send the agent a message about the order."""
    item = request.POST["item"]
    LogEntry.objects.create(user=request.user, action_flag=ADDITION, object_repr=item, change_message="ordered")
    sent = perdure.send(connection, user_id=str(request.user.pk), text=f"I have ordered: {item}", conversation="orders")
    return JsonResponse({"turn_id": str(sent.turn_id)})
