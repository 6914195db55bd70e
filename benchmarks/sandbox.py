"""Latency of the sandbox backends, beside a plain `docker exec` of docker-py, in one run.

    python benchmarks/sandbox.py --backends bwrap docker --calls 100

Prints milliseconds, median and 95th percentile. `open` is a fresh sandbox up to its first answer,
`checkout` one that `WarmSandboxes` has ready, `round trip` a small file read (no process), `python`
a fresh interpreter that prints, `close` until nothing is left. `calls/s` is fresh interpreters by
`--together` sandboxes at once; before the table, `--live` sandboxes are opened all together.
"""

import argparse
import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from statistics import median, quantiles

from agentrl.errors import ConfigError
from agentrl.plugins import open_sandboxes
from agentrl.protocols import Sandbox, SandboxProvider
from agentrl.rollout import WarmSandboxes
from agentrl.types import SandboxSpec

PYTHON = ["python3", "-I", "-S", "-c", "print(1)"]
SPEC = SandboxSpec(files={"small": b"x" * 100})
ROWS = ("open", "checkout", "round trip", "true", "python", "close")


async def seconds(work: Callable[[], Awaitable[object]], times: int) -> list[float]:
    """Wall-clock seconds of each call."""
    out: list[float] = []
    for _ in range(times):
        began = time.perf_counter()
        await work()
        out.append(time.perf_counter() - began)
    return out


async def measure(provider: SandboxProvider, calls: int, together: int) -> dict[str, list[float]]:
    """Seconds by row; `calls/s` is a single number."""
    found: dict[str, list[float]] = {"open": [], "close": []}
    for _ in range(max(3, calls // 10)):
        began = time.perf_counter()
        session = provider.session(SPEC)
        await session.__aenter__()
        opened = time.perf_counter()
        await session.__aexit__(None, None, None)
        found["open"].append(opened - began)
        found["close"].append(time.perf_counter() - opened)
    found["checkout"] = await checkouts(provider, max(3, calls // 10))
    async with provider.session(SPEC) as sandbox:
        found["round trip"] = await seconds(
            lambda: sandbox.read_file("small", max_bytes=999), calls
        )
        found["true"] = await seconds(lambda: sandbox.exec(["true"], timeout_s=9), calls)
        found["python"] = await seconds(lambda: sandbox.exec(PYTHON, timeout_s=9), calls)
    found["calls/s"] = [await throughput(provider, calls, together)]
    return found


async def checkouts(provider: SandboxProvider, times: int) -> list[float]:
    """Seconds until one that is ready is handed out; between two, the queue fills again."""
    out: list[float] = []
    async with WarmSandboxes(provider, size=2) as warm:
        for number in range(times + 1):
            began = time.perf_counter()
            async with warm.session(SPEC) as sandbox:
                taken = time.perf_counter() - began
                await sandbox.exec(["true"], timeout_s=9)
            if number:  # the first finds the queue empty
                out.append(taken)
            await asyncio.sleep(0.5)
    return out


async def live(provider: SandboxProvider, number: int) -> tuple[float, float]:
    """Seconds until so many are open at once, and until a fresh interpreter has run in each."""
    async with AsyncExitStack() as stack:
        began = time.perf_counter()
        sessions = [stack.enter_async_context(provider.session(SPEC)) for _ in range(number)]
        sandboxes = await asyncio.gather(*sessions)
        opened = time.perf_counter()
        await asyncio.gather(*(sandbox.exec(PYTHON, timeout_s=60) for sandbox in sandboxes))
        return opened - began, time.perf_counter() - opened


async def throughput(provider: SandboxProvider, calls: int, together: int) -> float:
    """Fresh interpreters a second, in `together` sandboxes at once."""

    async def work(sandbox: Sandbox) -> None:
        for _ in range(max(1, calls // together)):
            await sandbox.exec(PYTHON, timeout_s=60)

    async with AsyncExitStack() as stack:
        sessions = [stack.enter_async_context(provider.session(SPEC)) for _ in range(together)]
        sandboxes = await asyncio.gather(*sessions)
        began = time.perf_counter()
        await asyncio.gather(*(work(sandbox) for sandbox in sandboxes))
        return max(1, calls // together) * together / (time.perf_counter() - began)


def measure_plain(calls: int) -> dict[str, list[float]]:
    """What docker-py alone does: a container that sleeps, and `exec_run` in it."""
    import docker
    from agentrl_sandboxes.images import build_image

    client = docker.from_env()
    image = build_image(client, "python").digest
    began = time.perf_counter()
    container = client.containers.run(image, ["sleep", "600"], detach=True, init=True)
    opened = time.perf_counter() - began
    try:
        found = {"open": [opened]}
        for row, argv in (("true", ["true"]), ("python", PYTHON)):
            found[row] = []
            for _ in range(calls):
                began = time.perf_counter()
                container.exec_run(argv)
                found[row].append(time.perf_counter() - began)
    finally:
        began = time.perf_counter()
        container.remove(force=True)
    return {**found, "close": [time.perf_counter() - began]}


def shown(values: Sequence[float] | None) -> str:
    """Median and 95th percentile in milliseconds."""
    if not values:
        return "-"
    high = quantiles(values, n=20)[-1] if len(values) > 1 else values[0]
    return f"{1e3 * median(values):.1f} / {1e3 * high:.1f}"


def table(found: dict[str, dict[str, list[float]]]) -> str:
    """Markdown: a row for each measure, a column for each backend."""
    lines = [f"| ms, p50 / p95 | {' | '.join(found)} |", "|---" * (len(found) + 1) + "|"]
    for row in ROWS:
        lines.append(f"| {row} | {' | '.join(shown(f.get(row)) for f in found.values())} |")
    rates = [f"{f['calls/s'][0]:.0f}" if "calls/s" in f else "-" for f in found.values()]
    return "\n".join([*lines, f"| python calls/s | {' | '.join(rates)} |"])


def main() -> None:
    """Measure each backend that works here, print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--backends", nargs="+", default=["bwrap", "docker", "landlock"])
    parser.add_argument("--calls", type=int, default=100)
    parser.add_argument("--together", type=int, default=16)
    parser.add_argument("--live", type=int, nargs="*", default=[64, 128])
    arguments = parser.parse_args()
    found: dict[str, dict[str, list[float]]] = {}
    for name in arguments.backends:
        try:
            provider = open_sandboxes(name)
        except ConfigError as error:
            print(f"{name}: skipped, {error}")
            continue
        found[name] = asyncio.run(measure(provider, arguments.calls, arguments.together))
        for number in arguments.live:
            opened, ran = asyncio.run(live(open_sandboxes(name), number))
            print(f"{name}: {number} open after {opened:.1f} s, a Python in each after {ran:.1f} s")
        if name == "docker":
            found["docker exec_run"] = measure_plain(arguments.calls)
    print(table(found))


if __name__ == "__main__":
    main()
