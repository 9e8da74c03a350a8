"""OpenAI-compatible routes: Chat Completions, Models and Responses.

A request for a completion or a response runs a durable turn, and its `model` names the agent. Only the newest user
message of a request becomes a turn: the durable conversation already contains the earlier messages.

routes.py        the routes
wire.py          requests and responses in OpenAI's formats
caller.py        the user and the conversation of a request
errors.py        errors in OpenAI's shape
repeats.py       the turn of a repeated request
answers.py       a turn's answer as pieces of text, from its events
chat.py          a turn as a chat completion, whole or streamed
responses.py     a turn as a response, whole or streamed, with stable sequence numbers
side_requests.py requests of chat front ends for titles and tags, answered without a turn
"""
