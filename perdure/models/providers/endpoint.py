"""An endpoint: the address of a server, its protocol, and as data what it does differently from others.

What an `EndpointModel` does not know about its server in advance, it learns from the server's refusals (`adapted`).
"""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from http import HTTPStatus
from itertools import pairwise
from typing import Any

import httpx2

from perdure.errors import MissingKey, SettingsError
from perdure.models import endpoints
from perdure.models.endpoints import ANTHROPIC, OPENAI, OWN_KINDS, Refused
from perdure.models.providers.errors import ProviderFailure
from perdure.models.providers.wire_names import NINE_CHARACTERS, IdForm
from perdure.settings import EndpointSettings, check_server_url

CACHE_KEY = "prompt_cache_key"
"""The option of Chat Completions that names the prompts of one conversation."""
CACHE_MARK = "cache_control"
"""The member of Messages' blocks up to which the provider caches a prompt."""

NO_KEY = "none"


@dataclass(frozen=True, slots=True)
class Quirks:
    """What one model of one endpoint does differently. `mine | more` has both; in a conflict, `more` decides.

    `omits` are the options, and the members of messages, that the server refuses. `renames` has its own names of
    options. `ids` is the form of call ids that it accepts, if it is not the protocol's. `translates_own_ids`: it
    refuses ids that it gave itself. `message_members` and `call_members` complete the messages with calls, and the
    calls, of other providers. `thinks_first`: the model's text begins with thoughts whose opening tag the server leaves
    out. `forgets`: it refuses its own opaque parts. `reads` are the media types of the files that it reads. `caches`:
    it accepts the protocol's option about its prompt cache. `notes_within`: it refuses a system message behind others.
    `alternates`: it refuses a user's message behind a tool's result or another user's message. `refuses_blanks`: it
    refuses messages with blank texts.
    """

    omits: frozenset[str] = frozenset()
    renames: Mapping[str, str] = field(default_factory=dict)
    ids: IdForm | None = None
    translates_own_ids: bool = False
    message_members: Mapping[str, Any] = field(default_factory=dict)
    call_members: Mapping[str, Any] = field(default_factory=dict)
    thinks_first: bool = False
    forgets: bool = False
    reads: frozenset[str] = frozenset()
    caches: bool = False
    notes_within: bool = False
    alternates: bool = False
    refuses_blanks: bool = False

    def __or__(self, more: Quirks) -> Quirks:
        pairs = {each.name: (getattr(self, each.name), getattr(more, each.name)) for each in fields(self)}
        return Quirks(
            **{name: theirs or mine if name == "ids" else mine | theirs for name, (mine, theirs) in pairs.items()}
        )


NO_QUIRKS = Quirks()
FORGETFUL = Quirks(forgets=True)

_OF_HOSTS = {
    "api.openai.com": Quirks(renames={"max_tokens": "max_completion_tokens"}),
    "api.mistral.ai": Quirks(renames={"seed": "random_seed"}, ids=NINE_CHARACTERS, alternates=True),
}
_FAMILIES_OF_MISTRAL = ("mistral", "ministral", "magistral", "codestral", "devstral", "pixtral", "mixtral")


VENDORS = {OPENAI: "https://api.openai.com/v1", ANTHROPIC: "https://api.anthropic.com"}
_VENDOR_HEADERS = {OPENAI: {"OPENAI_ORG_ID": "OpenAI-Organization", "OPENAI_PROJECT_ID": "OpenAI-Project"}}


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A server: its name, such as `openai` or `vllm`, its URL, key and protocol, and what differs there.

    `thinks`, `show_received`, `reads` and `caches` are those of `perdure.settings.EndpointSettings`. `headers` are sent
    with each request.
    """

    name: str
    base_url: str
    key: str = field(default=NO_KEY, repr=False)
    thinks: bool = False
    show_received: bool | None = None
    kind: str = OPENAI
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    quirks: Quirks = NO_QUIRKS
    reads: tuple[str, ...] | None = None
    caches: bool | None = None

    @property
    def authorization(self) -> Mapping[str, str]:
        """The headers with the key. Anthropic takes it in `x-api-key` only, and some servers of its protocol do not."""
        bearer, own = {"Authorization": f"Bearer {self.key}"}, {"X-Api-Key": self.key}
        if self.kind != ANTHROPIC:
            return bearer
        return own if self.base_url.startswith(VENDORS[ANTHROPIC]) else bearer | own

    @property
    def identity(self) -> str:
        """The name under which opaque parts of this server's replies are stored.

        The names `openai` and `anthropic` stand for different servers, as the environment says; these have the host.
        """
        host = httpx2.URL(self.base_url).netloc.decode()
        return f"{self.name}@{host}" if self.base_url != VENDORS.get(self.name, self.base_url) else self.name

    @property
    def may_be_quoted(self) -> bool:
        """Whether the log may quote what the server sends; by default, if it is on loopback."""
        host = httpx2.URL(self.base_url).host
        if self.show_received is not None:
            return self.show_received
        try:
            return host == "localhost" or ipaddress.ip_address(host).is_loopback
        except ValueError:
            return False

    def quirks_of(self, family: str) -> Quirks:
        """The quirks known in advance for the models of `family`; those of the endpoint's own settings come first."""
        of_host = _OF_HOSTS.get(httpx2.URL(self.base_url).host, NO_QUIRKS)
        of_family = (
            Quirks(ids=NINE_CHARACTERS, alternates=True) if family.startswith(_FAMILIES_OF_MISTRAL) else NO_QUIRKS
        )
        given = Quirks(thinks_first=self.thinks, reads=self._reads(), caches=self._caches())
        return of_host | of_family | self.quirks | given

    def _caches(self) -> bool:
        """As the setting says, else whether the server is the vendor's own: others may refuse unknown options."""
        return self.base_url.startswith(VENDORS[self.kind]) if self.caches is None else self.caches

    def _reads(self) -> frozenset[str]:
        """As the setting says, else what the protocol has: PDFs are no part of what most servers of OpenAI's read."""
        has_pdf = self.kind == ANTHROPIC or self.base_url.startswith(VENDORS[OPENAI])
        return media_types(("images", *(["pdf"] if has_pdf else [])) if self.reads is None else self.reads)


def media_types(kinds: Collection[str]) -> frozenset[str]:
    """The media types of `kinds`, which are those of `PERDURE_ENDPOINTS__NAME__READS`."""
    return frozenset(media_type for kind in kinds for media_type in _MEDIA_TYPES.get(kind, ()))


def endpoint_of(kind: str, setting: str, name: str) -> Endpoint:
    """The server for the model or embedder called `name`, from the environment variables of the vendor's SDK.

    These are `OPENAI_API_KEY` and `OPENAI_BASE_URL`, or `ANTHROPIC_…`. `setting` is the name of the setting that
    selects the model or embedder. Error messages contain `setting`.

    Raises:
        MissingKey: the key is not set, and the server is the vendor's own.
        SettingsError: the base URL is not an HTTP URL, or the key has characters that no header can have.
    """
    prefix, vendor = kind.upper(), VENDORS[kind]
    base_url = os.environ.get(f"{prefix}_BASE_URL") or vendor
    key = os.environ.get(f"{prefix}_API_KEY", "").strip()
    if not key and base_url == vendor:
        raise MissingKey(
            f"{prefix}_API_KEY is not set and {setting} is {name!r}: set {prefix}_API_KEY, "
            f"or {prefix}_BASE_URL to a compatible server that needs no key"
        )
    try:
        check_server_url(f"{prefix}_BASE_URL", base_url, vendor)
    except ValueError as error:
        raise SettingsError(str(error)) from None
    headers = {name: os.environ[each] for each, name in _VENDOR_HEADERS.get(kind, {}).items() if os.environ.get(each)}
    return Endpoint(kind, base_url, _sendable(key, f"{prefix}_API_KEY"), kind=kind, headers=headers)


def named_endpoint(name: str, given: EndpointSettings) -> Endpoint:
    """The server of `PERDURE_ENDPOINTS__NAME__*`. `given.url` is set, as `Settings` requires.

    Raises:
        SettingsError: the key has characters that no header can have.
    """
    key = given.key.get_secret_value().strip() if given.key is not None else ""
    kind = given.kind if given.kind in OWN_KINDS else OPENAI
    key = _sendable(key, endpoints.variable(name, "KEY"))
    return Endpoint(
        name, given.url or "", key, given.thinks, given.show_received, kind, reads=given.reads, caches=given.caches
    )


def _sendable(key: str, variable: str) -> str:
    """The key to send. The HTTP library's error for another one would quote the header, and so the key."""
    if not (key.isascii() and key.isprintable()):
        raise SettingsError(f"{variable} has characters that are not accepted: accepted: printable ASCII characters")
    return key or NO_KEY


@dataclass(frozen=True, slots=True)
class Adaptation:
    """What a server's refusal says about it; `what` describes it for the log. `lasting`: later requests need it too."""

    quirks: Quirks
    what: str
    lasting: bool = True


_REFUSALS = frozenset({None, 400, 404, 422})
"""The statuses with which servers refuse an option. `None`: an error under status 200."""
_FAILURES = frozenset({HTTPStatus.INTERNAL_SERVER_ERROR, HTTPStatus.NOT_IMPLEMENTED})
"""The statuses with which some servers, such as llama.cpp's two, refuse an option. The message must say so."""
_ABOUT_ROLES = (
    "alternate", "system message", "system role", "role 'system'", 'role "system"', "unexpected role", "roles must",
)  # fmt: skip
"""Parts of messages that refuse the places of messages, as templates of models for chats do."""
_ABOUT_BLANKS = ("non-empty", "nonempty", "not be empty", "cannot be empty", "is blank", "not be blank")
"""Parts of messages that refuse blank texts."""
_OWN_PARTS = ("signature", "encrypted content", "encrypted_content", "type 'reasoning'", "'reasoning' item", "'rs_")
_ABOUT_OWN_PARTS = (
    "not valid",
    "not be verified",
    "not be decrypted",
    "cannot be decrypted",
    "its required",
    "not found",
)
"""Parts of messages that together refuse signatures, encrypted thoughts, or their places."""
_REFUSES = ("unsupported", "not support", "validation error", *_ABOUT_ROLES)
_UNSUPPORTED = (
    "support", "permitted", "allowed", "recogni", "unknown", "unexpected", "extra", "additional", "invalid parameter",
    "invalid argument", "cannot find", "not implemented", "deprecated", "not available", "forbidden",
)  # fmt: skip
"""Parts of messages that refuse an option itself, and not only its value."""
_IMAGES = frozenset({"image/png", "image/jpeg", "image/gif", "image/webp"})
_MEDIA_TYPES = {"images": _IMAGES, "pdf": frozenset({"application/pdf"})}
"""The media types of each kind of files that `PERDURE_ENDPOINTS__NAME__READS` may name."""
_ATTACHED = {
    "images": ({"image", "image_url"}, ("image", "vision", "multimodal", "multi-modal", "mmproj", "content")),
    "pdf": ({"document", "file"}, ("pdf", "document", "file", "content")),
}
"""By kind of files: the types of their parts in a body, and parts of messages that refuse them."""
_OF_SERVERS = frozenset({"stream_options", CACHE_KEY, CACHE_MARK})
"""The options that no model knows: a server that refuses one refuses it for all its models."""
_UNREQUESTED = frozenset({"response_format", "output_config", *_OF_SERVERS})
"""The options that perdure adds to those that agents set."""
_PARTS_OF_OPTIONS = {"include_usage": "stream_options", "json_schema": "response_format", "effort": "output_config"}
_THINKING = frozenset({"thinking", "reasoning_effort", "reasoning"})
_LIMITS = {"max_tokens": "max_completion_tokens", "max_completion_tokens": "max_tokens"}
_MEMBERS = frozenset({"role", "content", "tool_calls", "tool_call_id", "id", "type", "function"})
_REQUIRED_OF_REPLIES = {
    "reasoning_content": Quirks(message_members={"reasoning_content": ""}),
    "thought_signature": Quirks(
        call_members={"extra_content": {"google": {"thought_signature": "skip_thought_signature_validator"}}}
    ),
}
"""Members that some models require of every reply with calls, with the values for replies of other providers."""


def adapted(
    quirks: Quirks, failure: ProviderFailure, body: Mapping[str, Any], required: Collection[str]
) -> Adaptation | None:
    """How `body` can be sent to a server that refused it.

    The options `required` are always sent. Returns `None` if the failure is no refusal, or names nothing that could be
    sent otherwise.
    """
    said = failure.said
    if failure.status not in _REFUSALS and not (failure.status in _FAILURES and any(each in said for each in _REFUSES)):
        return None
    if not quirks.notes_within and _has_notes(body) and any(each in said for each in _ABOUT_ROLES):
        return Adaptation(replace(quirks, notes_within=True), "a system message behind others")
    if not quirks.alternates and _repeats_roles(body) and any(each in said for each in _ABOUT_ROLES):
        return Adaptation(replace(quirks, alternates=True), "roles that do not alternate")
    if not quirks.refuses_blanks and _has_blanks(body) and any(each in said for each in _ABOUT_BLANKS):
        return Adaptation(replace(quirks, refuses_blanks=True), "blank texts")
    kinds = [kind for kind, (types, _) in _ATTACHED.items() if types & _types_of_parts(body)]
    return without_files(quirks, said, kinds) or _without_members(quirks, said, body, required)


def known(quirks: Quirks, refused: Refused, server: str) -> Quirks:
    """The quirks of a model of `server`, of which other models may have learned more."""
    omits = refused.get(server, frozenset())
    return quirks if omits <= quirks.omits else quirks | Quirks(omits=omits)


def remember(quirks: Quirks, refused: Refused, server: str) -> None:
    """Note what a model has learned of its server for the server's other models."""
    refused[server] = refused.get(server, frozenset()) | (quirks.omits & _OF_SERVERS)


def _has_notes(body: Mapping[str, Any]) -> bool:
    return any(message["role"] == "system" for message in _messages(body)[1:])


def _repeats_roles(body: Mapping[str, Any]) -> bool:
    """Whether a user's message follows a tool's result or another user's message."""
    roles = [message["role"] for message in _messages(body)]
    return any(this == "user" and before in {"user", "tool"} for before, this in pairwise(roles))


def _has_blanks(body: Mapping[str, Any]) -> bool:
    contents = [message.get("content") or "" for message in _messages(body)]
    return any(isinstance(each, str) and not each.strip() for each in contents)


def _messages(body: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    """The messages in `body`; none in one of the Responses API, whose options may be refused, too."""
    messages: Sequence[Mapping[str, Any]] = body.get("messages", ())
    return messages


def kinds_of(types: Iterable[str]) -> list[str]:
    """The kinds of files with these media types, as in `PERDURE_ENDPOINTS__NAME__READS`."""
    given = set(types)
    return [kind for kind, known in _MEDIA_TYPES.items() if known & given]


def without_files(quirks: Quirks, said: str, kinds: Iterable[str]) -> Adaptation | None:
    """How messages can be sent to a server that refused them with the texts `said`; they had files of these kinds.

    Returns `None` if the refusal is not about files.
    """
    for kind in kinds:
        refused, (_, parts) = quirks.reads & _MEDIA_TYPES[kind], _ATTACHED[kind]
        if refused and any(each in said for each in parts):
            never = any(each in said for each in _UNSUPPORTED)  # else it refuses this one, such as a too large one
            return Adaptation(replace(quirks, reads=quirks.reads - refused), kind, lasting=never)
    return None


def refuses_own_parts(said: str) -> bool:
    """Whether a server refuses opaque parts that it sent itself, perhaps to another account, with the texts `said`."""
    is_about_them = any(each in said for each in _OWN_PARTS)
    return is_about_them and (
        any(each in said for each in _ABOUT_OWN_PARTS) or bool(_words(said) & {"invalid", "corrupted"})
    )


def _words(said: str) -> set[str]:
    return set("".join(each if each.isalnum() or each == "_" else " " for each in said).split())


def _without_members(
    quirks: Quirks, said: str, body: Mapping[str, Any], required: Collection[str]
) -> Adaptation | None:
    words = _words(said)
    is_long = "too long" in said and ("].id" in said or "tool_call_id" in said)
    is_missing = bool(words & {"missing", "must", "required"}) and not any(each in said for each in _UNSUPPORTED)
    # The calls of another model have no thoughts before them, and some models do not think before a required call.
    pauses = "redacted_thinking" in words or {"thinking", "tool_choice"} <= words
    for applies, difference, what, lasting in (
        ("length of 9" in said, Quirks(ids=NINE_CHARACTERS, translates_own_ids=True), "the form of call ids", True),
        (is_long, Quirks(translates_own_ids=True), "the form of call ids", True),
        (refuses_own_parts(said), FORGETFUL, "its own signatures", False),
        (pauses, Quirks(omits=frozenset(_THINKING & body.keys())), "thinking", False),
        *(
            (is_missing and name in words, each, f"replies without {name}", True)
            for name, each in _REQUIRED_OF_REPLIES.items()
        ),
    ):
        if applies and (joined := quirks | difference) != quirks:
            return Adaptation(joined, what, lasting)
    words |= {whole for part, whole in _PARTS_OF_OPTIONS.items() if part in words}
    refused = sorted(words & _refusable(said, body) - set(required))
    if not refused:
        return None
    renames = {
        standard: _LIMITS[sent]
        for standard in _LIMITS
        if (sent := quirks.renames.get(standard, standard)) in refused and _LIMITS[sent] in words
    }
    omits = frozenset(each for each in refused if each not in _LIMITS or not renames)
    joined = quirks | Quirks(omits=omits, renames=renames)
    return Adaptation(joined, ", ".join(refused)) if joined != quirks else None


def _types_of_parts(body: Mapping[str, Any]) -> set[str]:
    """The types of the parts of the messages in `body`."""
    contents = [message.get("content") for message in _messages(body)]
    return {str(part.get("type")) for each in contents if isinstance(each, list) for part in each}


def _refusable(said: str, body: Mapping[str, Any]) -> set[str]:
    """The names of the options in `body`, and of the members of its messages and calls that may be left out.

    Without a word such as "unsupported", perhaps only an option's value was refused, such as a limit of tokens.
    """
    parts = [*_messages(body)]
    parts += [call for message in parts for call in message.get("tool_calls", ())]
    sent = {*body, CACHE_MARK} if isinstance(body.get("system"), list) else set(body)
    options = sent if any(each in said for each in _UNSUPPORTED) else sent & _UNREQUESTED
    return options | {name for part in parts for name in part if name not in _MEMBERS}
