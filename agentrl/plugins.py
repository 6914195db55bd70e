"""Finds environments, sandboxes and engines: by registered name, module:Class, or file."""

import difflib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import entry_points
from itertools import islice
from pathlib import Path
from typing import Any

from pydantic import ValidationError, validate_call

from agentrl.errors import ConfigError, PluginError
from agentrl.protocols import EnvironmentClass, SandboxProvider, Split
from agentrl.types import Problem


def find_environment(reference: str) -> EnvironmentClass:
    """The environment of this name, `module:Class`, or `file.py[:Class]`. Raises PluginError."""
    found = _find("agentrl.environments", reference)
    missing = [part for part in ("problems", "verifier", "scripts") if not hasattr(found, part)]
    if missing:
        raise PluginError(f"environment {reference} has no {' and no '.join(missing)}")
    return found


def find_sandbox(name: str) -> type[SandboxProvider]:
    """The sandbox backend of this name; `auto` is bubblewrap. Raises PluginError."""
    return _find("agentrl.sandboxes", "bwrap" if name == "auto" else name)


def registered(group: str) -> Sequence[str]:
    """The names registered under an entry-point group such as `agentrl.environments`."""
    return sorted({point.name for point in entry_points(group=group)})


def problems_of(
    environment: EnvironmentClass,
    split: Split,
    options: Mapping[str, Any],
    limit: int | None = None,
) -> Sequence[Problem]:
    """The problems of a split; options are checked against the parameters of `problems`.

    Raises ConfigError: unknown or wrong options, no problem at all, an id used twice.
    """
    function = environment.problems
    known = [p for p in inspect.signature(function).parameters if p != "split"]
    for option in options:
        if option not in known:
            near = difflib.get_close_matches(option, known, n=1)
            hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(known) or 'none'}"
            raise ConfigError(f"environment.options.{option}: unknown option; {hint}")
    try:
        found = tuple(islice(validate_call(function)(split, **options), limit))
    except ValidationError as error:
        lines = [f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors()]
        raise ConfigError(f"environment.options: {'; '.join(lines)}") from None
    if not found:
        raise ConfigError(f"the environment has no {split} problems with these options")
    twice = len(found) - len({problem.task.id for problem in found})
    if twice:
        raise ConfigError(f"{twice} {split} problems repeat the id of another; give each its own")
    return found


def _find(group: str, reference: str) -> Any:
    path, _, name = reference.partition(":")
    try:
        if path.endswith(".py"):
            return _member(_module_of(Path(path)), name, reference)
        if name:
            return _member(importlib.import_module(path), name, reference)
        for point in entry_points(group=group):
            if point.name == reference:
                return point.load()
    except ConfigError:
        raise
    except Exception as error:
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise PluginError(f"{reference} does not import: {reason}") from error
    kind = group.rpartition(".")[2]
    near = difflib.get_close_matches(reference, registered(group), n=1)
    hint = f"did you mean {near[0]}?" if near else f"known {kind}: {', '.join(registered(group))}"
    raise PluginError(f"there is no {kind[:-1]} {reference!r}; {hint}")


def _module_of(path: Path) -> Any:
    if not path.exists():
        raise PluginError(f"{path}: no such file")
    path = path.resolve()
    loaded = sys.modules.get(path.stem)
    if loaded is not None and getattr(loaded, "__file__", None) == str(path):
        return loaded
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise PluginError(f"{path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def _member(module: Any, name: str, reference: str) -> Any:
    if name:
        if not hasattr(module, name):
            raise PluginError(f"{reference}: the module has no {name}")
        return getattr(module, name)
    own = [
        value
        for value in vars(module).values()
        if inspect.isclass(value) and value.__module__ == module.__name__ and
        hasattr(value, "problems")
    ]  # fmt: skip
    if len(own) != 1:
        raise PluginError(f"{reference} holds {len(own)} environments: name one as file.py:Class")
    return own[0]
