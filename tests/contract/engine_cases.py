"""Learners and models that the contracts of several engines are checked with."""

from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from agentrl.testing.engine import EngineKit
from agentrl.types import ActionTokens


class PlainLearner:
    """A learner that never learns, scored by one plain forward over the whole sequence."""

    def __init__(self, model: PreTrainedModel, version: int) -> None:
        self.model, self.version = model, version

    def update(self, batch: object) -> Mapping[str, float]:
        raise NotImplementedError

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        yield from self.model.named_parameters()

    @torch.no_grad()
    def logprobs(self, token_ids: Sequence[int], temperature: float) -> Sequence[float]:
        logits_TV = self.model(torch.tensor([token_ids])).logits[0, :-1] / temperature
        targets_T1 = torch.tensor(token_ids[1:])[:, None]
        return torch.log_softmax(logits_TV, -1).gather(-1, targets_T1)[:, 0].tolist()


class Altered(PlainLearner):
    """A learner that publishes something else than it computes with."""

    def __init__(self, model: PreTrainedModel, weights: Iterable[tuple[str, Tensor]]) -> None:
        super().__init__(model, 9)
        self.given = list(weights)

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        yield from self.given


def with_fixed_logits(model: PreTrainedModel, logits: Sequence[float]) -> PreTrainedModel:
    """Make a Llama's residual stream all ones, so that the rows of its (untied) head are logits."""
    width: int = model.config.hidden_size
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "o_proj" in name or "down_proj" in name:
                weight.zero_()
        model.get_input_embeddings().weight.fill_(1.0)
        padded = torch.full((model.config.vocab_size,), -1e4)
        padded[: len(logits)] = torch.tensor(logits)
        model.get_output_embeddings().weight.copy_((padded / width)[:, None].expand(-1, width))
    return model


def gap(
    learner: PlainLearner, prompt: Sequence[int], action: ActionTokens, temperature: float = 1.0
) -> float:
    """The largest difference (nats) between an action's logprobs and the learner's."""
    scores = learner.logprobs([*prompt, *action.token_ids], temperature)[len(prompt) - 1 :]
    assert action.logprobs is not None
    return max(abs(a - b) for a, b in zip(action.logprobs, scores, strict=True))


def scored_by_the_version_of_each_token(
    tools: EngineKit, prompt: Sequence[int], action: ActionTokens, tolerance: float
) -> None:
    """An action across a publish from version 3 to 4: each token by the weights that drew it."""
    ids = [*prompt, *action.token_ids]
    scores = {
        learner.version: learner.logprobs(ids, 1.0)[len(prompt) - 1 :]
        for learner in (tools.before, tools.after)
    }
    assert action.logprobs is not None and set(action.versions) == {3, 4}
    for place, (version, logprob) in enumerate(zip(action.versions, action.logprobs, strict=True)):
        assert abs(scores[version][place] - logprob) < tolerance, (place, version)
