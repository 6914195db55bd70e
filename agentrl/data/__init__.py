"""Problems from files, which of them is next, and several environments as one.

class Mine(ToolEnvironment):
    verifier = NumericMatch()
    problems = staticmethod(from_files)  # environment.options: {train: a.jsonl, prompt: question}
"""

from agentrl.data.files import from_files
from agentrl.data.lengths import check_lengths
from agentrl.data.mixture import MixedEnvironment, mix
from agentrl.data.rows import Row, read_rows
from agentrl.data.stream import ProblemStream, problem_at

__all__ = [
    "MixedEnvironment",
    "ProblemStream",
    "Row",
    "check_lengths",
    "from_files",
    "mix",
    "problem_at",
    "read_rows",
]
