"""The shop's URLs: Django's admin, where users sign in, and the view that takes orders."""

from django.contrib import admin
from django.urls import path

from shop.views import order

urlpatterns = [path("admin/", admin.site.urls), path("orders/", order)]
