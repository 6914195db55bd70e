"""The verbs that work on a policy; the others are added from the files beside this one."""

from dataclasses import asdict
from pathlib import Path

import typer

from agentrl.cli import checks, inspection, plan, replay, view, workshop
from agentrl.cli.options import (
    Json,
    Model,
    Quiet,
    RunFolder,
    Set,
    Source,
    SplitOption,
    config_of,
    echo_json,
    existing_run,
    say,
    split_of,
)

app = typer.Typer(
    help="Train tool-using agents with GRPO.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    epilog="Exit codes: 0 done; 1 the check found something wrong; 2 wrong usage, configuration "
    "or file; 3 the run had to stop; 130 interrupted. AGENTRL_TRACEBACK=1 shows tracebacks.",
)


@app.command()
def train(
    source: Source,
    set_: Set = None,
    resume: bool = typer.Option(True, help="go on from the newest checkpoint"),
    offline: Path | None = typer.Option(
        None, metavar="RUN", help="learn from the trajectories of this run, without sampling"
    ),
    quiet: Quiet = False,
    json_: Json = False,
) -> None:
    """Train a policy, or go on with a run.

    Takes the warm start first if the configuration has one. Ctrl-C and SIGTERM leave a whole
    checkpoint, from which the same command goes on.
    """
    from agentrl.cli.display import reporter_for

    config = config_of(source, set_)
    with reporter_for(quiet=quiet, as_json=json_) as reporter:
        if offline is None:
            from agentrl import build

            build.train(config, reporter=reporter, resume=resume)
        else:
            from agentrl.offline import train_offline

            train_offline(config, offline, reporter=reporter, resume=resume)
        reporter.note(f"run: {config.run.dir}")


@app.command()
def sft(
    source: Source,
    set_: Set = None,
    force: bool = typer.Option(False, help="repeat a finished warm start"),
    quiet: Quiet = False,
    json_: Json = False,
) -> None:
    """Fit a policy to traces of scripted policies.

    This is the warm start of `train`, alone.
    """
    from agentrl.cli.display import reporter_for

    config = config_of(source, set_)
    with reporter_for(quiet=quiet, as_json=json_) as reporter:
        from agentrl import build

        folder = build.warm_start(config, reporter=reporter, force=force)
    say({"model": str(folder)}, str(folder), as_json=json_)


@app.command("reward-model")
def reward_model(
    run: RunFolder,
    model: str = typer.Option(help="classifier or language model to start from"),
    out: Path = typer.Option(help="folder to write it to; may be the same"),
    component: str = typer.Option("", help="part of the verdicts to learn (default: the reward)"),
    pairs_per_group: int = typer.Option(8, help="pairs drawn from a group"),
    replay_share: float = typer.Option(0.1, help="share of pairs from steps seen before"),
    epochs: int = typer.Option(1, help="passes over the pairs"),
    batch: int = typer.Option(32, help="pairs in an update"),
    lr: float = typer.Option(2e-5, help="peak learning rate"),
    max_tokens: int = typer.Option(2048, help="longest prompt with answer, in tokens"),
    seed: int = typer.Option(0, help="root of all random streams"),
    quiet: Quiet = False,
    json_: Json = False,
) -> None:
    """Train a reward model on a run's groups (Bradley-Terry).

    Where it was trained on the same run before, the steps since are new, and the earlier ones are
    replayed.
    """
    from agentrl.cli.display import reporter_for

    record = existing_run(run)
    with reporter_for(quiet=quiet or json_, as_json=False) as reporter:
        from agentrl.learning.reward_model import RewardTraining, train_reward_model

        settings = RewardTraining(
            component=component,
            pairs_per_group=pairs_per_group,
            replay_share=replay_share,
            epochs=epochs,
            batch=batch,
            lr=lr,
            max_tokens=max_tokens,
            seed=seed,
        )
        fit = train_reward_model(record, model, out, settings, reporter=reporter)
    text = (
        f"{out}: steps {fit.steps[0]} to {fit.steps[1]}, {fit.fresh} pairs and {fit.replayed} "
        f"replayed; right order {fit.first_accuracy:.2f} at first, {fit.accuracy:.2f} at last"
    )
    say({"model": str(out), **asdict(fit)}, text, as_json=json_)


@app.command("eval")
def evaluate(
    source: Source,
    set_: Set = None,
    problems: int = typer.Option(128, min=1, help="problems"),
    samples: int = typer.Option(1, min=1, help="samples of each"),
    split: SplitOption = "test",
    model: Model = None,
    greedy: bool = typer.Option(False, help="take the likeliest token"),
    quiet: Quiet = False,
    json_: Json = False,
) -> None:
    """Success and pass@k on a split, with a 95 % interval."""
    from agentrl.cli.display import reporter_for

    chosen, config = split_of(split), config_of(source, set_)
    # The result is the only JSON line, so the reporter stays quiet beside it.
    with reporter_for(quiet=quiet or json_, as_json=False) as reporter:
        from agentrl import build

        found = build.evaluate(
            config,
            reporter=reporter,
            problems=problems,
            samples=samples,
            split=chosen,
            model=model,
            greedy=greedy,
        )
    if json_:
        echo_json(
            {
                "split": split,
                "problems": found.problems,
                "samples": found.samples,
                "success": found.success,
                "stderr": found.stderr,
                "ci95": list(found.ci95),
                "pass_at_k": {str(k): v for k, v in found.pass_at_k.items()},
                "faults": found.faults,
            }
        )
        return
    low, high = found.ci95
    typer.echo(
        f"success {found.success:.3f} (95 %: {low:.3f} to {high:.3f}) on {found.problems} "
        f"{split} problems, {found.samples} samples each, {found.faults} faults"
    )
    for k, share in found.pass_at_k.items():
        typer.echo(f"pass@{k} {share:.3f}")


@app.command()
def rollout(
    source: Source,
    set_: Set = None,
    problems: int = typer.Option(1, min=1, help="problems"),
    split: SplitOption = "train",
    model: Model = None,
    out: str | None = typer.Option(None, help="folder to write the groups to, for `show`"),
    plain: bool = typer.Option(False, help="marks instead of colours"),
    quiet: Quiet = False,
    json_: Json = False,
) -> None:
    """Sample some groups and show what happened, without learning."""
    from agentrl.cli.display import reporter_for

    chosen, config = split_of(split), config_of(source, set_)
    with reporter_for(quiet=quiet or json_, as_json=False) as reporter:
        from agentrl import build

        folder = None if out is None else Path(out)
        groups = build.rollout(
            config, reporter=reporter, problems=problems, split=chosen, model=model, out=folder
        )
    if out is not None:
        typer.echo(f"{len(groups)} groups in {out}", err=True)
    if out is None or json_:
        for group in groups:
            inspection.show_group(group, plain=plain, as_json=json_)


inspection.register(app)
plan.register(app)
workshop.register(app)
replay.register(app)
view.register(app)
app.add_typer(checks.app, name="check")
