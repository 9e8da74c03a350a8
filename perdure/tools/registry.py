"""`@tool`: makes a tool from a function with type hints and a docstring.

A tool declares how the engine proceeds if a crash leaves the outcome of a call unknown: `pure` (repeat), `idempotent`
(repeat with the same id) or `unsafe` (do not repeat; call the tool's probe, or report to the model that the outcome is
unknown). A tool also declares whether its calls need a person's approval, and whose.

No tool can make a session's turns fail: arguments are parsed strictly, results are made storable and cut to a maximum
length, and every exception becomes a `ToolError`, whose message the model receives.
"""

from __future__ import annotations

import inspect
import json
import logging
import sys
import threading
import types
import typing
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final, Generic, Literal, cast, overload
from uuid import UUID

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model
from pydantic.errors import PydanticUserError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails, PydanticUndefined, SchemaError
from typing_extensions import ParamSpec, TypeVar

from perdure.errors import OutcomeUnknown, PerdureError, SettingsError, ToolError
from perdure.models.protocol import ToolSchema
from perdure.models.providers.wire_names import WireKeys
from perdure.models.schemas import WithoutTitles
from perdure.text import declarations, untrusted
from perdure.text.patterns import compiled
from perdure.tools import around, event_loop
from perdure.tools.docstring import describe
from perdure.tools.progress import Report, report
from perdure.tools.results import Attach, described
from perdure.tools.variables import WorkingVariables

if TYPE_CHECKING:
    from perdure.memory.recall.agent_memory import OwnMemory
    from perdure.timetable.user_reminders import UserReminders

log = logging.getLogger(__name__)

MAX_RESULT_CHARS = 32_000
"""The default of a tool's `max_result_chars`: the most characters of a result in the transcript."""

_NAME = compiled(r"[a-zA-Z0-9_-]{1,64}")
_NAMES = "1 to 64 of a-z, A-Z, 0-9, _ and -"
_FIELD = "argument_"
"""Prefix of the pydantic model's fields. Without the prefix, no parameter could be named `copy` or `_x`."""


_WITHOUT_ANY = 2
"""The value of `sys.flags.optimize` with which Python removes all docstrings."""

Deps = TypeVar("Deps", default=Any)
"""The type of an agent's dependencies."""

P = ParamSpec("P", default=...)
R = TypeVar("R", default=Any)
"""The parameters and the result of a tool's function."""

EffectName = Literal["pure", "idempotent", "unsafe"]


class Effect(StrEnum):
    """The kind of a tool's side effect, which decides whether a call with an unknown outcome is repeated.

    Example:
        >>> @tool(effect=Effect.PURE)  # or effect="pure"
        ... def price(item: str) -> str:
        ...     '''Look up the price of an item.'''
        ...     return "3 euros"
        >>> price.effect is Effect.PURE
        True
    """

    PURE = "pure"
    IDEMPOTENT = "idempotent"
    UNSAFE = "unsafe"


@dataclass(frozen=True, slots=True)
class ToolContext(Generic[Deps]):
    """The context of a call. The engine passes it to the parameter that is annotated with this class.

    `deps` is what the agent's function `deps` made for this run of the turn. The annotation `ToolContext[Shop]` gives
    it a type.

    `effect_id` is the idempotency key, which is the same for every attempt at a call. `cancelled` is set when the turn
    no longer needs the result: it is cancelled, or the call has exceeded its time limit. `metadata` is the metadata of
    the user's message. `working_variables` persist until the session ends. `memory` accesses the user's memories, and
    `reminders` the user's schedules; each is None in a process that has no such access. Users of two tenants may have
    the same `user_id`, so a tool that stores data by user must use `tenant` and `user_id` as the key. `progress` tells
    those who follow the turn how far the call is.

    Example:
        >>> @tool(effect="idempotent")
        ... def order(item: str, context: ToolContext) -> str:
        ...     '''Order an item.'''
        ...     return f"{item} for {context.user_id}"  # pass `context.effect_id` to the shop as its idempotency key
        >>> shop = Agent("shop", "You sell tea.", tools=[order])
        >>> ask(shop, "Tea!", model=Scripted(call("order", item="tea"), "Ordered."), user_id="ana").calls[0].result
        'tea for ana'
    """

    user_id: str
    session_id: UUID
    turn_id: UUID
    effect_id: UUID
    channel: str
    cancelled: threading.Event
    working_variables: WorkingVariables = field(default_factory=WorkingVariables, compare=False)
    memory: OwnMemory | None = field(default=None, compare=False)
    tenant: str | None = None
    reminders: UserReminders | None = field(default=None, compare=False)
    metadata: Mapping[str, Any] = field(default_factory=dict, compare=False)
    attach: Attach | None = field(default=None, compare=False)
    """Stores a file and returns the line that describes it; the engine calls it for each `File` that a tool returns."""
    deps: Deps = field(default=cast("Deps", None), compare=False)
    report: Report | None = field(default=None, compare=False)
    """Takes the reports of `progress`; `None`: they are dropped."""

    def progress(self, text: object) -> None:
        """Report the progress of the call, such as `3 of 9`, to those who follow the turn; see `tools.progress`."""
        report(self.report, text)


@dataclass(frozen=True, slots=True)
class Happened:
    """A probe's answer: the effect took place, with this result.

    Example:
        >>> payments = {}  # by idempotency key
        >>> def was_paid(context: ToolContext) -> Happened | DidNotHappen:
        ...     paid = payments.get(context.effect_id)
        ...     return DidNotHappen() if paid is None else Happened(f"Paid {paid} cents.")
        >>> @tool(probe=was_paid)
        ... def pay(amount: int, context: ToolContext) -> str:
        ...     '''Pay an amount in cents.'''
        ...     payments[context.effect_id] = amount
        ...     return f"Paid {amount} cents."
        >>> pay.probe is was_paid
        True
    """

    result: str


@dataclass(frozen=True, slots=True)
class DidNotHappen:
    """A probe's answer: the effect did not and will not take place, so calling again is safe.

    Example:
        >>> orders = {}  # by idempotency key
        >>> def was_ordered(context: ToolContext) -> Happened | DidNotHappen:
        ...     return Happened("Ordered.") if context.effect_id in orders else DidNotHappen()
        >>> @tool(probe=was_ordered)
        ... def order(item: str, context: ToolContext) -> str:
        ...     '''Order an item.'''
        ...     orders[context.effect_id] = item
        ...     return "Ordered."
        >>> order.probe is was_ordered
        True
    """


@dataclass(frozen=True, slots=True)
class Unknown:
    """A probe's answer: the outcome cannot be determined.

    Example:
        >>> def was_sent(context: ToolContext) -> Unknown:
        ...     return Unknown()  # the mail server keeps no record
        >>> @tool(probe=was_sent)
        ... def mail(text: str) -> str:
        ...     '''Send an e-mail to the user.'''
        ...     return "Sent."
        >>> mail.probe is was_sent
        True
    """


ProbeOutcome = Happened | DidNotHappen | Unknown
Probe = Callable[[ToolContext], ProbeOutcome | Awaitable[ProbeOutcome]]
Approval = bool | Callable[[Mapping[str, Any]], bool]
"""Whether calls need a person's approval: True, False, or a function of the arguments by name."""

USER: Final = "user"
STAFF: Final = "staff"
"""Who approves a call: the user of the turn (or staff for the user), or only staff."""

Approver = Literal["user", "staff"] | Callable[[Mapping[str, Any]], object]
"""Who approves calls: `user`, `staff`, or a function of the arguments by name that returns one of them.

The function may also return True for `user`, and False for `staff`.
"""


class Approvable:
    """What the tools share whose calls a person may have to approve."""

    __slots__ = ()

    name: str
    requires_approval: Approval
    approver: Approver

    def needs_approval(self, arguments: Mapping[str, Any]) -> bool:
        """Whether a call needs approval; True if `requires_approval` is a function that raises."""
        if not callable(self.requires_approval):
            return self.requires_approval
        try:
            with around.surrounded(f"the requires_approval of {self.name}"):
                return bool(self.requires_approval(around.copied(arguments)))
        except untrusted.OF_AUTHORS:
            log.exception("the requires_approval of tool %s failed, so the call needs approval", self.name)
            return True

    def approver_of(self, arguments: Mapping[str, Any]) -> str:
        return who_approves(self.name, self.approver, arguments)


@dataclass(frozen=True, slots=True, eq=False)
class Tool(Approvable, Generic[P, R]):
    """A function that a model may call, `def` or `async def`. Make one with `@tool`.

    `parameters` is a JSON schema of type object. `timeout_s`, in seconds, overrides `PERDURE_TURN__TOOL_TIMEOUT_S`.
    `probe` finds out whether a call with an unknown outcome took effect. `breaker` names the service that the tool
    calls: the circuit breaker is `tool:` followed by this name. Several tools may use one breaker.
    """

    waits_for: ClassVar[None] = None

    name: str
    description: str
    parameters: Mapping[str, Any]
    effect: Effect
    timeout_s: float | None
    probe: Probe | None
    function: Callable[P, R]
    max_result_chars: int
    requires_approval: Approval
    approver: Approver
    breaker: str | None
    _arguments: type[BaseModel]
    _context_parameter: str | None
    _keys: WireKeys = field(init=False)
    _schema: ToolSchema = field(init=False)

    def __post_init__(self) -> None:
        keys = WireKeys(self.parameters)
        object.__setattr__(self, "_keys", keys)
        object.__setattr__(self, "_schema", ToolSchema(self.name, self.description, keys.schema))

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Call the undecorated function, for unit tests."""
        return self.function(*args, **kwargs)

    def schema(self) -> ToolSchema:
        return self._schema

    def parse(self, arguments: str) -> dict[str, Any]:
        """Check the arguments that a model wrote against the function's signature.

        Returns the arguments by name, converted to the types of the signature and completed with its defaults.

        Raises:
            ToolError: `arguments` is empty or not a strict JSON object, or does not match the signature. The message
                names the problem and the schema.
        """
        try:
            # As JSON, of which a strict type accepts the text of a date or the array of a tuple.
            model = self._arguments.model_validate_json(json.dumps(self.load(arguments)))
            return {name.removeprefix(_FIELD): _held(model, name) for name in self._arguments.model_fields}
        except ValidationError as error:
            problems = [_problem(item) for item in error.errors(include_url=False, include_context=False)]
            raise self._refusal("; ".join(problems)) from None
        except (ValueError, OverflowError) as error:
            raise self._refusal(str(error)) from None
        except ToolError:  # raised by a validator
            raise
        except untrusted.OF_AUTHORS as error:
            log.exception("a validator of the arguments of tool %s failed, so they are refused", self.name)
            raise self._refusal(untrusted.error_summary(error)) from None

    def load(self, arguments: str) -> dict[str, Any]:
        """The JSON values that a model wrote, by the names of the arguments. They are not checked.

        Raises:
            ValueError: see `load_arguments`.
        """
        return self._keys.from_wire(load_arguments(arguments, self.parameters))

    def call(self, arguments: Mapping[str, Any], context: ToolContext) -> str:
        """Run the function with arguments from `parse`, and render its result for the model.

        Raises:
            ToolError: the function failed, or its result has no JSON form; the message is for the model.
            OutcomeUnknown: the function raised it, or the call was cancelled while it ran; the call may or may not have
                taken effect.
        """
        injected: dict[str, Any] = {self._context_parameter: context} if self._context_parameter else {}
        try:
            result = event_loop.call(
                f"the tool {self.name}",
                partial(self.function, **arguments, **injected),
                context.cancelled.is_set,
            )
        except event_loop.CoroutineCancelled as error:
            if error.unwanted:
                raise OutcomeUnknown("The call was cancelled while it ran.") from error
            raise ToolError("The call was cancelled.") from error
        except OutcomeUnknown as error:
            raise OutcomeUnknown(untrusted.storable(untrusted.cut(error.message, self.max_result_chars))) from error
        except ToolError as error:
            raise ToolError(untrusted.storable(untrusted.cut(error.message, self.max_result_chars))) from error
        # Includes SystemExit: a tool that calls the main() of a command-line program must not end the worker's thread.
        except (Exception, SystemExit) as error:
            raise ToolError(untrusted.error_summary(error)) from error
        try:
            return untrusted.dump(described(result, context.attach, self.max_result_chars), self.max_result_chars)
        except PerdureError as error:
            raise ToolError(f"The tool {self.name} ran, but its file cannot be stored: {error.message}") from error
        except ValueError as error:
            raise ToolError(
                f"The tool {self.name} ran, but its result of type {type(result).__name__} cannot be shown: {error}"
            ) from error

    def _refusal(self, reason: str) -> ToolError:
        return refusal_of(f"The arguments of {self.name} were refused", reason, self._keys.schema)


def _held(arguments: BaseModel, name: str) -> Any:
    """An argument. What a model gave for an `Iterable` becomes a list: pydantic's iterator could be read only once."""
    value = getattr(arguments, name)
    return list(value) if isinstance(value, Iterator) and name in arguments.model_fields_set else value


@overload
def tool(function: Callable[P, R], /) -> Tool[P, R]: ...


@overload
def tool(
    *,
    effect: Effect | EffectName = Effect.UNSAFE,
    name: str | None = None,
    timeout_s: float | None = None,
    probe: Probe | None = None,
    max_result_chars: int = MAX_RESULT_CHARS,
    requires_approval: Approval = False,
    approver: Approver = USER,
    breaker: str | None = None,
) -> Callable[[Callable[P, R]], Tool[P, R]]: ...


def tool(
    function: Callable[..., Any] | None = None,
    /,
    *,
    effect: Effect | EffectName = Effect.UNSAFE,
    name: str | None = None,
    timeout_s: float | None = None,
    probe: Probe | None = None,
    max_result_chars: int = MAX_RESULT_CHARS,
    requires_approval: Approval = False,
    approver: Approver = USER,
    breaker: str | None = None,
) -> Tool[..., Any] | Callable[[Callable[..., Any]], Tool[..., Any]]:
    """Make a tool from a function with type hints and a docstring: `@tool` or `@tool(effect="pure")`.

    The docstring's text becomes the description. Its `Args:` section (Google style) describes the parameters. The
    engine passes the context to a parameter annotated `ToolContext`. A call waits for a person's approval if
    `requires_approval` is True, or is a function that returns True for the arguments; `approver` says whose approval.
    If `breaker` is NAME, calls pass the circuit breaker `tool:NAME`.

    Raises:
        SettingsError: the function cannot be a tool; the message gives the reason.

    Example:
        >>> @tool(effect="pure", timeout_s=5)
        ... def weather(city: str) -> str:
        ...     '''Say what the weather is like.
        ...
        ...     Args:
        ...         city: The city's name in English.
        ...     '''
        ...     return f"Rain in {city}."
        >>> weather("Paris")
        'Rain in Paris.'
        >>> weather.description, weather.parameters["properties"]["city"]["description"]
        ('Say what the weather is like.', "The city's name in English.")
    """

    def make(given: Callable[..., Any]) -> Tool:
        if not (inspect.isfunction(given) or inspect.ismethod(given)):
            raise SettingsError(f"the tool {declarations.shown(given)} is not a function; {_instead_of(given)}")
        owner, chosen = _owner(given), name if name is not None else given.__name__
        if not declarations.matches(chosen, _NAME):
            raise _unfit(given, f"is named {declarations.shown(chosen)}; accepted: {_NAMES}")
        require_effect(owner, effect)
        is_time = timeout_s is None or declarations.is_seconds(timeout_s)
        declarations.require(is_time, owner, "timeout_s", timeout_s, f"{declarations.SECONDS}, or None")
        require_max_result_chars(owner, max_result_chars)
        if inspect.isgeneratorfunction(given) or inspect.isasyncgenfunction(given):
            raise _unfit(given, "is a generator; return one value instead")
        require_probe(owner, probe)
        require_approval(owner, requires_approval, approver)
        is_breaker = breaker is None or declarations.matches(breaker, _NAME)
        declarations.require(is_breaker, owner, "breaker", breaker, _NAMES)
        described = describe(given.__doc__)
        if not described.description:
            raise _unfit(given, _undescribed())
        arguments, context_parameter = _signature(given, described.arguments)
        return Tool(
            name=chosen,
            description=described.description,
            parameters=_json_schema(given, arguments),
            effect=Effect(effect),
            timeout_s=timeout_s,
            probe=probe,
            function=given,
            max_result_chars=max_result_chars,
            requires_approval=requires_approval,
            approver=approver,
            breaker=breaker,
            _arguments=arguments,
            _context_parameter=context_parameter,
        )

    return make if function is None else make(function)


def load_arguments(arguments: str, parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Parse the arguments that a model wrote for a tool with the JSON schema `parameters`.

    Some servers send an empty text for a tool without parameters. For any other tool, an empty text may be what is left
    of arguments that were lost, and does not mean the defaults.

    Raises:
        ValueError: `arguments` is empty, or not a strict JSON object; see `untrusted.load_object`.
    """
    if not arguments.strip() and any(parameters.get(each) for each in _PARAMETERS):
        raise ValueError("they are empty")
    return untrusted.load_object(arguments)


_PARAMETERS = "properties", "required", "additionalProperties", "patternProperties", "$ref", "allOf", "anyOf", "oneOf"
"""The members of a JSON schema that describe parameters."""


def who_approves(tool: str, declared: Approver, arguments: Mapping[str, Any]) -> str:
    """Who approves a call of `tool` according to `declared`; `staff` if a function fails or returns anything else."""
    if not callable(declared):
        return declared
    try:
        with around.surrounded(f"the approver of {tool}"):
            found = declared(around.copied(arguments))
    except untrusted.OF_AUTHORS:
        log.exception("the approver of tool %s failed, so staff approves the call", tool)
        return STAFF
    if found is True or found == USER:
        return USER
    if found is not False and found != STAFF:
        log.warning("the approver of tool %s returned a %s, so staff approves the call", tool, type(found).__name__)
    return STAFF


def refusal_of(outcome: str, reason: str, schema: Mapping[str, Any]) -> ToolError:
    """The refusal of arguments that do not fit `schema`. `outcome` begins it, such as `Not asked`."""
    expected = json.dumps(schema, ensure_ascii=False)
    return ToolError(
        f"{outcome}: {untrusted.storable(untrusted.cut(reason, 2_000))}. "
        f"Expected a JSON object that fits this schema: {untrusted.cut(expected, 4_000)}"
    )


def require_name(owner: str, name: object) -> None:
    """Raise `SettingsError` unless providers accept `name` as a tool's. `owner` is what declares it."""
    declarations.require(declarations.matches(name, _NAME), owner, "name", name, _NAMES)


def require_effect(owner: str, effect: object) -> None:
    """Raise `SettingsError` unless `effect` is one, or the name of one."""
    if effect not in [*Effect]:
        raise SettingsError(f"{owner} declares the effect {declarations.shown(effect)}; accepted: {', '.join(Effect)}")


def require_probe(owner: str, probe: object) -> None:
    """Raise `SettingsError` unless `probe` may be called with a call's context."""
    fits = probe is None or declarations.takes_one(probe)
    declarations.require(fits, owner, "probe", probe, "a function with one parameter, or None")


def require_max_result_chars(owner: str, given: object) -> None:
    """Raise `SettingsError` unless `given` is a number of characters."""
    declarations.require(declarations.is_count(given), owner, "max_result_chars", given, declarations.COUNT)


def require_approval(owner: str, requires_approval: object, approver: object) -> None:
    """Raise `SettingsError` unless a tool's declarations about approval are valid, and fit each other."""
    is_approval = isinstance(requires_approval, bool) or callable(requires_approval)
    declarations.require(is_approval, owner, "requires_approval", requires_approval, "True, False or a function")
    is_approver = callable(approver) or (isinstance(approver, str) and approver in (USER, STAFF))
    declarations.require(is_approver, owner, "approver", approver, "'user', 'staff' or a function")
    for name, given in (("requires_approval", requires_approval), ("approver", approver)):
        if inspect.iscoroutinefunction(given):
            raise SettingsError(f"{owner} has an async function as {name}; accepted: a plain def")
    if approver != USER and requires_approval is False:
        shown = declarations.shown(approver)
        raise SettingsError(f"{owner} has approver={shown} and needs no approval; add requires_approval")


def _instead_of(given: object) -> str:
    """What an author writes in place of a value that is not a function."""
    if isinstance(given, staticmethod | classmethod):
        return "write @staticmethod above @tool" if isinstance(given, staticmethod) else _BOUND
    if isinstance(given, Tool):
        return "it is a tool already"
    if callable(given) and not isinstance(given, type):
        return "write a function (def or async def) that calls it"
    return "accepted: a function (def or async def) or a bound method"


_BOUND = "make the tool of the bound method, such as tool(shop.order)"


def _owner(function: Callable[..., Any]) -> str:
    return f"the tool {function.__module__}.{function.__qualname__}"


def _undescribed() -> str:
    why = "has no docstring, and a model chooses a tool by its description"
    if sys.flags.optimize < _WITHOUT_ANY:
        return why
    return f"{why}; Python removes docstrings with -OO and PYTHONOPTIMIZE=2: start it without, or with -O"


def _unfit(function: Callable[..., Any], why: str) -> SettingsError:
    return SettingsError(f"{_owner(function)} {why}")


def _signature(function: Callable[..., Any], descriptions: Mapping[str, str]) -> tuple[type[BaseModel], str | None]:
    """A pydantic model of the parameters, and the name of the parameter that receives the context."""
    try:
        hints = typing.get_type_hints(function, include_extras=True)
    except (NameError, AttributeError, TypeError, SyntaxError) as error:
        raise _unfit(
            function, f"has an annotation that cannot be resolved ({error}); import it at the module's top level"
        ) from error
    context_parameters: list[str] = []
    fields: dict[str, Any] = {}
    for position, parameter in enumerate(inspect.signature(function).parameters.values()):
        _check_parameter(function, parameter, position)
        annotation = hints[parameter.name]
        if _is_context(annotation):
            context_parameters.append(parameter.name)
            continue
        default = ... if parameter.default is parameter.empty else parameter.default
        if isinstance(default, FieldInfo):
            annotation, default = Annotated[annotation, default], PydanticUndefined
        told: dict[str, Any] = {"description": descriptions[parameter.name]} if parameter.name in descriptions else {}
        fields[_FIELD + parameter.name] = (annotation, Field(default, alias=parameter.name, **told))
    if len(context_parameters) > 1:
        raise _unfit(function, f"has two parameters of type ToolContext: {', '.join(context_parameters)}")
    config = ConfigDict(extra="forbid", allow_inf_nan=False)
    try:
        model: type[BaseModel] = create_model(function.__name__, __config__=config, **fields)
    except (PydanticUserError, SchemaError, TypeError) as error:
        raise _unfit(
            function, f"has {_culprit(fields, config)} that pydantic cannot check: {declarations.reason(error)}"
        ) from error
    return model, next(iter(context_parameters), None)


def _is_context(annotation: Any) -> bool:
    """Whether the annotation is `ToolContext`, perhaps with the type of `deps`, `Annotated`, an alias, or `| None`."""
    origin = typing.get_origin(annotation)
    if hasattr(origin or annotation, "__value__"):  # an alias that the statement `type` has made
        return _is_context((origin or annotation).__value__)
    if origin is Annotated:
        return _is_context(annotation.__origin__)
    if origin in {typing.Union, types.UnionType}:
        members = [each for each in typing.get_args(annotation) if each is not types.NoneType]
        return len(members) == 1 and _is_context(members[0])
    return (origin or annotation) is ToolContext


def _culprit(fields: Mapping[str, Any], config: ConfigDict) -> str:
    """The first parameter of which pydantic makes no schema."""
    for name, field_ in fields.items():
        try:
            create_model("one", __config__=config, **{name: field_}).model_json_schema(schema_generator=WithoutTitles)
        except (PydanticUserError, SchemaError, TypeError):
            return f"the parameter {name.removeprefix(_FIELD)}"
    return "a parameter"


def _check_parameter(function: Callable[..., Any], parameter: inspect.Parameter, position: int) -> None:
    match parameter.kind:
        case inspect.Parameter.VAR_POSITIONAL | inspect.Parameter.VAR_KEYWORD:
            raise _unfit(function, f"takes {parameter}; a model needs to know each parameter by name")
        case inspect.Parameter.POSITIONAL_ONLY:
            raise _unfit(function, f"has the positional-only parameter {parameter.name}; arguments come by name")
        case inspect.Parameter.POSITIONAL_OR_KEYWORD | inspect.Parameter.KEYWORD_ONLY:
            if parameter.annotation is parameter.empty and position == 0 and parameter.name in {"self", "cls"}:
                raise _unfit(function, f"is a method; {_BOUND}")
            if parameter.annotation is parameter.empty:
                raise _unfit(function, f"has the parameter {parameter.name} without a type annotation")


def _json_schema(function: Callable[..., Any], arguments: type[BaseModel]) -> dict[str, Any]:
    try:
        schema = arguments.model_json_schema(schema_generator=WithoutTitles)
    except PydanticUserError as error:
        fields = {name: (each.annotation, each) for name, each in arguments.model_fields.items()}
        culprit = _culprit(fields, arguments.model_config)
        raise _unfit(function, f"has {culprit} without a JSON schema: {declarations.reason(error)}") from error
    schema.pop("title", None)
    schema.setdefault("properties", {})
    return schema


def _problem(item: ErrorDetails) -> str:
    where = untrusted.member_path(item)
    match item["type"]:
        case "missing":
            return f"{where} is missing"
        case "extra_forbidden":
            return f"{where} is not a parameter"
        case _:
            message = item["msg"]
            return f"{where}: {message[:1].lower()}{message[1:]}"
