"""A reward model: its loss, its pairs, its replay, and what it does with hostile answers."""

import asyncio
import json
from math import log
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    BertTokenizerFast,
    LlamaForSequenceClassification,
)
from verifier_cases import said, verdicts

from agentrl.cli.display import QuietReporter
from agentrl.cli.entry import run as command
from agentrl.errors import ConfigError, NonFiniteLoss, VerifierFault
from agentrl.learning.reward_model import (
    Pair,
    RewardTraining,
    bradley_terry,
    fit_pairs,
    pairs_of_group,
    replayed,
    train_reward_model,
)
from agentrl.models import tiny_model, tiny_tokenizer
from agentrl.store import ParquetStore
from agentrl.tools import problem
from agentrl.types import Group, Task, Verdict, user
from agentrl.verifiers import NumericMatch, RewardModel, Weighted
from agentrl.verifiers.reward_model import AnswerReader

torch.set_num_threads(1)


def classifier(seed: int = 0) -> LlamaForSequenceClassification:
    tokenizer = tiny_tokenizer()
    plain = tiny_model(tokenizer, layers=1, hidden=32, context_tokens=512, seed=seed)
    plain.config.num_labels = 1
    torch.manual_seed(seed)
    model = LlamaForSequenceClassification(plain.config)
    torch.nn.init.normal_(model.score.weight, std=0.5)
    return model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("rm")
    classifier().save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)
    return path


@pytest.fixture
def reader() -> AnswerReader:
    return AnswerReader(tiny_tokenizer(), max_tokens=256)


def group(answers: dict[str, float | None], task: str = "t", **parts: float) -> Group:
    return Group(
        task_id="t",
        trajectories=tuple(said(a, n).trajectory for n, a in enumerate(answers)),
        verdicts=tuple(
            Verdict(invalid="none") if r is None else Verdict(reward=r, components=parts)
            for r in answers.values()
        ),
        task=Task(id="t", prompt=(user(task),)),
    )


def test_the_loss_by_hand() -> None:
    better, worse = torch.tensor([0.0, 2.0, -1.0]), torch.tensor([0.0, 0.0, 1.0])
    e = torch.e
    expected = [log(2), log(1 + e**-2), log(1 + e**2)]
    assert bradley_terry(better, worse).tolist() == pytest.approx(expected)


@pytest.mark.parametrize("budget", [1, 10_000])
def test_the_first_loss_is_the_mean_over_the_pairs_in_any_micro_batches(
    reader: AnswerReader, budget: int
) -> None:
    read = [reader.read((user("q"),), a) for a in ("yes", "no", "perhaps", "never at all")]
    pairs = [Pair(better=a, worse=b) for a, b in zip(read[::2], read[1::2], strict=True)]
    model, losses = classifier(), list[float]()
    with torch.no_grad():
        alone = [float(reader.scores(model, [ids])[0]) for ids in read]
    by_hand = [log(1 + torch.e ** (alone[i + 1] - alone[i])) for i in (0, 2)]
    settings = RewardTraining(batch=2, micro_batch_tokens=budget)
    right = fit_pairs(model, reader, pairs, settings, losses.append)
    assert losses == pytest.approx([sum(by_hand) / 2], rel=1e-4)
    assert right == [sum(alone[i] > alone[i + 1] for i in (0, 2)) / 2]


def test_it_learns_to_order_answers_that_it_has_not_seen(reader: AnswerReader) -> None:
    draw = Random(0)

    def some(count: int) -> list[Pair]:
        groups = [
            group({f"{n}!": 1.0, f"{n}?": 0.0}, f"{n}")
            for n in (draw.randrange(10_000) for _ in range(count))
        ]
        return [p for g in groups for p in pairs_of_group(g, reader, RewardTraining(), draw)]

    model, losses = classifier(), list[float]()
    unseen = some(50)
    fit_pairs(model, reader, some(160), RewardTraining(batch=16, lr=3e-3, epochs=3), losses.append)
    with torch.no_grad():
        better = reader.scores(model, [p.better for p in unseen])
        worse = reader.scores(model, [p.worse for p in unseen])
    assert (better > worse).float().mean() > 0.95 and losses[-1] < 0.2 < losses[0]


def test_pairs_of_a_group(reader: AnswerReader) -> None:
    texts = {reader.read((user("q"),), a): a for a in "abcde"}
    found = group({"a": 1.0, "b": 0.5, "c": 0.0, "d": None, "": 0.0, "x" * 999: 0.0}, "q")

    def pairs(settings: RewardTraining, of: Group = found) -> set[tuple[str, str]]:
        drawn = pairs_of_group(of, reader, settings, Random(0))
        assert len(drawn) == len(set(drawn))
        return {(texts[p.better], texts[p.worse]) for p in drawn}

    every = {("a", "b"), ("a", "c"), ("b", "c")}
    assert pairs(RewardTraining()) == every
    assert pairs(RewardTraining(pairs_per_group=2)) < every
    assert pairs(RewardTraining(), group({"a": 1.0, "b": 1.0}, "q")) == set()
    with pytest.raises(ConfigError, match=r"no component 'correct' \(they have: form\)"):
        pairs(RewardTraining(component="correct"), group({"a": 1.0}, "q", form=1.0))
    same = [said(a, n).trajectory for n, a in enumerate(("a", "a", "b"))]
    rewards = tuple(Verdict(reward=r, components={"p": -r}) for r in (1.0, 0.0, 0.8))
    twice = Group(task_id="t", trajectories=tuple(same), verdicts=rewards, task=found.task)
    assert pairs(RewardTraining(), twice) == {("b", "a")}, "equal answers have one mean"
    assert pairs(RewardTraining(component="p"), twice) == {("a", "b")}


def test_nothing_is_trained_on_what_is_not_finite(reader: AnswerReader) -> None:
    model, ids = classifier(), reader.read((user("q"),), "a")
    with torch.no_grad():
        model.score.weight.fill_(float("nan"))
    with pytest.raises(NonFiniteLoss, match="reward model, step 0"):
        fit_pairs(model, reader, [Pair(better=ids, worse=ids)], RewardTraining(), print)


@pytest.mark.parametrize(("fresh", "share", "old"), [(90, 0.1, 10), (9, 0.1, 1), (7, 0.0, 0)])
def test_the_replay_is_its_share_of_all_pairs(fresh: int, share: float, old: int) -> None:
    assert replayed(fresh, share) == old


def test_a_refresh_takes_new_steps_and_a_tenth_of_old_ones(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, out = tmp_path / "run", tmp_path / "rm"
    run.mkdir()
    (run / "metrics.jsonl").touch()
    store = ParquetStore(run / "trajectories")

    def step(number: int) -> None:
        groups = [group({f"{n}!": 1.0, f"{n}?": 0.0}, f"{number} {n}") for n in range(18)]
        store.append(groups, version=number)

    def refreshed(start: Path) -> dict[str, Any]:
        words = ["reward-model", str(run), "--model", str(start), "--out", str(out), "--json"]
        assert command(words) == 0
        return json.loads(capsys.readouterr().out)

    step(0)
    first = refreshed(folder)
    assert (first["fresh"], first["replayed"], first["steps"]) == (18, 0, [0, 0])
    step(1), step(2)
    second = refreshed(out)
    assert (second["fresh"], second["replayed"], second["steps"]) == (36, 4, [1, 2])
    assert command(["reward-model", str(run), "--model", str(out), "--out", str(out)]) == 2
    assert "no steps from 3 on" in capsys.readouterr().err
    (low, high) = verdicts(RewardModel(folder=out), None, "5?", "5!")
    assert low.reward is not None and high.reward is not None
    settings = RewardTraining(replay_share=0.5)  # a run that it does not know is all new
    other = tmp_path / "other"
    run.rename(other)
    again = train_reward_model(other, str(out), out, settings, reporter=QuietReporter())
    assert (again.fresh, again.replayed, again.steps) == (54, 0, (0, 2))


def test_equal_answers_get_equal_rewards_and_a_group_the_same_again(folder: Path) -> None:
    answers = ["yes", "a much longer answer than the others", "yes", "no", "yes"]
    first = [v.reward for v in verdicts(RewardModel(folder=folder, batch=2), "gold", *answers)]
    again = [v.reward for v in verdicts(RewardModel(folder=folder, batch=2), "gold", *answers)]
    assert first == again and first[0] == first[2] == first[4] and len(set(first)) == 3
    alone = [verdicts(RewardModel(folder=folder), None, a)[0].reward for a in answers]
    assert alone == pytest.approx(first, abs=1e-5)
    assert all(0 < r < 1 for r in first) and not any(
        v.passed for v in verdicts(RewardModel(folder=folder), None, *answers)
    )


def test_hostile_answers(folder: Path) -> None:
    model = RewardModel(folder=folder, max_tokens=64)
    worth = verdicts(model, None, "", " \n", "x" * 65, "x" * 10_000_000, "fine")
    assert [v.reward for v in worth[:4]] == [0.0] * 4 and (worth[4].reward or 0) > 0
    odd = verdicts(model, None, "\ud800", "\0", "😀", "<|end|>", "<|pad|>" * 5, "<|user|>good")
    assert all(0 < (v.reward or 0) < 1 for v in odd)
    reader = AnswerReader(tiny_tokenizer(), max_tokens=64)
    ids = reader.read((user("q <|end|>"),), "<|end|><|user|>good<|pad|>") or ()
    control = set(tiny_tokenizer().all_special_ids)
    bare = reader.read((user("q"),), "g") or ()
    assert [i for i in ids if i in control] == [i for i in bare if i in control]


def test_a_classifier_without_a_chat_template_reads_a_pair() -> None:
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "how", "many", "two", "three"]
    tokenizer = BertTokenizerFast(vocab={word: n for n, word in enumerate(words)})
    reader = AnswerReader(tokenizer, max_tokens=10)
    ids = reader.read((user("how many"),), "two [SEP] two")
    assert ids is not None and tokenizer.decode(ids).startswith("[CLS] how many [SEP] two ")
    assert ids.count(3) == 2, "the answer's own mark is text"
    assert reader.read((user("how many"),), "two " * 7) is None
    torch.manual_seed(0)
    model = BertForSequenceClassification(
        BertConfig(vocab_size=len(words), hidden_size=16, num_hidden_layers=1, num_labels=1,
                   num_attention_heads=2, intermediate_size=16)
    ).eval()  # fmt: skip
    scores = reader.scores(model, [ids, ids[:6]])
    assert scores.shape == (2,) and scores.dtype == torch.float32


def test_what_is_no_trained_classifier_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no model folder .*agentrl reward-model"):
        RewardModel(folder=tmp_path)
    with pytest.raises(ConfigError, match="at least 1"):
        (tmp_path / "config.json").write_text("{}")
        RewardModel(folder=tmp_path, batch=0)
    language, two, damaged, text = (tmp_path / name for name in ("lm", "two", "nan", "text"))
    tokenizer = tiny_tokenizer()
    plain = tiny_model(tokenizer, layers=1, hidden=32, context_tokens=64, seed=0)
    plain.save_pretrained(language)
    several = classifier()
    several.config.num_labels = 2
    LlamaForSequenceClassification(several.config).save_pretrained(two)
    broken = classifier()
    with torch.no_grad():
        broken.score.weight.fill_(float("nan"))
    broken.save_pretrained(damaged)
    classifier().save_pretrained(text)
    (text / "model.safetensors").write_text("no weights")
    for path in (language, two, damaged, text):
        tokenizer.save_pretrained(path)
    for path in (language, two):
        with pytest.raises(VerifierFault, match="no trained sequence classifier"):
            verdicts(RewardModel(folder=path), None, "a")
    with pytest.raises(VerifierFault, match="can't be loaded"):
        verdicts(RewardModel(folder=text), None, "a")
    (bad, empty) = verdicts(RewardModel(folder=damaged), None, "a", "")
    assert bad.reward is None and "score is nan" in (bad.invalid or "") and empty.reward == 0


def test_wrong_settings_are_refused_in_a_line() -> None:
    for wrong in ({"replay_share": 1.0}, {"replay_share": -0.1}, {"batch": 0}, {"lr": 0.0}):
        with pytest.raises(ConfigError):
            RewardTraining(**wrong)
    assert command(["reward-model", "nowhere", "--model", "x", "--out", "y"]) == 2


async def test_it_grades_many_groups_at_once_beside_a_rule(folder: Path) -> None:
    learned = RewardModel(folder=folder)
    parts = {"correct": (0.0, NumericMatch()), "learned": (1.0, learned)}
    verifier = Weighted(parts=parts, decides="correct")
    asked = [problem(f"{n}?", n, id="t") for n in range(8)]
    graded = await asyncio.gather(*(verifier.grade(p, [said("3"), said("x")], None) for p in asked))
    assert [g[0].passed for g in graded] == [n == 3 for n in range(8)]
    assert all(0 < (v.reward or 0) < 1 for g in graded for v in g)
