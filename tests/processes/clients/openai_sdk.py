"""OpenAI's SDK: an answer, a stream, and a parsed output."""

import json
import sys

import openai
import pydantic


class Place(pydantic.BaseModel):
    """The output."""

    city: str


client = openai.OpenAI(base_url=sys.argv[1], api_key="none")
hello = [{"role": "user", "content": "hello"}]
whole = client.chat.completions.create(model="tester", messages=hello)
chunks = [*client.chat.completions.create(model="tester", messages=hello, stream=True)]
parsed = client.chat.completions.parse(
    model="tester", messages=[{"role": "user", "content": "place"}], response_format=Place
)
response = client.responses.parse(model="tester", input="place", text_format=Place)
found = {
    "whole": whole.choices[0].message.content,
    "streamed": [each.choices[0].delta.content for each in chunks if each.choices and each.choices[0].delta.content],
    "output": parsed.choices[0].message.parsed.city,
    "output of the response": response.output_parsed.city,
}
json.dump(found, sys.stdout)
