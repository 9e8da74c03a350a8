"""OpenAI-compatible routes: Chat Completions, Models and Responses, over durable turns.

The agent is the model. Only the newest user message of a request becomes a turn: the durable conversation has the rest.

routes.py        the routes
wire.py          requests and answers in OpenAI's shapes
caller.py        the user and the conversation of a request
errors.py        errors in OpenAI's shape
repeats.py       which requests are the same: a repeated one finds its turn
answers.py       a turn's answer as pieces of text, from its events
chat.py          a turn as a chat completion, whole or streamed
responses.py     a turn as a response, whole or streamed, with stable sequence numbers
side_requests.py titles and tags that chat front ends ask for, without a turn
"""
