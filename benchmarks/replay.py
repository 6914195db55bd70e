"""Episodes and tokens a second of each rung of the replay ladder, on a run's newest step.

    python benchmarks/replay.py              # makes a small run of the quickstart first
    python benchmarks/replay.py runs/mine

Reading the same step is measured beside the rungs: what any of them pays first.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from agentrl import build
from agentrl.cli.display import QuietReporter
from agentrl.config import load_config
from agentrl.rebuild import Replay
from agentrl.replay.records import Recorded, Records

QUICKSTART = Path(__file__).parents[1] / "configs" / "quickstart.yaml"
SMALL = ("warm_start.steps=100", "warm_start.traces=200", "run.steps=2", "run.eval_every=0")


def rungs(run: Path) -> dict[str, Callable[[], object]]:
    """A call for each rung; `replay` is made anew, since it keeps what it has opened."""

    def episodes() -> Sequence[Recorded]:
        return list(newest(run).episodes())

    def replay() -> Replay:
        return Replay(newest(run))

    return {
        "read": episodes,
        "check": lambda: list(replay().check()),
        "regrade": lambda: list(replay().regrade()),
        "reexecute": lambda: replay().reexecute(episodes()),
        "reforward": lambda: replay().reforward(episodes()),
        "relearn": lambda: replay().relearn(newest(run).steps[0]),
    }


def newest(run: Path) -> Records:
    return Records(run, step=Records(run).steps[-1])


def median_seconds(work: Callable[[], object], repeats: int) -> float:
    took: list[float] = []
    for _ in range(repeats):
        begun = time.perf_counter()
        work()
        took.append(time.perf_counter() - begun)
    return statistics.median(took)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path, nargs="?")
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        run = args.run or Path(folder) / "run"
        if args.run is None:
            config = load_config(QUICKSTART, [*SMALL, f"run.dir={run}"])
            build.train(config, reporter=QuietReporter())
        episodes = list(newest(run).episodes())
        tokens = sum(len(one.trajectory.token_ids) for one in episodes)
        print(f"{len(episodes)} episodes, {tokens} tokens; medians of {args.repeats}")
        print(f"{'rung':12}{'seconds':>10}{'episodes/s':>12}{'tokens/s':>12}")
        for name, work in rungs(run).items():
            took = median_seconds(work, args.repeats)
            print(f"{name:12}{took:10.2f}{len(episodes) / took:12.1f}{tokens / took:12,.0f}")


if __name__ == "__main__":
    main()
