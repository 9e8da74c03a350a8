"""Functions over untrusted text. Each function takes time linear in the length of the text.

The functions parse JSON strictly, make text storable in PostgreSQL, match patterns, quote text in prompts, and detect
contradictions. Called by every package that handles text of users, models or tools.
"""
