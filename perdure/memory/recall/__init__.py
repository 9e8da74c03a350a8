"""Recall: searching what a user said and what is known of them, for prompts, tools and routes."""
