"""Runs episodes: observation, action, observation, action, … until somebody or a limit ends it."""

from agentrl.rollout.actor import SCRIPT_VERSION
from agentrl.rollout.episode import sampling_seed
from agentrl.rollout.reply import fit_reply
from agentrl.rollout.run import run_episode, run_group, run_script
from agentrl.rollout.stage import Limits, Stage
from agentrl.rollout.warm import WarmSandboxes

__all__ = [
    "SCRIPT_VERSION",
    "Limits",
    "Stage",
    "WarmSandboxes",
    "fit_reply",
    "run_episode",
    "run_group",
    "run_script",
    "sampling_seed",
]
