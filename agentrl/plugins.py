"""Finds environments, sandboxes and engines: by registered name, module:Class, or file.

A name is registered by an entry point (groups `agentrl.environments`, `agentrl.sandboxes`,
`agentrl.engines`) or, for this process, by `register`. References by module or file also work in
another process: a file's folder is on the module path from its first use on, so a worker that is
started then can import it by name.
"""

import difflib
import importlib
import importlib.util
import inspect
import re
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import entry_points
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, cast

from pydantic import TypeAdapter, ValidationError, validate_call
from pydantic.errors import PydanticUserError

from agentrl.errors import ConfigError, PluginError
from agentrl.protocols import EngineClass, EnvironmentClass, SandboxProvider, Split, Tool
from agentrl.types import Problem

Kind = Literal["environment", "sandbox", "engine"]

_GROUPS: Mapping[Kind, str] = {
    "environment": "agentrl.environments",
    "sandbox": "agentrl.sandboxes",
    "engine": "agentrl.engines",
}
_registered: dict[tuple[str, str], Any] = {}


def register(kind: Kind, name: str, plugin: Any) -> None:
    """Make a plug-in known by name in this process; the same one twice is fine.

    Raises PluginError when the name is another's.
    """
    key = (_GROUPS[kind], name)
    if name in list_plugins(kind) and _registered.get(key) is not plugin:
        raise PluginError(f"there already is {_article(kind)} named {name!r}: choose another name")
    _registered[key] = plugin


def list_plugins(kind: Kind) -> Sequence[str]:
    """The registered names of a kind, sorted."""
    return registered(_GROUPS[kind])


def registered(group: str) -> Sequence[str]:
    """The names registered under an entry-point group such as `agentrl.environments`."""
    found = {point.name for point in entry_points(group=group)}
    return sorted(found | {name for own, name in _registered if own == group})


def find_environment(reference: str) -> EnvironmentClass:
    """The environment of this name, `module:Class`, or `file.py[:Class]`. Raises PluginError."""
    found = _find("environment", reference)
    missing = [part for part in ("problems", "verifier", "scripts") if not hasattr(found, part)]
    if missing:
        raise PluginError(f"environment {reference} has no {' and no '.join(missing)}")
    if not _takes_a_sandbox(found):
        raise PluginError(f"environment {reference}: it must be callable as Class(sandbox=…)")
    odd = [name for name, script in found.scripts.items() if not callable(script)]
    if odd:
        raise PluginError(f"environment {reference}: script {odd[0]} is not a function")
    return found


def tools_of(environment: EnvironmentClass) -> Sequence[Tool]:
    """The tools of an environment, from an object of it without a sandbox. Raises PluginError."""
    try:
        return tuple(environment(sandbox=None).tools)
    except ConfigError:
        raise
    except Exception as error:
        reason = f"{type(error).__name__}: {_one_line(error)}{_where(error)}"
        raise PluginError(f"the environment can't be made without a sandbox: {reason}") from error


def find_sandbox(name: str) -> type[SandboxProvider]:
    """The sandbox backend of this name. Raises PluginError."""
    return _find("sandbox", name)


AUTO = ("docker", "bwrap", "landlock")
"""What `auto` tries, strongest first."""


def open_sandboxes(
    name: str, options: Mapping[str, Any] | None = None, *, run_id: str = ""
) -> SandboxProvider:
    """The backend of this name, ready to open sandboxes; `auto` is the first of `AUTO` that works.

    A backend whose constructor takes a `run_id` marks with it what a killed run may leave.

    Raises PluginError for an unknown name, ConfigError when the backend can't work here, with what
    to install.
    """
    if name != "auto":
        return _made(name, options or {}, run_id)
    if options:
        raise ConfigError(f"sandbox.options are a backend's own: set sandbox.name to one of {AUTO}")
    reasons: list[str] = []
    for candidate in AUTO:
        try:
            return _made(candidate, {}, run_id)
        except ConfigError as error:
            reasons.append(f"{candidate}: {error}")
    raise ConfigError(f"no sandbox works on this machine: {'; '.join(reasons)}")


def _made(name: str, options: Mapping[str, Any], run_id: str) -> SandboxProvider:
    backend = find_sandbox(name)
    signature = inspect.signature(backend)
    if "run_id" in signature.parameters:
        options = {"run_id": run_id, **options}
    try:
        signature.bind(**options)
    except TypeError as error:
        raise ConfigError(f"sandbox.options of {name}: {error}") from None
    return backend(**options)


def find_engine(name: str) -> EngineClass:
    """The inference engine of this name, or `module:Class`. Raises PluginError."""
    found = _find("engine", name)
    missing = [part for part in ("sample", "released", "load", "score") if not hasattr(found, part)]
    if missing:
        raise PluginError(f"engine {name} has no {' and no '.join(missing)}")
    return found


def check_options(plugin: Any, options: Mapping[str, Any], *, where: str) -> None:
    """Hold `where` (such as engine.options) against the keyword parameters of a plug-in's class.

    Raises ConfigError: an option that it does not have, or of another type.
    """
    parameters = inspect.signature(plugin).parameters
    own = [n for n, p in parameters.items() if p.kind is p.KEYWORD_ONLY]
    for option, value in options.items():
        if option not in own:
            raise ConfigError(f"{where}.{option}: unknown option; {_hint(option, own)}")
        try:
            TypeAdapter(parameters[option].annotation).validate_python(value, strict=True)
        except ValidationError as error:
            raise ConfigError(f"{where}.{option}: {error.errors()[0]['msg']}") from None


def problems_of(
    environment: EnvironmentClass,
    split: Split,
    options: Mapping[str, Any],
    limit: int | None = None,
) -> Sequence[Problem]:
    """The problems of a split; options are checked against the parameters of `problems`.

    Raises ConfigError: unknown or wrong options, no problem at all, an id used twice.
    PluginError: `problems` is not a function of a split that gives Problems.
    """
    function: Any = environment.problems
    parameters = list(inspect.signature(function).parameters)
    if parameters[:1] != ["split"]:
        raise PluginError(
            "`problems` must be a static or class method whose first parameter is split"
        )
    for option in options:
        if option not in parameters[1:]:
            raise ConfigError(
                f"environment.options.{option}: unknown option; {_hint(option, parameters[1:])}"
            )
    found = _called(function, split, options, limit)
    if not found:
        raise ConfigError(f"the environment has no {split} problems with these options")
    odd = next((p for p in found if not isinstance(p, Problem)), None)
    if odd is not None:
        raise PluginError(f"`problems` gave a {type(odd).__name__}: give problem(…)s")
    twice = len(found) - len({problem.task.id for problem in found})
    if twice:
        raise ConfigError(f"{twice} {split} problems repeat the id of another; give each its own")
    return cast(Sequence[Problem], found)


def _called(
    function: Any, split: Split, options: Mapping[str, Any], limit: int | None
) -> Sequence[Any]:
    try:
        return tuple(islice(validate_call(function)(split, **options), limit))
    except ValidationError as error:
        lines = [f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors()]
        raise ConfigError(f"environment.options: {'; '.join(lines)}") from None
    except PydanticUserError as error:
        raise PluginError(
            f"`problems`: a type hint can't be checked ({_one_line(error)})"
        ) from None
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(f"environment.options: {_one_line(error)}") from error
    except Exception as error:
        raise PluginError(
            f"`problems` raised {type(error).__name__}: {_one_line(error)}"
        ) from error


def _find(kind: Kind, reference: str) -> Any:
    group, known = _GROUPS[kind], list_plugins(kind)
    if (group, reference) in _registered:
        return _registered[group, reference]
    path, name = _split(reference)
    try:
        if path.endswith(".py"):
            return _member(_module_of(Path(path).expanduser()), name, reference)
        if name:
            return _member(importlib.import_module(path), name, reference)
        for point in entry_points(group=group):
            if point.name == reference:
                return point.load()
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:
        reason = f"{type(error).__name__}: {_one_line(error)}"
        raise PluginError(f"{reference} does not import: {reason}{_where(error)}") from error
    plural = group.rpartition(".")[2]
    hint = _hint(reference, known, f"known {plural}")
    raise PluginError(f"there is no {kind} {reference!r}; {hint}")


def _split(reference: str) -> tuple[str, str]:
    """Path or module, and the name behind the last colon ("" without one)."""
    path, colon, name = reference.rpartition(":")
    return (path, name) if colon and name.isidentifier() else (reference, "")


def _module_of(path: Path) -> ModuleType:
    """Import a file by its stem, from its own folder. Raises PluginError if it can't be that."""
    path = path.resolve()
    if not path.is_file():
        raise PluginError(f"{path}: no such file")
    if not re.fullmatch(r"[^\W\d][\w-]*", path.stem):
        raise PluginError(f"{path}: a module's file name has letters, digits and _ only; rename it")
    folder = str(path.parent)
    added = folder not in sys.path
    if added:
        sys.path.append(folder)
    try:
        importlib.invalidate_caches()
        _check_free(path)
        return importlib.import_module(path.stem)
    except BaseException:
        if added:
            sys.path.remove(folder)
        raise


def _check_free(path: Path) -> None:
    """Raise PluginError if importing the stem would give another module than this file."""
    loaded = sys.modules.get(path.stem)
    spec = loaded.__spec__ if loaded else importlib.util.find_spec(path.stem)
    origin = spec.origin if spec else getattr(loaded, "__file__", None)
    if origin is None or not Path(origin).exists() or Path(origin).resolve() != path:
        raise PluginError(f"{path}: {path.stem} already names the module {origin}; rename the file")


def _member(module: ModuleType, name: str, reference: str) -> Any:
    if name:
        if not hasattr(module, name):
            raise PluginError(f"{reference}: the module has no {name}")
        return getattr(module, name)
    own = {name: value for name, value in vars(module).items() if _is_environment(value, module)}
    if len(own) != 1:
        names = ", ".join(own) or "nothing with `problems` and `verifier`"
        raise PluginError(f"{reference} holds {names}: name one as file.py:Class")
    return next(iter(own.values()))


def _is_environment(value: Any, module: ModuleType) -> bool:
    """Whether it is an environment of this module's own (a class, or an object such as
    `from_gymnasium` makes), not one that it imports."""
    if inspect.isclass(value) and value.__module__ != module.__name__:
        return False
    return callable(value) and hasattr(value, "problems") and hasattr(value, "verifier")


def _takes_a_sandbox(found: Any) -> bool:
    try:
        inspect.signature(found).bind(sandbox=None)
    except (TypeError, ValueError):
        return False
    return True


def _where(error: BaseException) -> str:
    """The innermost line that raised, to be looked up: "" where a message has it already."""
    trace = error.__traceback__
    if isinstance(error, SyntaxError) or trace is None:
        return ""
    while trace.tb_next is not None:
        trace = trace.tb_next
    file = trace.tb_frame.f_code.co_filename
    return "" if file.startswith("<") else f" ({file}:{trace.tb_lineno})"


def _hint(name: str, known: Sequence[str], label: str = "known") -> str:
    near = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {near[0]}?" if near else f"{label}: {', '.join(known) or 'none'}"


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())


def _article(kind: Kind) -> str:
    return f"{'a' if kind == 'sandbox' else 'an'} {kind}"
