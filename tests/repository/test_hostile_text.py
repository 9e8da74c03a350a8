"""Patterns and functions process untrusted text in time linear in the text's length.

Each registered pattern and each function of `FUNCTIONS` runs over every kind of hostile text at two lengths, and its
CPU time must not grow faster than the length. Other tests check that no pattern and no function is missing.
"""

from __future__ import annotations

import ast
import io
import re
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import pytest

from perdure.access import tokens
from perdure.channels.http import body, parameters
from perdure.channels.services import code_spans, downloading, quotations, slack, splitting, telegram_markup
from perdure.channels.services.discord import channel as discord
from perdure.channels.services.protocol import Quoted
from perdure.cli import display
from perdure.clock import SystemClock
from perdure.errors import InvalidRequest, NotFound
from perdure.files.kinds import kind_of
from perdure.files.results import ending_files, named_in
from perdure.memory.consolidation import candidates, extraction, merging
from perdure.memory.embedding import text_to_embed
from perdure.memory.recall import cues, time_spans
from perdure.models import families
from perdure.models.embedders import hashing, static
from perdure.models.embedders import protocol as embedder_protocol
from perdure.models.offline import OfflineModel
from perdure.models.protocol import Message, ModelCall, ModelRequest, Role, ToolCall, ToolSchema
from perdure.models.providers import endpoint, errors, json_values, wire_names
from perdure.models.thoughts import ThoughtTags
from perdure.network import egress, queues
from perdure.network.reply_urls import Reachable
from perdure.sessions import summary
from perdure.tasks import arguments
from perdure.text import (
    contradiction,
    injections,
    json_replies,
    linear,
    patterns,
    quoting,
    reading,
    statements,
    titles,
    untrusted,
    words,
)
from perdure.text.patterns import Pattern
from perdure.text.tokens import cut_to, estimate_tokens
from perdure.tools import docstring, registry
from perdure.tools import search as tool_search
from perdure.tools.mcp import server as mcp_server
from perdure.tools.mcp import stdio
from perdure.tools.mcp import tool as mcp_tool
from perdure.turns.inbox import incoming
from perdure.turns.prompt.parts import Part, render
from tests.hostile import STORABLE, TEXTS, assert_linear, repeated
from tests.repository.source import ROOT, modules

MAY_IMPORT_RE = {"perdure.database.engine": "the names of parameters in this repository's own SQL"}
"""The modules that may import `re`, each with the trusted text that it matches. Patterns of `re` backtrack."""

NOT_OVER_FOREIGN_TEXT = {
    "perdure.tools.registry.tool": "takes the docstring of an author's function, through `docstring.describe`",
    "perdure.tools.registry.who_approves": "passes arguments to the author's function",
    "perdure.text.declarations.require": "takes an author's declaration",
    "perdure.tools.registry.require_name": "takes an author's declaration",
    "perdure.tools.registry.require_effect": "takes an author's declaration",
    "perdure.tools.registry.require_probe": "takes an author's declaration",
    "perdure.tools.registry.require_max_result_chars": "takes an author's declaration",
    "perdure.tools.registry.require_approval": "takes an author's declaration",
    "perdure.tools.awaited.task.celery_tool": "takes an author's declaration",
    "perdure.snapshots.resolve.resolve": "takes a setting",
    "perdure.settings.check_server_url": "takes a setting",
    "perdure.models.adapted.vendors.vendor": "takes a setting",
    "perdure.access.keys.parse_entry": "takes an entry of a setting",
    "perdure.access.keys.parse_key": "takes an entry of a setting, or a line of an operator's file",
    "perdure.casebank.lookup.least_similarity": "takes the embedder's name, a setting",
    "perdure.servers.redis.is_of": "takes a URL of this installation",
    "perdure.servers.process.sockets.settle": "takes a path of this installation",
    "perdure.network.egress.pinned": "takes a URL that `check` made",
    "perdure.memory.consolidation.extraction.extract": "calls a model, with the text of `chunks`, for `parse`",
    "perdure.text.words.word_list": "takes a list of words in the source",
}
"""Functions that have a string parameter but get no untrusted text, each with the reason. `FUNCTIONS` omits them."""

REACHABLE = Reachable.parse(["10.0.0.0/8", "http://*a*1*.internal:*/perdure/*a*1*.x"])
REPLY_TASKS = [queues.ReplyTask("*a*1*.x", "shop")]
NOW = datetime(2024, 5, 15, tzinfo=UTC)
CALCULATOR = ToolSchema("calculator", "Calculates.", {"type": "object"})


def message_with(content: str) -> extraction.ConversationMessage:
    """A user's message. `content` is also the author's name."""
    return extraction.ConversationMessage(1, Role.USER, content, NOW, "http", content)


def sources_of(content: str) -> object:
    """Find the messages that share words with a candidate memory."""
    found = candidates.Candidate(content, candidates.MemoryKind.FACT, 0.5)
    return extraction._with_user_sources([found], [message_with(content)])


def offline_reply(*messages: Message) -> object:
    """The offline model's reply."""
    request = ModelRequest(messages, (CALCULATOR,))
    return OfflineModel().respond(request, ModelCall(SystemClock(), 600))


def suppressing(function: Callable[[str], object], *errors: type[Exception]) -> Callable[[str], object]:
    """Wrap `function` so that the given errors are suppressed."""

    def called(given: str) -> object:
        with suppress(*errors):
            return function(given)
        return None

    return called


FUNCTIONS: dict[str, Callable[[str], object]] = {
    "perdure.access.tokens.looks_like_token": tokens.looks_like_token,
    "perdure.channels.services.code_spans.outside_code": lambda given: code_spans.outside_code(given, str.upper),
    "perdure.channels.services.discord.channel.render": discord.render,
    "perdure.channels.services.downloading.is_at": suppressing(
        lambda given: downloading.is_at(f"https://{given}", [".slack.com"]), ValueError
    ),
    "perdure.channels.services.slack.render": slack.render,
    "perdure.channels.services.telegram_markup.render": telegram_markup.render,
    "perdure.channels.services.telegram_markup.visible": telegram_markup.visible,
    "perdure.channels.services.quotations.with_quotations": lambda given: quotations.with_quotations(
        given, [Quoted(given, given)], b"", 20_000
    ),
    "perdure.channels.services.splitting.units": splitting.units,
    "perdure.channels.services.splitting.split": lambda given: splitting.split(
        given, 400, lambda part: len(telegram_markup.visible(telegram_markup.render(part)))
    ),
    "perdure.text.contradiction.features": contradiction.features,
    "perdure.text.contradiction.difference": lambda given: contradiction.difference(given, f"{given} 1"),
    "perdure.text.contradiction.without_numbers": contradiction.without_numbers,
    "perdure.text.injections.instructs": injections.instructs,
    "perdure.text.reading.read": reading.read.__wrapped__,
    "perdure.text.reading.plain_of": reading.plain_of,
    "perdure.text.reading.stem": reading.stem,
    "perdure.text.statements.relate": lambda given: statements.relate(given, f"{given} 1"),
    "perdure.text.statements.differ": lambda given: statements.differ(given, f"{given} 1"),
    "perdure.text.statements.comparable": lambda given: statements.comparable(given, f"{given} 1"),
    "perdure.text.statements.may_end": lambda given: statements.may_end(given, f"{given} 1"),
    "perdure.text.statements.counts": lambda given: statements.counts(given, f"{given} 1"),
    "perdure.text.statements.are_of_one_thing": lambda given: statements.are_of_one_thing(given, f"{given} 1"),
    "perdure.text.statements.are_of_two_things": lambda given: statements.are_of_two_things(given, f"{given} 1"),
    "perdure.text.statements.denies": lambda given: statements.denies(given, f"{given} 1"),
    "perdure.text.statements.turned": lambda given: statements.turned(given, f"{given} 1"),
    "perdure.text.statements.resemble": lambda given: statements.resemble(given, f"{given} 1"),
    "perdure.text.statements.anchors": lambda given: statements.anchors(given, f"{given} 1"),
    "perdure.text.statements.is_compared": statements.is_compared,
    "perdure.memory.consolidation.extraction.quotation": extraction.quotation,
    "perdure.memory.consolidation.extraction.telling_words": extraction.telling_words,
    "perdure.text.words.tokens": lambda given: [token.read() for token in words.tokens(given)],
    "perdure.text.words.sides": words.sides,
    "perdure.text.words.stem": words.stem,
    "perdure.text.words.without_particle": words.without_particle,
    "perdure.tasks.arguments.hidden": arguments.hidden,
    "perdure.text.linear.words": linear.words,
    "perdure.text.linear.normalized": lambda given: (
        linear.normalized("NFKC", given),
        linear.normalized("NFKD", given),
    ),
    "perdure.text.linear.has_hangul": linear.has_hangul,
    "perdure.text.linear.is_hangul": linear.is_hangul,
    "perdure.text.untrusted.checked_storable": suppressing(untrusted.checked_storable, ValueError),
    "perdure.text.untrusted.is_storable": untrusted.is_storable,
    "perdure.text.untrusted.storable": untrusted.storable,
    "perdure.text.untrusted.load_object": suppressing(untrusted.load_object, ValueError),
    "perdure.text.untrusted.load_value": suppressing(lambda given: untrusted.load_value(given, 0), ValueError),
    "perdure.text.json_replies.values_in": lambda given: list(json_replies.values_in(given)),
    "perdure.text.json_replies.begins_json": json_replies.begins_json,
    "perdure.text.json_replies.without_fence": json_replies.without_fence,
    "perdure.tools.registry.refusal_of": lambda given: registry.refusal_of("Refused", given, {}),
    "perdure.tools.registry.load_arguments": suppressing(lambda text: registry.load_arguments(text, {}), ValueError),
    "perdure.text.titles.title_of": titles.title_of,
    "perdure.text.untrusted.cut": lambda given: untrusted.cut(given, 500),
    "perdure.text.untrusted.first_line": untrusted.first_line,
    "perdure.text.untrusted.is_identifier": untrusted.is_identifier,
    "perdure.text.untrusted.identifier": suppressing(untrusted.identifier, ValueError),
    "perdure.text.untrusted.error_summary": lambda given: untrusted.error_summary(ValueError(given)),
    "perdure.text.untrusted.dump": lambda given: untrusted.dump([given], 500),
    "perdure.memory.consolidation.candidates.parse": suppressing(candidates.parse, ValueError),
    "perdure.memory.consolidation.candidates.comparison_key": candidates.comparison_key,
    "perdure.text.tokens.estimate_tokens": estimate_tokens,
    "perdure.text.tokens.cut_to": lambda given: cut_to(given, 500),
    "perdure.tools.search.find": lambda given: tool_search.find(given, [ToolSchema(given, given, {})] * 10),
    "perdure.tools.search.search_tools": tool_search.search_tools,
    "perdure.turns.prompt.parts.render": lambda given: render(
        Part(quoting.MEMORY, "x", [given], 9_000), quoting.Quoter()
    ),
    "perdure.memory.embedding.text_to_embed": text_to_embed,
    "perdure.memory.consolidation.extraction.chunks": lambda given: list(extraction.chunks([message_with(given)])),
    "perdure.memory.consolidation.extraction.is_deceived": lambda given: extraction.is_deceived(
        given, {1}, [message_with(given)]
    ),
    "perdure.memory.consolidation.extraction._labelled": lambda given: extraction._labelled(message_with(given)),
    "perdure.memory.consolidation.extraction._with_user_sources": sources_of,
    "perdure.memory.consolidation.merging.entity_key": merging.entity_key,
    "perdure.text.quoting.quoted": lambda given: quoting.quoted(quoting.MEMORY, "x", [given]),
    "perdure.text.quoting.label_lines": lambda given: quoting.label_lines("user", given),
    "perdure.text.quoting.without_quotations": quoting.without_quotations,
    "perdure.models.embedders.protocol.embedded_text": embedder_protocol.embedded_text,
    "perdure.memory.recall.cues.names_of": lambda given: cues.names_of([given]),
    "perdure.memory.recall.cues.find_cues": lambda given: cues.find_cues(f"{given}?").names(given),
    "perdure.memory.recall.time_spans.find_spans": lambda given: time_spans.find_spans(given, NOW, ZoneInfo("UTC")),
    "perdure.models.embedders.hashing.words": hashing.words,
    "perdure.models.embedders.hashing.HashEmbedder": lambda given: hashing.HashEmbedder(384).embed([given]),
    "perdure.models.embedders.static.StaticEmbedder": lambda given: static.StaticEmbedder().embed([given]),
    "perdure.models.providers.wire_names.sanitized": wire_names.sanitized,
    "perdure.models.providers.errors.failure_in": lambda given: errors.failure_in({"error": [given, {given: given}]}),
    "perdure.models.providers.errors.pause_in": lambda given: errors.pause_in({"details": [{"retryDelay": given}]}),
    "perdure.models.providers.errors.failure_of": lambda given: errors.failure_of(
        400, given.encode(errors="replace"), {}
    ),
    "perdure.models.providers.errors.error_of": lambda given: errors.error_of(
        errors.ProviderFailure(429, None, given, {}), SystemClock()
    ),
    "perdure.models.providers.endpoint.adapted": lambda given: endpoint.adapted(
        endpoint.NO_QUIRKS, errors.ProviderFailure(400, None, given, {}), {"messages": []}, ()
    ),
    "perdure.models.providers.json_values.object_in": json_values.object_in,
    "perdure.models.families.family": families.family,
    "perdure.models.thoughts.ThoughtTags": lambda given: [
        [tags.split(given[at : at + 7]) for at in range(0, len(given), 7)]
        for tags in (ThoughtTags(), ThoughtTags(thinks_first=True))
    ],
    "perdure.models.offline.OfflineModel, statement": lambda given: offline_reply(Message(Role.USER, given)),
    "perdure.models.offline.OfflineModel, calculation": lambda given: offline_reply(Message(Role.USER, given[:400])),
    "perdure.models.offline.OfflineModel, extraction": lambda given: offline_reply(
        Message(Role.SYSTEM, extraction.PROMPT), Message(Role.USER, given)
    ),
    "perdure.models.offline.OfflineModel, summary": lambda given: offline_reply(
        Message(Role.USER, f"summary: {given}")
    ),
    "perdure.models.offline.OfflineModel, question": lambda given: offline_reply(
        Message(Role.SYSTEM, given), Message(Role.USER, given), Message(Role.USER, "Where do I live?")
    ),
    "perdure.models.offline.OfflineModel, a tool's result": lambda given: offline_reply(
        Message(Role.ASSISTANT, "", (ToolCall("1", "x", "{}"),)), Message(Role.TOOL, given, (), "1")
    ),
    "perdure.sessions.summary.summarise": lambda given: summary.summarise(
        OfflineModel(), ModelCall(SystemClock(), 60), [Message(Role.USER, given)], so_far=given
    ),
    "perdure.sessions.summary.extract": lambda given: summary.extract([Message(Role.USER, given)]),
    "perdure.tools.docstring.describe": docstring.describe,
    "perdure.tools.mcp.stdio._too_long": lambda given: stdio._too_long((given.encode(errors="replace"),) * 2),
    "perdure.tools.mcp.server.unsendable": lambda given: mcp_server.unsendable({given: given, "a": given}),
    "perdure.tools.mcp.tool.without_malformed": lambda given: mcp_tool.without_malformed(
        {"tools": [{"name": given, "inputSchema": {"type": given, given: given}}]}, "2025-11-25", 200
    ),
    "perdure.files.kinds.kind_of": lambda given: kind_of(io.BytesIO(given.encode(errors="replace")), given),
    "perdure.files.results.ending_files": ending_files,
    "perdure.files.results.named_in": named_in,
    "perdure.network.egress.check": lambda given: [
        suppressing(lambda url: egress.check(url, REACHABLE), InvalidRequest)(url)
        for url in (given, f"http://{given}/", f"http://a.internal/perdure/{given}")
    ],
    "perdure.network.queues.reply_queue": lambda given: queues.reply_queue(REPLY_TASKS, given, given),
    "perdure.turns.inbox.incoming.parse_incoming": suppressing(
        lambda given: incoming.parse_incoming({"user_id": "u", "text": given, "metadata": {given: given}}),
        InvalidRequest,
    ),
    "perdure.channels.http.body.parse_object": suppressing(
        lambda given: body.parse_object(given.encode(errors="replace")), InvalidRequest
    ),
    "perdure.channels.http.parameters.parse_name": suppressing(
        lambda given: parameters.parse_name(given, "x"), NotFound
    ),
    "perdure.cli.display.printable": display.printable,
}
"""The functions that receive untrusted text, by name. A test fails if one is missing."""


def imported(module: ast.Module) -> set[str]:
    """The modules that a module imports, at its top or in a function."""
    named = {alias.name for node in ast.walk(module) if isinstance(node, ast.Import) for alias in node.names}
    return named | {node.module or "" for node in ast.walk(module) if isinstance(node, ast.ImportFrom)}


@cache
def sources() -> dict[str, ast.Module]:
    """The syntax tree of each module, by the module's name."""
    return {name: ast.parse(path.read_text(encoding="utf-8")) for name, path in modules()}


@cache
def modules_with_patterns() -> dict[str, ast.Module]:
    """The modules that match patterns or read Unicode tables."""
    return {
        name: module
        for name, module in sources().items()
        if imported(module) & {"perdure.text.patterns", "perdure.text.linear", "unicodedata"}
        or name == "perdure.text.untrusted"
    }


# Every test process imports this file. To save time, it searches the sources for the import, and does not parse them.
for _name, _path in modules():
    if "perdure.text.patterns" in _path.read_text(encoding="utf-8"):
        import_module(_name)
PATTERNS = {f"{number}: {pattern.source[:40]}": pattern for number, pattern in enumerate(patterns.REGISTERED)}


@pytest.mark.exhaustive
def test_no_pattern_over_text_from_outside_backtracks() -> None:
    """Only the modules of `MAY_IMPORT_RE` import `re`. With `re`, one message could block a worker by backtracking."""
    assert {name for name, module in sources().items() if "re" in imported(module)} == set(MAY_IMPORT_RE)
    assert [name for name, module in sources().items() if "re2" in imported(module)] == ["perdure.text.patterns"]


@pytest.mark.long
def test_every_pattern_is_registered_once() -> None:
    """No function compiles a pattern, because these tests measure only patterns that are registered at import."""
    calls = {
        (name, node.lineno)
        for name, module in sources().items()
        if name != "perdure.text.patterns"
        for function in ast.walk(module)
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
        for node in ast.walk(function)
        if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in {"compiled", "Pattern"}
    }
    assert calls == set()
    assert len(PATTERNS) > len(modules_with_patterns())


def test_every_pattern_compiles() -> None:
    """A pattern is compiled on first use: one that RE2 refuses would fail only then."""
    for pattern in PATTERNS.values():
        pattern.search("")


@pytest.mark.long
def test_every_function_over_text_is_measured() -> None:
    """In modules with patterns, each public function that takes strings is measured or in `NOT_OVER_FOREIGN_TEXT`."""
    functions = {
        f"{room}.{node.name}"
        for room, module in modules_with_patterns().items()
        for node in module.body
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_") and takes_text(node)
    }
    functions -= {"perdure.text.patterns.compiled"}  # its parameter is a pattern in the source
    assert functions - FUNCTIONS.keys() == set(NOT_OVER_FOREIGN_TEXT)


def takes_text(function: ast.FunctionDef) -> bool:
    """Whether a parameter is a string or contains strings."""
    given = [*function.args.args, *function.args.kwonlyargs]
    return any("str" in ast.unparse(each.annotation) for each in given if each.annotation is not None)


@pytest.mark.long
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_takes_time_in_proportion(name: str) -> None:
    """A function's time is linear for every kind of hostile text."""
    for kind, made in texts_for(name).items():
        assert_linear(FUNCTIONS[name], made, f"{name} of {kind}")


def texts_for(name: str) -> dict[str, Callable[[int], str]]:
    """The hostile texts for a function. A function behind the gateway gets only texts that a message can contain."""
    return STORABLE if name.startswith(("perdure.models.offline", "perdure.sessions", "perdure.memory")) else TEXTS


@pytest.mark.long
@pytest.mark.parametrize("pattern", PATTERNS.values(), ids=PATTERNS.keys())
def test_a_pattern_takes_time_in_proportion(pattern: Pattern) -> None:
    """A pattern's time is linear for hostile texts and for repetitions of its own words, which nearly match."""

    def run(given: str) -> Any:
        return (
            pattern.search(given),
            pattern.match(given),
            pattern.fullmatch(given),
            sum(1 for _ in pattern.finditer(given)),
        )

    for kind, made in {**TEXTS, **own_words(pattern)}.items():
        assert_linear(run, made, f"{pattern.source} over {kind}")


def own_words(pattern: Pattern) -> dict[str, Callable[[int], str]]:
    """Texts made of the words in a pattern."""
    words = re.findall(r"[a-zA-Z\uac00-\ud7a3]{2,}", pattern.source)
    if not words:
        return {}
    return {
        "its words": repeated(" ".join(words), " "),
        "its words without blanks": repeated(*words),
        "its first word": repeated(words[0], " "),
        "its last word": repeated(words[-1], " ", before=f"{words[0]} "),
    }


@pytest.mark.long
def test_the_measure_detects_quadratic_growth() -> None:
    """`assert_linear` fails for a quadratic function, and passes for a linear function of the same duration."""

    def quadratic(given: str) -> object:
        return re.search(r"\s+$", f"{given}x")

    with pytest.raises(AssertionError, match=r"for 10,000 characters$"):
        assert_linear(quadratic, TEXTS["spaces"], "blanks at the end")
    assert_linear(lambda given: [given.split(" ") for _ in range(200)], TEXTS["sentences"], "words")


def test_a_lone_surrogate_breaks_no_pattern() -> None:
    """In text with lone surrogates, which UTF-8 cannot encode, a pattern finds its matches at the right positions."""
    blank = Pattern("[ab]")
    given = "\ud800a\udfffb"
    assert [(found.start(), found[0]) for found in blank.finditer(given)] == [(1, "a"), (3, "b")]
    assert blank.sub(lambda found: found[0].upper(), given) == "\ud800A\udfffB"
    assert Pattern(".a").findall(given) == ["\ud800a"]


@pytest.mark.long
def test_the_repository_is_read() -> None:
    """The list of modules is not empty. With an empty list, the other tests would pass."""
    assert Path(ROOT, "perdure/text/patterns.py").exists()
    assert {"perdure.text.contradiction", "perdure.memory.recall.time_spans"} <= modules_with_patterns().keys()
