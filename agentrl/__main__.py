"""`python -m agentrl` is `agentrl`."""

from agentrl.cli import main

main()
