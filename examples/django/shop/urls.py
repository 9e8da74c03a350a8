"""The shop's pages: Django's admin, in which users sign in, and a page for orders."""

from django.contrib import admin
from django.urls import path

from shop.views import order

urlpatterns = [path("admin/", admin.site.urls), path("orders/", order)]
