"""Every error of agentrl, by who has to act on it.

    AgentRLError
    ├── ToolError            the model reads it as an observation; the episode goes on
    ├── RequestError         an agent program reads it: its request can't be served
    │   ├── ContextFull      the conversation leaves no room for an answer
    │   └── OutOfTurns       the episode has used up its actions
    ├── SandboxLost          the agent destroyed its own sandbox; the episode ends and is graded
    ├── Fault                infrastructure failed; the member leaves its group and is counted
    │   ├── SandboxFault     the engine or supervisor died (never: what the agent's code did)
    │   ├── EngineFault      the inference engine failed or gave an inconsistent reply
    │   ├── EnvironmentFault the environment's own code raised
    │   └── VerifierFault    the verifier raised, timed out or gave no finite reward
    ├── ConfigError          a person fixes the configuration
    │   └── PluginError      a person fixes an environment, sandbox or engine plug-in
    ├── RecordError          a saved file is cut, foreign or of another schema
    └── TrainingError        a person reads why the run stopped
        ├── NoSignal         no group had two different rewards within the budget
        ├── TooManyFaults    the share of faults is above the set limit
        ├── NonFiniteLoss    loss or gradients are not finite
        └── WeightsNotApplied  the engine does not serve the learner's weights

Each also is the built-in exception that a caller would expect, and each pickles: one message,
one argument. The message says in one line what is wrong, where, and how to mend it.
"""


class AgentRLError(Exception):
    """Base of everything that agentrl raises on purpose."""


class ToolError(AgentRLError, ValueError):
    """A tool call that failed in a way the model should read and act on."""


class RequestError(AgentRLError, ValueError):
    """An agent program asked the policy for what can't be had."""


class ContextFull(RequestError):
    """The conversation leaves no room for an answer in the context."""


class OutOfTurns(RequestError):
    """The episode has used up its actions."""


class SandboxLost(AgentRLError, RuntimeError):
    """The agent's own doing ended its sandbox; the episode ends as `sandbox_lost`."""


class Fault(AgentRLError, RuntimeError):
    """Infrastructure failed: not the agent's doing, so neither reward 0 nor a training sample."""


class SandboxFault(Fault, ConnectionError):
    """The sandbox engine or the supervisor is gone."""


class EngineFault(Fault):
    """The inference engine failed, or its reply does not add up (ids, logprobs, counts)."""


class EnvironmentFault(Fault):
    """The environment's own code raised."""


class VerifierFault(Fault):
    """The verifier raised, ran past its limit, or returned something that is not a verdict."""


class ConfigError(AgentRLError, ValueError):
    """The configuration is wrong; the message names the field and the mend."""


class PluginError(ConfigError, ImportError):
    """A plug-in is missing, fails to import, or does not keep its contract."""


class RecordError(AgentRLError, ValueError):
    """A saved trajectory, batch or checkpoint can't be read."""


class TrainingError(AgentRLError, RuntimeError):
    """The run had to stop."""


class NoSignal(TrainingError):
    """No group had two different rewards within the sampling budget."""


class TooManyFaults(TrainingError):
    """More episodes failed for infrastructure reasons than the limit allows."""


class NonFiniteLoss(TrainingError, ArithmeticError):
    """Loss or gradients were NaN or infinite."""


class WeightsNotApplied(TrainingError):
    """After a publish the engine does not answer as the learner's weights would."""
