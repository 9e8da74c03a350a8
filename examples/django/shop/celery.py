"""The shop's Celery application. `celery -A shop worker` starts a worker."""

import os

from celery import Celery

import perdure

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "shop.settings")

app = Celery("shop")
app.config_from_object("django.conf:settings", namespace="CELERY")
app.autodiscover_tasks()
perdure.install(app)
