"""What a run will cost before it is started: arithmetic over a configuration and a machine."""

from agentrl.planning.estimate import Allocation, Estimate, Part, estimate
from agentrl.planning.machines import Machine, find_machine
from agentrl.planning.shapes import ModelShape, find_shape
from agentrl.planning.workload import Workload, longest_workload, workload_of_run

__all__ = [
    "Allocation",
    "Estimate",
    "Machine",
    "ModelShape",
    "Part",
    "Workload",
    "estimate",
    "find_machine",
    "find_shape",
    "longest_workload",
    "workload_of_run",
]
