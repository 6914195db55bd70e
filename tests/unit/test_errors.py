"""Errors cross process borders whole, and are what a caller would expect."""

import inspect
import pickle

import pytest

from agentrl import errors
from agentrl.errors import AgentRLError, ConfigError, Fault, SandboxLost, ToolError, TrainingError

KINDS = [kind for kind in vars(errors).values() if inspect.isclass(kind)]
BUILTINS = {
    "ToolError": ValueError,
    "SandboxLost": RuntimeError,
    "Fault": RuntimeError,
    "SandboxFault": ConnectionError,
    "EngineFault": RuntimeError,
    "EnvironmentFault": RuntimeError,
    "VerifierFault": RuntimeError,
    "RequestError": ValueError,
    "ContextFull": ValueError,
    "OutOfTurns": ValueError,
    "ConfigError": ValueError,
    "PluginError": ImportError,
    "RecordError": ValueError,
    "TrainingError": RuntimeError,
    "NoSignal": RuntimeError,
    "TooManyFaults": RuntimeError,
    "NonFiniteLoss": ArithmeticError,
    "WeightsNotApplied": RuntimeError,
}


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("message", ["plain", "größer 🙂", "", "with: 'quotes' {braces} %s"])
def test_every_error_pickles_with_its_message(kind: type[AgentRLError], message: str) -> None:
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        copy = pickle.loads(pickle.dumps(kind(message), protocol=protocol))
        assert type(copy) is kind
        assert str(copy) == message and copy.args == (message,)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_every_error_is_ours_and_a_fitting_builtin(kind: type[AgentRLError]) -> None:
    assert issubclass(kind, AgentRLError)
    if kind is not AgentRLError:
        assert issubclass(kind, BUILTINS[kind.__name__])
        with pytest.raises(BUILTINS[kind.__name__], match="why"):
            raise kind("why")


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_header_draws_the_tree(kind: type[AgentRLError]) -> None:
    header = (errors.__doc__ or "").splitlines()
    (drawn,) = [line for line in header if kind.__name__ in line.split()]
    depth = sum(issubclass(ancestor, AgentRLError) for ancestor in kind.__mro__) - 1
    assert drawn.index(kind.__name__) == 4 + 4 * depth


def test_what_the_agent_causes_is_no_fault() -> None:
    assert not issubclass(ToolError, Fault)
    assert not issubclass(SandboxLost, Fault)


def test_what_a_person_mends_is_no_fault() -> None:
    assert not issubclass(ConfigError, Fault) and not issubclass(TrainingError, Fault)
