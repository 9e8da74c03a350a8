"""The shop's tables in Django's admin, where the staff ships orders."""

from django.contrib import admin

from shop.models import Article, Order

admin.site.register(Article)
admin.site.register(Order)
