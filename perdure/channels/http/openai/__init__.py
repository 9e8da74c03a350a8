"""OpenAI-compatible routes: Chat Completions, Models and Responses.

A request for a completion or a response runs a durable turn, and its `model` names the agent. Only the newest user
message of a request becomes a turn: the durable conversation already contains the earlier messages. A request that
brings results of its client's tools goes on with their turn.

routes.py        the routes
asked.py         what a request asks: a message to accept, or results to record; waits for the answer
added.py         what a request adds to the agent: tools, settings, instructions, an output
wire.py          requests and responses in OpenAI's formats
caller.py        the user and the conversation of a request
errors.py        errors in OpenAI's shape
repeats.py       the turn of a repeated request
answers.py       an answer as pieces of text, from the events of its turn
chat_completions.py
                 a turn as a chat completion, whole or streamed
responses.py     a turn as a response, whole or streamed, with stable sequence numbers
side_requests.py requests of chat front ends for titles and tags, answered without a turn
"""
