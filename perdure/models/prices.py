"""What a model costs, and how many tokens its window has, from the data that genai-prices carries. Uses no network.

The data is looked up by the server's URL, so that a model on a server of one's own has no price, whatever its name. The
library is imported at the first look-up.
"""

from __future__ import annotations

import os
from datetime import datetime
from decimal import Decimal
from typing import TYPE_CHECKING

from perdure.models import endpoints
from perdure.models.protocol import ForeignModel, Usage, name_of
from perdure.settings import Settings

if TYPE_CHECKING:
    from genai_prices.types import ModelInfo, Provider

_OTHER_NAMES = {
    "azure-responses": "azure",
    "bedrock-mantle": "bedrock",
    "google-cloud": "google",
    "openai-chat": "openai",
    "openai-responses": "openai",
}
"""Providers of pydantic-ai that genai-prices has under another name."""


def cost(model: str | ForeignModel, usage: Usage, settings: Settings, at: datetime | None = None) -> Decimal | None:
    """What `usage` of a model cost at the time `at` (default: now), in US dollars; `None` if its prices are unknown.

    Example:
        >>> cost("openai:gpt-5-mini", Usage(1_000_000, 1_000_000), Settings(), datetime(2026, 1, 1, tzinfo=UTC))
        Decimal('2.25')
    """
    found = _find(model, settings)
    if found is None:
        return None
    from genai_prices import Usage as Tokens  # noqa: PLC0415 (its data takes a while to import)

    provider, info = found
    tokens = Tokens(
        input_tokens=usage.input_tokens,
        cache_read_tokens=usage.cached_tokens or 0,
        output_tokens=usage.output_tokens,
    )
    return info.calc_price(tokens, provider, genai_request_timestamp=at).total_price


def window(model: str | ForeignModel, settings: Settings) -> int | None:
    """The tokens of a model's window: of its prompt and reply together.

    `PERDURE_MODEL_WINDOW` counts for a model that genai-prices does not have. `None` if neither is known.
    """
    found = _find(model, settings)
    known = None if found is None else found[1].context_window
    return known or settings.model_window


def _find(model: str | ForeignModel, settings: Settings) -> tuple[Provider, ModelInfo] | None:
    scheme, _, name = endpoints.canonical(name_of(model), settings).partition(":")
    given = settings.endpoints.get(scheme)
    url = given.url if given is not None else _base_url(scheme)
    kind = scheme if given is None else given.kind
    provider = None if url else _OTHER_NAMES.get(kind, kind)
    if not name or (url is None and kind not in endpoints.OWN_KINDS and kind not in endpoints.PROVIDERS):
        return None
    from genai_prices.data_snapshot import get_snapshot  # noqa: PLC0415 (as above)

    try:
        return get_snapshot().find_provider_model(name, None, provider, url)
    except LookupError:
        return None


def _base_url(scheme: str) -> str | None:
    return os.environ.get(f"{scheme.upper()}_BASE_URL") if scheme in endpoints.OWN_KINDS else None
