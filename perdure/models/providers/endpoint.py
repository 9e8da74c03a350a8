"""The URL and key of a provider's server, read from the environment variables that the vendor's SDK uses."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

import httpx2

from perdure.errors import MissingKey, SettingsError
from perdure.models.providers.transport import Transport
from perdure.settings import EndpointSettings

_NO_KEY = "none"


@dataclass(frozen=True, slots=True)
class Vendor:
    """A vendor's default URL, and the prefix of its environment variables, such as `OPENAI` in `OPENAI_API_KEY`."""

    prefix: str
    base_url: str


OPENAI = Vendor("OPENAI", "https://api.openai.com/v1")
ANTHROPIC = Vendor("ANTHROPIC", "https://api.anthropic.com")


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A server: its name, such as `openai` or `vllm`, its URL and key, and what differs there.

    `thinks` and `show_received` are those of `perdure.settings.EndpointSettings`.
    """

    name: str
    base_url: str
    key: str = field(repr=False)
    thinks: bool = False
    show_received: bool | None = None

    def http_client(self) -> httpx2.Client:
        """A client whose requests another thread can abort; see `perdure.models.providers.transport`."""
        return httpx2.Client(transport=Transport(self.base_url), follow_redirects=True)


def endpoint_of(vendor: Vendor, setting: str, name: str) -> Endpoint:
    """The server for the model or embedder called `name`, as the environment variables of `vendor` configure it.

    `setting` is the name of the setting that selects the model or embedder. Error messages contain `setting`.

    Raises:
        MissingKey: the key is not set, and the server is the vendor's own.
        SettingsError: the base URL is not an HTTP URL.
    """
    base_url = os.environ.get(f"{vendor.prefix}_BASE_URL") or vendor.base_url
    key = os.environ.get(f"{vendor.prefix}_API_KEY")
    if not key and base_url == vendor.base_url:
        raise MissingKey(
            f"{vendor.prefix}_API_KEY is not set and {setting} is {name!r}: set {vendor.prefix}_API_KEY, "
            f"or {vendor.prefix}_BASE_URL to a compatible server that needs no key"
        )
    if not _is_address(base_url):
        raise SettingsError(
            f"{vendor.prefix}_BASE_URL is {base_url!r}: accepted: an address that begins with http:// or https://, "
            f"such as {vendor.base_url}"
        )
    return Endpoint(vendor.prefix.lower(), base_url, key or _NO_KEY)


def named_endpoint(name: str, given: EndpointSettings) -> Endpoint:
    """The server of `PERDURE_ENDPOINTS__NAME__*`. `given.url` is set, as `Settings` requires."""
    key = given.key.get_secret_value() if given.key is not None else _NO_KEY
    return Endpoint(name, given.url or "", key, given.thinks, given.show_received)


def _is_address(base_url: str) -> bool:
    try:
        url = httpx2.URL(base_url)
    except httpx2.InvalidURL:
        return False
    return url.scheme in ("http", "https") and bool(url.host)
