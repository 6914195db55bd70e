"""Methods as tools: what the model is told about them, and how its arguments become theirs."""

import inspect
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import FunctionType
from typing import Any, NoReturn, TypeVar, overload

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model
from pydantic.errors import PydanticUserError
from pydantic.json_schema import GenerateJsonSchema

from agentrl.errors import PluginError, ToolError
from agentrl.tools.text import shortened, whole_characters

F = TypeVar("F", bound=Callable[..., Any])

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_-]{0,63}")
_SHOWN_ERRORS = 5
"""More would teach nothing, and a call can have thousands of wrong fields."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolMethod:
    """A tool as the model sees it, and how it is called.

    `parameters` has one field for each parameter, under the parameter's name as alias.
    """

    name: str
    schema: Mapping[str, Any]
    method: str
    parameters: type[BaseModel]
    final: bool
    timeout_s: float
    max_output_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Mark:
    name: str | None
    final: bool
    timeout_s: float
    max_output_bytes: int


@overload
def tool(function: F, /) -> F: ...
@overload
def tool(
    *,
    name: str | None = None,
    final: bool = False,
    timeout_s: float = 30.0,
    max_output_bytes: int = 16_384,
) -> Callable[[F], F]: ...
def tool(
    function: Any = None,
    /,
    *,
    name: str | None = None,
    final: bool = False,
    timeout_s: float = 30.0,
    max_output_bytes: int = 16_384,
) -> Any:
    """Mark a method as a tool: sync (run in the episode's tool thread) or async.

    It needs a docstring (what the model reads) and a type hint for each parameter. A `final` tool
    ends the episode. Past `timeout_s` seconds the model is told so; output over `max_output_bytes`
    is cut with a note. Raises PluginError for anything but a plain method.
    """
    mark = _Mark(name=name, final=final, timeout_s=timeout_s, max_output_bytes=max_output_bytes)

    def marked(method: Any) -> Any:
        if not isinstance(method, FunctionType):
            raise PluginError(
                f"@tool {getattr(method, '__name__', method)}: put it on a plain method, "
                "with self, below any other decorator"
            )
        method.__agentrl_tool__ = mark  # type: ignore[attr-defined]
        return method

    return marked(function) if function is not None else marked


def tools_of(owner: type) -> dict[str, ToolMethod]:
    """The tools of a class by name, base classes first, in the order they are written.

    Raises PluginError naming the method that can't be a tool.
    """
    attributes = dict.fromkeys(a for base in reversed(owner.__mro__) for a in vars(base))
    found: dict[str, ToolMethod] = {}
    for attribute in attributes:
        value = inspect.getattr_static(owner, attribute)
        bare = value.__func__ if isinstance(value, staticmethod | classmethod) else value
        mark = getattr(bare, "__agentrl_tool__", None)
        if mark is None:
            continue
        where = f"{owner.__name__}.{attribute}"
        if bare is not value:
            raise PluginError(f"tool {where}: a tool is a plain method, with self")
        described = _describe(where, attribute, bare, mark)
        if described.name in found:
            raise PluginError(f"tool {where}: there already is a tool named {described.name!r}")
        found[described.name] = described
    return found


def arguments_of(tool: ToolMethod, raw: str) -> dict[str, Any]:
    """The call's arguments in the types of the method. Raises ToolError naming the field.

    A tool with one parameter also takes the bare value. Where a list or an object is wanted and
    JSON text of one is given, it is decoded; a text parameter keeps its text.
    """
    try:
        values: Any = json.loads(raw, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        reason = shortened(str(error), 200)
        raise ToolError(f"the arguments of {tool.name} are not JSON ({reason})") from None
    names = [f.alias or n for n, f in tool.parameters.model_fields.items()]
    if isinstance(values, str) and len(names) == 1:
        values = {names[0]: values}
    if not isinstance(values, dict):
        raise ToolError(
            f"the arguments of {tool.name} must be an object with {', '.join(names) or 'nothing'}"
        )
    checked = _validated(tool, _clean(values))
    return {f.alias or n: getattr(checked, n) for n, f in tool.parameters.model_fields.items()}


def _validated(tool: ToolMethod, values: Mapping[str, Any]) -> BaseModel:
    try:
        return tool.parameters.model_validate(values)
    except ValidationError as error:
        wrong = {str(e["loc"][0]) for e in error.errors() if e["loc"]}
        decoded = {n: _decoded(v) if n in wrong else v for n, v in values.items()}
        failure = error
    except RecursionError:
        raise ToolError(f"{tool.name}: the arguments are nested too deeply") from None
    try:
        return tool.parameters.model_validate(decoded)
    except (ValidationError, RecursionError):
        lines = [
            f"{shortened('.'.join(map(str, e['loc'])), 80)}: {shortened(e['msg'], 200)}"
            for e in failure.errors()
        ]
        more = [f"and {len(lines) - _SHOWN_ERRORS} more"] if len(lines) > _SHOWN_ERRORS else []
        raise ToolError(f"{tool.name}: {'; '.join(lines[:_SHOWN_ERRORS] + more)}") from None


def _decoded(value: Any) -> Any:
    """The list or object that a text is the JSON of; anything else as it is."""
    if not isinstance(value, str):
        return value
    try:
        inner = json.loads(value, parse_constant=_no_constant)
    except (ValueError, RecursionError):
        return value
    return inner if isinstance(inner, list | dict) else value


def _clean(value: Any) -> Any:
    """No lone surrogates in any text: a tool would fail on them, and that is the model's doing."""
    if isinstance(value, str):
        return whole_characters(value)
    if isinstance(value, list):
        return [_clean(v) for v in value]
    if isinstance(value, dict):
        return {_clean(k): _clean(v) for k, v in value.items()}
    return value


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")


class _Plain(GenerateJsonSchema):
    """JSON schema without generated titles: they only cost prompt tokens."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False


def _describe(where: str, attribute: str, method: FunctionType, mark: _Mark) -> ToolMethod:
    doc = inspect.getdoc(method)
    if not doc:
        raise PluginError(f"tool {where} has no docstring: say what it does, the model reads it")
    if inspect.isgeneratorfunction(method) or inspect.isasyncgenfunction(method):
        raise PluginError(f"tool {where} is a generator: return the whole result")
    name = mark.name or attribute
    if not _NAME.fullmatch(name):
        raise PluginError(f"tool {where}: {name!r} is no tool name (letters, digits, _ and -)")
    if mark.timeout_s <= 0 or mark.max_output_bytes <= 0:
        raise PluginError(f"tool {where}: timeout_s and max_output_bytes must be above 0")
    parameters = _parameters(where, method)
    return ToolMethod(
        name=name,
        schema=_schema(where, name, doc, parameters),
        method=attribute,
        parameters=parameters,
        final=mark.final,
        timeout_s=mark.timeout_s,
        max_output_bytes=mark.max_output_bytes,
    )


def _parameters(where: str, method: FunctionType) -> type[BaseModel]:
    """The parameters as a model. Fields are numbered: a parameter may have any name."""
    try:
        hints = inspect.get_annotations(method, eval_str=True)
    except NameError as error:
        raise PluginError(f"tool {where}: {error} in its type hints") from None
    fields: dict[str, Any] = {}
    for number, parameter in enumerate(_own(where, method)):
        if parameter.name not in hints:
            raise PluginError(f"tool {where}: parameter {parameter.name} has no type hint")
        given = parameter.default is not inspect.Parameter.empty
        default = parameter.default if given else ...
        fields[f"field_{number}"] = (hints[parameter.name], Field(default, alias=parameter.name))
    try:
        return create_model(method.__name__, __config__=ConfigDict(extra="forbid"), **fields)
    except PydanticUserError as error:
        reason = shortened(str(error), 160)
        raise PluginError(f"tool {where}: a type hint has no schema ({reason})") from None


def _own(where: str, method: FunctionType) -> Sequence[inspect.Parameter]:
    parameters = list(inspect.signature(method).parameters.values())
    if not parameters or parameters[0].name != "self":
        raise PluginError(f"tool {where}: a tool is a method, its first parameter is self")
    for parameter in parameters[1:]:
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise PluginError(f"tool {where}: {parameter} can't be filled by name; name each one")
    return parameters[1:]


def _schema(where: str, name: str, doc: str, parameters: type[BaseModel]) -> Mapping[str, Any]:
    try:
        full = parameters.model_json_schema(schema_generator=_Plain)
    except PydanticUserError as error:
        reason = shortened(str(error), 160)
        raise PluginError(f"tool {where}: a type hint has no JSON schema ({reason})") from None
    wanted = {
        "type": "object",
        "properties": full.get("properties", {}),
        "required": full.get("required", []),
        **({"$defs": full["$defs"]} if "$defs" in full else {}),
    }
    return {
        "type": "function",
        "function": {"name": name, "description": doc, "parameters": wanted},
    }
