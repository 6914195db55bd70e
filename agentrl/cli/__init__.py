"""The command line: `agentrl VERB …`. Each verb loads what it needs, and no more."""

from agentrl.cli.app import main

__all__ = ["main"]
