"""Implements `Model` for every server that speaks Chat Completions or Anthropic's Messages.

`EndpointModel` calls one model of one `Endpoint`. A module for each protocol converts prompts and replies, `reply`
builds the replies of both, and `endpoint` has as data what differs by server. No module uses the vendors' SDKs.
"""
