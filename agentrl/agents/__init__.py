"""Agent programs that nobody wrote for training: their talk with the policy is what is learned.

class Mine(OutsideAgent):
    command = ("python", "/path/to/agent.py")   # an unmodified OpenAI or Anthropic SDK program
    verifier = NumericMatch()

    @staticmethod
    def problems(split):
        return [problem("What is 6 times 7?", "42")]
"""

from agentrl.agents.endpoint import Endpoint, serve
from agentrl.agents.outside import OutsideAgent
from agentrl.agents.wire import GivenTool

__all__ = ["Endpoint", "GivenTool", "OutsideAgent", "serve"]
