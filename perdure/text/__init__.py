"""Untrusted text: strict JSON, storable text, linear-time patterns, quotations for prompts, contradictions.

Every function takes time linear in the length of its text. Called by every package that handles text of users, models
or tools.
"""
