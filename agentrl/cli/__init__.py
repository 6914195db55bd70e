"""The command line: `agentrl VERB …`. Each verb loads what it needs, and no more."""

from agentrl.cli.entry import main

__all__ = ["main"]
