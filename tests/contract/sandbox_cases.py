"""Which sandbox backends can be tried on this machine."""

import pytest
from agentrl_sandboxes.bwrap import BwrapProvider
from agentrl_sandboxes.docker import DockerProvider
from agentrl_sandboxes.landlock import LandlockProvider

from agentrl.errors import ConfigError


def why_not(provider: type[DockerProvider] | type[LandlockProvider]) -> str:
    """What this backend says is missing, or nothing."""
    try:
        provider()
    except ConfigError as error:
        return str(error)
    return ""


WHY_NO_DOCKER = why_not(DockerProvider)
WHY_NO_LANDLOCK = why_not(LandlockProvider)
needs_docker = pytest.mark.skipif(bool(WHY_NO_DOCKER), reason=WHY_NO_DOCKER)
needs_landlock = pytest.mark.skipif(bool(WHY_NO_LANDLOCK), reason=WHY_NO_LANDLOCK)
EVERY = [
    pytest.param(BwrapProvider, id="bwrap"),
    pytest.param(DockerProvider, id="docker", marks=needs_docker),
    pytest.param(LandlockProvider, id="landlock", marks=needs_landlock),
]
