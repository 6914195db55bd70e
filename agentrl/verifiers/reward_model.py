"""Answers scored by a trained model: a transformers sequence classifier with one label.

`agentrl.learning.reward_model` trains it, by the same reading of prompt and answer as here.
"""

import asyncio
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import exp, isfinite
from pathlib import Path
from typing import Any

from agentrl.errors import ConfigError, VerifierFault
from agentrl.protocols import SandboxProvider
from agentrl.rendering import make_renderer
from agentrl.types import Episode, Message, Messages, Problem, Verdict

_CHARACTERS_A_TOKEN = 16
"""More than tokenizers put in one: a text longer than that in all need not be encoded."""


class AnswerReader:
    """Prompt and answer as a classifier's ids: by its chat template, or as a pair of texts.

    Neither can write control tokens, as in every prompt of agentrl. `tokenizer` gets a padding
    token if it has none.
    """

    def __init__(self, tokenizer: Any, *, max_tokens: int) -> None:
        if tokenizer.pad_token is None:
            tokenizer.pad_token = tokenizer.eos_token
        self.tokenizer = tokenizer
        self.max_tokens = max_tokens
        pairs = tokenizer.num_special_tokens_to_add(pair=True) and not tokenizer.chat_template
        self._renderer = None if pairs else make_renderer(tokenizer)

    def read(self, prompt: Messages, answer: str) -> tuple[int, ...] | None:
        """The ids; None for an empty answer, and where there are more than `max_tokens`."""
        asked = [Message(role=m.role, content=_sendable(m.content)) for m in prompt]
        texts = [*(m.content for m in asked), answer]
        if not answer.strip() or sum(map(len, texts)) > _CHARACTERS_A_TOKEN * self.max_tokens:
            return None
        said = _sendable(answer)
        if self._renderer is None:
            question = "\n\n".join(m.content for m in asked)
            ids = tuple(self.tokenizer(question, said, split_special_tokens=True)["input_ids"])
        else:
            encoded = self.tokenizer.encode(
                said, add_special_tokens=False, split_special_tokens=True
            )
            ids = (*self._renderer.open(asked, ()), *encoded, self.tokenizer.eos_token_id)
        return ids if len(ids) <= self.max_tokens else None

    def scores(self, model: Any, rows: Sequence[Sequence[int]]) -> Any:
        """The logits of the rows, one batch, a float32 tensor [rows] on the model's device."""
        padded = self.tokenizer.pad(
            {"input_ids": [list(row) for row in rows]}, padding_side="right", return_tensors="pt"
        )
        return model(**padded.to(model.device)).logits[:, 0].float()


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardModel:
    """The sigmoid of a classifier's score of prompt and answer: 0 to 1. A ranking: nothing passes.

    `folder` holds a sequence classifier with one label and its tokenizer, as transformers saves
    them; it is loaded at the first answer, onto `device` (default: CUDA if there is one), in the
    dtype it was saved in. The distinct answers of a group are scored in batches of `batch`, in
    their order, without dropout: the same group gets the same rewards, equal answers get equal
    ones. An empty answer, and one that with its prompt is longer than `max_tokens`, gets 0, which
    is below every score; nothing is cut. A score that is not finite is invalid.

    A policy finds what its reward model overrates: train the model anew as the policy moves on,
    and let another verifier decide (`Weighted`). Raises ConfigError when `folder` is no model.
    """

    folder: Path | str
    max_tokens: int = 2048
    batch: int = 16
    device: str | None = None
    _loaded: "_Loaded" = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not (Path(self.folder) / "config.json").is_file():
            raise ConfigError(
                f"RewardModel: {self.folder} is no model folder (it has no config.json); "
                "`agentrl reward-model` trains one"
            )
        if self.max_tokens < 1 or self.batch < 1:
            raise ConfigError("RewardModel: max_tokens and batch must be at least 1")
        object.__setattr__(self, "_loaded", _Loaded(self))

    async def grade(
        self, problem: Problem, episodes: Sequence[Episode], sandboxes: SandboxProvider | None
    ) -> Sequence[Verdict]:
        """One verdict an episode. Raises VerifierFault when the model can't be loaded."""
        answers = [e.trajectory.answer for e in episodes]
        distinct = list(dict.fromkeys(answers))
        found = await asyncio.to_thread(self._loaded.scores, problem.task.prompt, distinct)
        return [_verdict(found[answer]) for answer in answers]


class _Loaded:
    """The model of a verifier, loaded once and used by one thread at a time."""

    def __init__(self, settings: RewardModel) -> None:
        self._settings = settings
        self._lock = threading.Lock()
        self._model: Any = None
        self._reader: AnswerReader | None = None

    def scores(self, prompt: Messages, answers: Sequence[str]) -> Mapping[str, float | None]:
        """The score of each answer; None for one that is empty or too long."""
        with self._lock:
            reader = self._reader or self._load()
            read = {answer: reader.read(prompt, answer) for answer in answers}
            rows = [ids for ids in read.values() if ids is not None]
            logits: list[float] = []
            for start in range(0, len(rows), self._settings.batch):
                part = rows[start : start + self._settings.batch]
                logits += reader.scores(self._model, part).tolist()
        left = iter(logits)
        return {answer: None if ids is None else next(left) for answer, ids in read.items()}

    def _load(self) -> AnswerReader:
        import transformers
        from transformers.utils.import_utils import is_torch_cuda_available

        folder, device = str(self._settings.folder), self._settings.device
        auto: Any = transformers.AutoModelForSequenceClassification
        try:
            tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
            model, info = auto.from_pretrained(
                folder, dtype="auto", local_files_only=True, output_loading_info=True
            )
            self._reader = AnswerReader(tokenizer, max_tokens=self._settings.max_tokens)
            on = device or ("cuda" if is_torch_cuda_available() else "cpu")
            self._model = model.eval().requires_grad_(False).to(on)
        except Exception as error:  # foreign files make the libraries raise anything at all
            raise VerifierFault(f"{folder} can't be loaded: {_in_a_line(error)}") from error
        if info["missing_keys"] or model.config.num_labels != 1:
            self._reader = None
            raise VerifierFault(f"{folder} is no trained sequence classifier with one label")
        model.config.pad_token_id = tokenizer.pad_token_id
        return self._reader


def _verdict(score: float | None) -> Verdict:
    if score is None:
        return Verdict(reward=0.0, note="empty, or too long to be scored")
    if not isfinite(score):
        return Verdict(invalid=f"VerifierFault: the reward model's score is {score}")
    # Never 0, which is kept for what was not scored: exp(700) is still a number.
    return Verdict(reward=1 / (1 + exp(min(-score, 700.0))), note=f"score {score:.4g}")


def _sendable(text: str) -> str:
    """Without halves of surrogate pairs, which tokenizers refuse."""
    return text.encode(errors="replace").decode()


def _in_a_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
