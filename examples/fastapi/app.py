"""A FastAPI shop with agents mounted at /agents. `uvicorn app:app` serves the shop.

Customers sign in with the shop's own tokens.
"""

import os
from typing import Annotated

from celery import Celery
from fastapi import Depends, FastAPI, HTTPException, Request
from sqlalchemy import create_engine, text

import perdure

TOKENS = {"token-of-ana": "ana", "token-of-ben": "ben"}
"""Maps each of the shop's own tokens to the customer who signs in with that token."""

worker = Celery("shop", broker=os.environ.get("SHOP_BROKER_URL", "redis://127.0.0.1:6379/0"))
worker.conf.broker_connection_retry_on_startup = True
perdure.install(worker)

engine = create_engine(os.environ.get("SHOP_DATABASE_URL", "postgresql+psycopg2://"))


def customer(request: Request) -> str:
    """Return the customer who sent the request. The shop's routes and the gateway call this function."""
    found = TOKENS.get(request.headers.get("authorization", "").removeprefix("Bearer "))
    if found is None:
        raise HTTPException(401, "Sign in to the shop.")
    return found


agents = perdure.gateway(authenticate=customer)
app = FastAPI(lifespan=lambda _: agents.running())
app.mount("/agents", agents)


@app.post("/orders")
def order(item: str, customer: Annotated[str, Depends(customer)]) -> dict[str, object]:
    """Store an order and a message to the agent in one transaction, so that both are committed or neither."""
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE IF NOT EXISTS orders (id serial PRIMARY KEY, customer text, item text)"))
        insert = text("INSERT INTO orders (customer, item) VALUES (:customer, :item) RETURNING id")
        number = connection.execute(insert, {"customer": customer, "item": item}).scalar_one()
        text_of_order = f"I have ordered: {item}"
        sent = perdure.send(connection, user_id=customer, text=text_of_order, conversation="orders")
    return {"order": number, "turn_id": str(sent.turn_id)}
