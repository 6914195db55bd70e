"""Rooflines of accelerators, from their data sheets, and of this machine's CPU, measured."""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import median

from agentrl.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """One accelerator: peaks, and the shares of them that well-made software reaches.

    `flops` is dense bfloat16 work a second (float32 on a CPU), `bytes_s` the bandwidth of its
    memory, `link_bytes_s` that to its neighbour, `call_s` the time that one operator takes however
    small it is, `cores` the CPU cores that come with it. `price` is in dollars an hour, a round
    list price to be replaced by one's own.
    """

    name: str
    flops: float
    bytes_s: float
    memory_bytes: float
    link_bytes_s: float
    call_s: float
    cores: int
    price: float
    learner_share: float = 0.4
    engine_share: float = 0.5
    memory_share: float = 0.7


GPUS = {
    machine.name: machine
    for machine in (
        Machine(
            name=name,
            flops=tera * 1e12,
            bytes_s=bandwidth * 1e12,
            memory_bytes=memory * 1e9,
            link_bytes_s=link * 1e9,
            call_s=2e-6,
            cores=8,
            price=price,
        )
        for name, tera, bandwidth, memory, link, price in (
            ("l40s", 362, 0.864, 48, 32, 1.0),
            ("a100", 312, 2.0, 80, 300, 1.5),
            ("h100", 989, 3.35, 80, 450, 2.5),
            ("h200", 989, 4.8, 141, 450, 3.5),
            ("b200", 2250, 8.0, 192, 900, 5.0),
        )
    )
}


def find_machine(name: str, *, price: float | None = None) -> Machine:
    """An accelerator by name, or "cpu": this machine, tried for a second.

    Raises ConfigError for an unknown name.
    """
    known = name.lower()
    if known == "cpu":
        machine = _this_cpu()
    elif known in GPUS:
        machine = GPUS[known]
    else:
        raise ConfigError(f"--gpu {name}: it is one of cpu, {', '.join(GPUS)}")
    return machine if price is None else replace(machine, price=price)


def _this_cpu() -> Machine:
    import os

    import torch

    side = 1024
    left, right = torch.rand(side, side), torch.rand(side, side)
    many, small = torch.rand(2**25), torch.rand(8, 8)  # 128 MiB: more than a cache holds
    return Machine(
        name="cpu",
        flops=2 * side**3 / _seconds(lambda: left @ right),
        bytes_s=many.nbytes / _seconds(lambda: many.sum()),
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        link_bytes_s=many.nbytes / _seconds(lambda: many.clone()),
        call_s=_seconds(lambda: [small @ small for _ in range(100)]) / 100,
        cores=os.cpu_count() or 1,
        price=0.0,
        # The peaks were measured, not read from a data sheet: what is lost is lost already.
        learner_share=0.7,
        engine_share=0.7,
        memory_share=0.9,
    )


def _seconds(work: Callable[[], object]) -> float:
    taken: list[float] = []
    for _ in range(7):
        start = time.perf_counter()
        work()
        taken.append(time.perf_counter() - start)
    return median(taken)
