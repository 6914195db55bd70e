import json
import multiprocessing
import os
import random
import shutil
import signal
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from learning_cases import batch_of, make_learner, random_groups, tiny_model, weights_of
from transformers import AutoModelForCausalLM

from agentrl.algorithms import AlgorithmConfig
from agentrl.errors import RecordError
from agentrl.learning.checkpoint import (
    Progress,
    latest_checkpoint,
    load_checkpoint,
    prune_checkpoints,
    save_checkpoint,
)
from agentrl.learning.learner import PolicyLearner


def new_learner(seed: int = 0, **section: object) -> PolicyLearner:
    plan = {"lr": 1e-2, "schedule": "cosine", "warmup_steps": 2, **section}
    return make_learner(AlgorithmConfig(), model=tiny_model(seed), total_steps=8, **plan)


def steps(learner: PolicyLearner, *numbers: int) -> torch.Tensor:
    for number in numbers:
        learner.update(batch_of(random_groups(seed=number)))
    return weights_of(learner)


def save(root: Path, learner: PolicyLearner, **options: object) -> Path:
    return save_checkpoint(root, learner, Progress(version=learner.version, cursor=7), **options)


def test_a_resumed_run_equals_the_unbroken_one_bit_for_bit(tmp_path: Path) -> None:
    unbroken = steps(new_learner(), 0, 1, 2, 3)
    first = new_learner()
    steps(first, 0, 1, 2)
    folder = save(tmp_path, first)

    resumed = new_learner(seed=5)
    assert load_checkpoint(folder, resumed) == Progress(version=3, cursor=7)
    assert resumed.version == 3
    assert torch.equal(steps(resumed, 3), unbroken)

    weights_only = new_learner(seed=5)
    weights_only.model.load_state_dict(first.model.state_dict())
    assert not torch.equal(steps(weights_only, 3), unbroken)


def test_every_random_stream_goes_on(tmp_path: Path) -> None:
    def draw() -> tuple[object, ...]:
        return (
            random.random(),
            random.gauss(0, 1),
            np.random.rand(),
            np.random.randn(),
            torch.rand(1),
        )

    random.gauss(0, 1), np.random.randn()  # each keeps a second number for the next call
    learner = new_learner()
    folder = save(tmp_path, learner)
    wanted = draw()
    torch.manual_seed(99), random.seed(99), np.random.seed(99)
    load_checkpoint(folder, learner)
    assert draw() == wanted


def test_the_folder_is_a_model_folder(tmp_path: Path) -> None:
    learner = new_learner()
    weights = steps(learner, 0)
    told: list[Path] = []
    folder = save(tmp_path, learner, save_tokenizer=told.append)
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert torch.equal(torch.cat([p.flatten() for p in model.parameters()]), weights)
    assert model.config._attn_implementation != "agentrl_packed"
    assert told and not told[0].exists(), "the tokenizer was written before the rename"


def test_what_the_loop_adds_comes_back(tmp_path: Path) -> None:
    learner = new_learner()
    progress = Progress(version=0, cursor=3, extra={"best": 0.5, "seen": ["a"]})
    assert load_checkpoint(save_checkpoint(tmp_path, learner, progress), learner) == progress


def test_a_moving_reference_comes_back(tmp_path: Path) -> None:
    algorithm = AlgorithmConfig(kl_coef=0.1, reference_every=2)

    def learner() -> PolicyLearner:
        return make_learner(algorithm, reference=tiny_model(1), lr=1e-2)

    unbroken = learner()
    steps(unbroken, 0, 1, 2)
    folder = save(tmp_path, unbroken)
    wanted = steps(unbroken, 3)
    resumed = learner()
    load_checkpoint(folder, resumed)
    assert torch.equal(steps(resumed, 3), wanted)
    still = make_learner(AlgorithmConfig(kl_coef=0.1), reference=tiny_model(1), lr=1e-2)
    load_checkpoint(folder, still)
    assert not torch.equal(steps(still, 3), wanted), "the first reference would give another step"


def test_bfloat16_masters_come_back_whole(tmp_path: Path) -> None:
    learner = make_learner(AlgorithmConfig(), model=tiny_model().bfloat16(), lr=1e-6)
    weights = steps(learner, 0)
    other = make_learner(AlgorithmConfig(), model=tiny_model().bfloat16())
    load_checkpoint(save(tmp_path, learner), other)
    assert torch.equal(weights_of(other), weights)


def three(root: Path) -> list[Path]:
    learner = new_learner()
    return [save(root, learner) for n in range(3) if steps(learner, n) is not None]


@pytest.mark.parametrize(
    "name", ["manifest.json", "learner.pt", "model.safetensors", "config.json"]
)
@pytest.mark.parametrize("harm", ["missing", "cut", "flipped"])
def test_the_newest_whole_one_is_taken_and_skipped_ones_are_named(
    tmp_path: Path, name: str, harm: str
) -> None:
    _, second, third = three(tmp_path)
    victim = third / name
    data = victim.read_bytes()
    if harm == "missing":
        victim.unlink()
    elif harm == "cut":
        victim.write_bytes(data[: len(data) // 2])
    else:
        victim.write_bytes(bytes([data[0] ^ 1]) + data[1:])
    notes: list[str] = []
    assert latest_checkpoint(tmp_path, note=notes.append) == second
    assert len(notes) == 1 and third.name in notes[0]
    assert load_checkpoint(second, new_learner()).version == 2


def test_saving_a_damaged_step_again_mends_it(tmp_path: Path) -> None:
    learner = new_learner()
    folder = save(tmp_path, learner)
    (folder / "learner.pt").unlink()
    with pytest.raises(RecordError, match=r"learner\.pt is missing"):
        load_checkpoint(folder, learner)
    assert save(tmp_path, learner) == folder
    assert latest_checkpoint(tmp_path) == folder


def test_a_whole_step_is_not_written_twice(tmp_path: Path) -> None:
    learner = new_learner()
    inode = save(tmp_path, learner).stat().st_ino
    assert save(tmp_path, learner).stat().st_ino == inode


def test_old_ones_go_when_the_new_one_is_whole(tmp_path: Path) -> None:
    learner = new_learner()
    for n in range(4):
        steps(learner, n)
        save(tmp_path, learner, keep=2)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-000003", "step-000004"]


def test_damaged_ones_do_not_count_among_the_kept(tmp_path: Path) -> None:
    _, second, third = three(tmp_path)
    (third / "learner.pt").unlink()
    prune_checkpoints(tmp_path, keep=1)
    assert latest_checkpoint(tmp_path, note=lambda _: None) == second


@pytest.mark.parametrize(
    "error", [OSError(28, "No space left on device"), RuntimeError("unexpected pos 64 vs 0")]
)
def test_a_save_that_fails_leaves_the_old_ones(error: Exception, tmp_path: Path) -> None:
    learner = new_learner()
    first = save(tmp_path, learner, keep=1)
    steps(learner, 0)

    def full(_: Path) -> None:
        raise error

    with pytest.raises(OSError, match=str(error.args[-1])) as raised:
        save(tmp_path, learner, keep=1, save_tokenizer=full)
    assert raised.value.filename == str(tmp_path / "step-000001"), "a line can name it"
    assert latest_checkpoint(tmp_path) == first
    assert [p.name for p in tmp_path.iterdir()] == [first.name]
    second = save(tmp_path, learner, keep=1)
    assert [p.name for p in tmp_path.iterdir()] == [second.name]


@pytest.mark.parametrize("content", [None, "{}", "[]", "not json", '{"files": {"x": 3}}'])
def test_a_foreign_folder_is_refused(tmp_path: Path, content: str | None) -> None:
    folder = tmp_path / "step-000001"
    if content is not None:
        folder.mkdir()
        (folder / "manifest.json").write_text(content)
    if content == "{}":
        content = None
    with pytest.raises(RecordError, match="step-000001"):
        load_checkpoint(folder, new_learner())
    assert latest_checkpoint(tmp_path, note=lambda _: None) is None


def test_a_checkpoint_of_another_model_is_refused_in_one_line(tmp_path: Path) -> None:
    folder = save(tmp_path, new_learner())
    other = tiny_model()
    other.resize_token_embeddings(40)
    with pytest.raises(RecordError, match="does not fit this run") as caught:
        load_checkpoint(folder, make_learner(AlgorithmConfig(), model=other))
    assert "\n" not in str(caught.value)


def test_code_in_a_checkpoint_does_not_run(tmp_path: Path) -> None:
    class Attack:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return os.mkdir, (str(tmp_path / "pwned"),)

    folder = save(tmp_path, new_learner())
    torch.save({"optimizer": Attack()}, folder / "learner.pt")
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["files"]["learner.pt"][0] = (folder / "learner.pt").stat().st_size
    (folder / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(RecordError):
        load_checkpoint(folder, new_learner())
    assert not (tmp_path / "pwned").exists()


def save_for_ever(root: Path) -> None:
    learner = new_learner()
    while True:
        learner.version += 1
        save(root, learner, keep=2)


@pytest.mark.parametrize("round_", range(4))
def test_killed_at_any_moment_a_whole_checkpoint_is_left(tmp_path: Path, round_: int) -> None:
    root = tmp_path / "checkpoints"
    child = multiprocessing.get_context("fork").Process(target=save_for_ever, args=(root,))
    child.start()
    deadline = time.monotonic() + 60
    while latest_checkpoint(root, note=lambda _: None) is None and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(random.Random(round_).random() * 0.3)
    os.kill(child.pid, signal.SIGKILL)
    child.join()
    newest = latest_checkpoint(root, note=lambda _: None)
    assert newest is not None
    whole = [f for f in root.glob("step-*") if (f / "manifest.json").exists()]
    assert sorted(whole) == sorted(root.glob("step-*")), "a final name means a whole folder"
    learner = new_learner()
    assert load_checkpoint(newest, learner).version == learner.version
    steps(learner, 0)
    save(root, learner, keep=1)
    assert len(list(root.iterdir())) == 1, "and the debris is gone"
    shutil.rmtree(root)
