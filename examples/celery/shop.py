"""A shop whose Celery application includes agents.

`celery -A shop worker` runs the shop's tasks. With the options in `README.md`, the worker also runs agents' turns.
"""

import os
import sys

from celery import Celery

import perdure

app = Celery("shop", broker=os.environ.get("SHOP_BROKER_URL", "redis://127.0.0.1:6379/0"))
app.conf.broker_connection_retry_on_startup = True
perdure.install(app)


@app.task(name="shop.ask")
def ask(customer: str, question: str) -> None:
    """Send a customer's question to the agent. perdure sends the reply to the task `shop.answer`."""
    reply_to = {"task": "shop.answer", "queue": "celery"}
    app.send_task("turns.submit", kwargs={"user_id": customer, "text": question, "reply_to": reply_to})


@app.task(name="shop.answer")
def answer(delivery_id: str, status: str, reply: dict | None = None, **turn: object) -> None:
    """Print the agent's reply, or the error if there is no reply. A repeated delivery has the same `delivery_id`."""
    print(f"{delivery_id}: {status}: {reply['text'] if reply else turn['error']}", flush=True)


if __name__ == "__main__":
    ask.delay(sys.argv[1], sys.argv[2])
