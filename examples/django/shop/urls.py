"""The shop's pages: Django's admin, where its users sign in."""

from django.contrib import admin
from django.urls import path

urlpatterns = [path("admin/", admin.site.urls)]
