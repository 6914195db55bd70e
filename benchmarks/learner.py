"""Speed of a learner step, beside a plain padded one on the same batch in the same process.

    python benchmarks/learner.py [--rows 64] [--hidden 128] [--layers 4] [--repeat 3]

The padded step is what a straightforward trainer does: rows padded to the longest, logits of every
position, one backward pass. Both take the same gradient (checked first). Prints tokens a second of
both, and the ratio.
"""

import argparse
import time
from collections.abc import Callable
from random import Random

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import LlamaConfig, LlamaForCausalLM

from agentrl.algorithms import AlgorithmConfig
from agentrl.config import LearnerSection
from agentrl.learning.batch import Batch
from agentrl.learning.learner import PolicyLearner


def make_model(args: argparse.Namespace) -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=args.vocab, hidden_size=args.hidden, intermediate_size=4 * args.hidden,
            num_hidden_layers=args.layers, num_attention_heads=4, num_key_value_heads=4,
            max_position_embeddings=4096,
        )
    )  # fmt: skip


def make_batch(args: argparse.Namespace) -> Batch:
    """Tool-using episodes: lengths vary by a factor of ten, two thirds are observations."""
    draw = Random(0)
    lengths = torch.tensor(
        [draw.randint(args.longest // 10, args.longest) for _ in range(args.rows)]
    )
    tokens = int(lengths.sum())
    generator = torch.Generator().manual_seed(0)
    mask = torch.rand(tokens, generator=generator) < 1 / 3
    mask[lengths.cumsum(0) - lengths] = False
    return Batch(
        input_ids=torch.randint(args.vocab, (tokens,), generator=generator),
        lengths=lengths,
        groups=torch.arange(args.rows) // 8,
        action_mask=mask,
        behavior_logprobs=torch.full((tokens,), -5.0),
        advantages=torch.randn(args.rows, generator=generator).repeat_interleave(lengths),
        versions=torch.zeros(tokens, dtype=torch.int64),
        turns=torch.where(mask, 0, -1),
    )


def padded_step(model: LlamaForCausalLM, optimizer: torch.optim.Optimizer, batch: Batch) -> None:
    sizes = batch.lengths.tolist()

    def padded(values: torch.Tensor) -> torch.Tensor:
        return pad_sequence(list(values.split(sizes)), batch_first=True)

    ids, mask, advantages = (
        padded(x) for x in (batch.input_ids, batch.action_mask, batch.advantages)
    )
    attention = padded(torch.ones_like(batch.input_ids))
    logits = model(input_ids=ids, attention_mask=attention, use_cache=False).logits[:, :-1].float()
    logprobs = logits.log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
    ratio = (logprobs - logprobs.detach()).exp()
    objective = torch.minimum(ratio * advantages[:, 1:], ratio.clamp(0.8, 1.28) * advantages[:, 1:])
    loss = -torch.where(mask[:, 1:], objective, 0.0).sum() / mask.sum()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


def fastest(step: Callable[[], object], repeat: int) -> float:
    seconds: list[float] = []
    for _ in range(repeat):
        start = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in (
        ("rows", 64), ("longest", 300), ("hidden", 128), ("layers", 4), ("vocab", 4096),
        ("micro-batch-tokens", 4096), ("repeat", 3),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    batch, plain = make_batch(args), make_model(args)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-5, weight_decay=0.0)
    learner = PolicyLearner(
        make_model(args),
        learner=LearnerSection(lr=1e-5, micro_batch_tokens=args.micro_batch_tokens),
        algorithm=AlgorithmConfig(mismatch="none"),
    )

    def naive() -> None:
        optimizer.zero_grad()
        padded_step(plain, optimizer, batch)

    naive(), learner.update(batch)  # warm-up, and proof that both do the same work
    for one, other in zip(plain.parameters(), learner.model.parameters(), strict=True):
        ours, theirs = learner.optimizer.state[other]["exp_avg"], optimizer.state[one]["exp_avg"]
        assert torch.allclose(ours, theirs, rtol=1e-3, atol=1e-6), "the two gradients differ"

    tokens = int(batch.lengths.sum())
    padding = 1 - tokens / (args.rows * int(batch.lengths.max()))
    slow, fast = fastest(naive, args.repeat), fastest(lambda: learner.update(batch), args.repeat)
    print(f"{args.rows} rows, {tokens} tokens, {padding:.0%} padding if padded")
    print(f"padded  {tokens / slow:10.0f} tokens/s  {slow:8.3f} s a step")
    print(f"agentrl {tokens / fast:10.0f} tokens/s  {fast:8.3f} s a step")
    print(f"ratio   {slow / fast:10.2f}")


if __name__ == "__main__":
    main()
