"""Runs episodes: observation, action, observation, action, … until somebody or a limit ends it."""

from agentrl.rollout.actor import SCRIPT_VERSION, Actor, PolicyActor
from agentrl.rollout.capture import CAPTURED
from agentrl.rollout.frame import episode_id, sampling_seed
from agentrl.rollout.reply import fit_reply
from agentrl.rollout.run import run_actor, run_episode, run_group, run_script
from agentrl.rollout.stage import Limits, Stage
from agentrl.rollout.warm import WarmSandboxes

__all__ = [
    "CAPTURED",
    "SCRIPT_VERSION",
    "Actor",
    "Limits",
    "PolicyActor",
    "Stage",
    "WarmSandboxes",
    "episode_id",
    "fit_reply",
    "run_actor",
    "run_episode",
    "run_group",
    "run_script",
    "sampling_seed",
]
