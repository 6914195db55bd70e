"""What an author writes: tools as methods, problems, a verifier.

class Dice(ToolEnvironment):
    verifier = ExactMatch()

    @tool
    def roll(self, sides: int) -> int:
        \"\"\"Roll a die with this many sides.\"\"\"
        return self.rng.randint(1, sides)

    @staticmethod
    def problems(split):
        return [problem("Roll a die with 1 side. What is shown?", "1")]
"""

from agentrl.tools.environment import ToolEnvironment
from agentrl.tools.mcp import McpServer
from agentrl.tools.openapi import OpenApiServer
from agentrl.tools.problems import answer, call, problem, says_nothing
from agentrl.tools.python import run_python
from agentrl.tools.schema import ToolMethod, tool
from agentrl.tools.text import as_text, cut_bytes

__all__ = [
    "McpServer",
    "OpenApiServer",
    "ToolEnvironment",
    "ToolMethod",
    "answer",
    "as_text",
    "call",
    "cut_bytes",
    "problem",
    "run_python",
    "says_nothing",
    "tool",
]
