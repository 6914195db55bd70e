"""Environments as Gymnasium environments, and the other way round.

import gymnasium, agentrl.gym

env = gymnasium.make("agentrl/Calculator-v0")      # every registered environment
own = agentrl.gym.TextEnv("my_env.py")             # any other
lake = agentrl.gym.from_gymnasium(                 # a stranger's, as an agentrl environment
    lambda: gymnasium.make("FrozenLake-v1"), actions=["left", "down", "right", "up"]
)
"""

from importlib.util import find_spec

from agentrl.errors import PluginError

if find_spec("gymnasium") is None:
    raise PluginError("agentrl.gym needs gymnasium: pip install gymnasium")

from agentrl.gym.foreign import GymnasiumEnvironment, ReturnVerifier, from_gymnasium
from agentrl.gym.space import TextSpace
from agentrl.gym.text_env import TextEnv, gymnasium_id, register_environments

__all__ = [
    "GymnasiumEnvironment",
    "ReturnVerifier",
    "TextEnv",
    "TextSpace",
    "from_gymnasium",
    "gymnasium_id",
    "register_environments",
]

register_environments()
