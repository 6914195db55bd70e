"""What docs/engines.md tells people to type is what the code asks for."""

import shlex
from pathlib import Path

from agentrl.engines.vllm.servers import CPU_FLAGS, SERVER_FLAGS

PAGE = Path(__file__).parents[2] / "docs" / "engines.md"


def test_the_flags_of_a_server_are_the_documented_ones() -> None:
    page = PAGE.read_text(encoding="utf-8").replace("\\\n", " ")
    command = next(line for line in page.splitlines() if "api_server" in line)
    typed = shlex.split(command)
    assert set(shlex.split(SERVER_FLAGS)) <= set(typed)
    assert CPU_FLAGS in page
