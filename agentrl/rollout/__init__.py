"""Runs episodes: observation, action, observation, action, … until somebody or a limit ends it."""

from agentrl.rollout.actor import SCRIPT_VERSION
from agentrl.rollout.episode import sampling_seed
from agentrl.rollout.reply import fit_reply
from agentrl.rollout.run import run_episode, run_group, run_script
from agentrl.rollout.stage import Limits, Stage

__all__ = [
    "SCRIPT_VERSION",
    "Limits",
    "Stage",
    "fit_reply",
    "run_episode",
    "run_group",
    "run_script",
    "sampling_seed",
]
