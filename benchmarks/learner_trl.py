"""A learner step beside that of TRL's GRPOTrainer: seconds, tokens/s and peak memory.

    pip install trl && python benchmarks/learner_trl.py [--path models/smollm2-135m] [--repeats 3]

Both take one step (forward, loss, backward, AdamW) on the same ids with the same advantages, each
in a process of its own, in turns, with one thread; seconds are CPU seconds, which a busy machine
hardly changes. TRL's step is what its trainer runs after generation: its own
`_compute_loss` on padded tensors (here nothing is padded), and the optimiser. Cases: one turn of 8
members, and 8 members of 1,024 tokens of which a quarter is sampled (TRL masks the rest as tools').
"""

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch


@dataclass(frozen=True)
class Case:
    prompt: int
    completion: int
    turn: int
    """Tokens of a turn within the completion; a third of them is sampled if there are several."""

    @property
    def sampled(self) -> torch.Tensor:
        """Which of a completion's tokens the policy wrote, bool [completion]."""
        if self.turn == self.completion:
            return torch.ones(self.completion, dtype=torch.bool)
        return torch.arange(self.completion) % self.turn < self.turn // 3


CASES = {
    "one turn, 8 x (256 + 256)": Case(256, 256, 256),
    "turns, 8 x 1,024, 25 % sampled": Case(256, 768, 96),
}
MEMBERS = 8


def ids_of(case: Case, vocab: int) -> torch.Tensor:
    """A prompt that all members share, and completions of their own, [MEMBERS, tokens]."""
    generator = torch.Generator().manual_seed(0)
    prompt = torch.randint(vocab, (1, case.prompt), generator=generator).expand(MEMBERS, -1)
    rest = torch.randint(vocab, (MEMBERS, case.completion), generator=generator)
    return torch.cat([prompt, rest], dim=1)


def advantages() -> torch.Tensor:
    return torch.tensor([1.0, -1.0]).repeat(MEMBERS // 2)


def ours(case: Case, model: Any) -> Callable[[], object]:
    from agentrl.algorithms import AlgorithmConfig
    from agentrl.config import LearnerSection
    from agentrl.learning.batch import Batch
    from agentrl.learning.learner import PolicyLearner

    ids = ids_of(case, model.config.vocab_size)
    mask = torch.cat([torch.zeros(case.prompt, dtype=torch.bool), case.sampled]).repeat(MEMBERS)
    lengths = torch.full((MEMBERS,), ids.shape[1])
    batch = Batch(
        input_ids=ids.reshape(-1),
        lengths=lengths,
        groups=torch.zeros(MEMBERS, dtype=torch.int64),
        action_mask=mask,
        behavior_logprobs=torch.full((ids.numel(),), -10.0),
        advantages=advantages().repeat_interleave(lengths),
        versions=torch.zeros(ids.numel(), dtype=torch.int64),
        turns=torch.where(mask, 0, -1),
    )
    learner = PolicyLearner(
        model,
        learner=LearnerSection(lr=1e-6),
        algorithm=AlgorithmConfig.model_validate({"mismatch": "none"}),
    )
    return lambda: learner.update(batch)


def trl(case: Case, model: Any) -> Callable[[], object]:
    from datasets import Dataset
    from transformers import PreTrainedTokenizerFast
    from trl import GRPOConfig, GRPOTrainer

    tokenizer = _any_tokenizer(PreTrainedTokenizerFast)
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=GRPOConfig(
            output_dir="/tmp/unused",
            per_device_train_batch_size=MEMBERS,
            num_generations=MEMBERS,
            learning_rate=1e-6,
            gradient_checkpointing=False,
            bf16=False,
            use_cpu=True,
            report_to=[],
        ),
        train_dataset=Dataset.from_dict({"prompt": ["x"] * MEMBERS}),
        processing_class=tokenizer,
    )
    trainer.create_optimizer()
    ids = ids_of(case, model.config.vocab_size)
    sampled = case.sampled.int().expand(MEMBERS, -1)
    inputs = {
        "prompt_ids": ids[:, : case.prompt],
        "prompt_mask": torch.ones(MEMBERS, case.prompt, dtype=torch.int64),
        "completion_ids": ids[:, case.prompt :],
        "completion_mask": torch.ones(MEMBERS, case.completion, dtype=torch.int64),
        "tool_mask": sampled,
        "advantages": advantages(),
        "num_items_in_batch": sampled.sum(),
    }
    trainer.current_gradient_accumulation_steps = 1

    def step() -> None:
        trainer.model.train()
        trainer._compute_loss(trainer.model, inputs).backward()
        torch.nn.utils.clip_grad_norm_(trainer.model.parameters(), 1.0)
        trainer.optimizer.step()
        trainer.optimizer.zero_grad(set_to_none=True)

    return step


def _any_tokenizer(kind: Any) -> Any:
    """TRL wants one; no step reads it."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    words = Tokenizer(WordLevel({"x": 0, "<eos>": 1}, unk_token="x"))
    return kind(tokenizer_object=words, eos_token="<eos>", pad_token="<eos>")


def load(path: str) -> Any:
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

    if path:
        return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    torch.manual_seed(0)
    return LlamaForCausalLM(  # the shape of SmolLM2-135M
        LlamaConfig(
            vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30,
            num_attention_heads=9, num_key_value_heads=3, tie_word_embeddings=True,
            max_position_embeddings=2048,
        )
    )  # fmt: skip


def measure(side: str, case: Case, path: str, repeats: int) -> dict[str, Any]:
    """In this process: CPU seconds of each step after a first, and the most memory it took (MB)."""
    torch.set_num_threads(1)
    step = {"agentrl": ours, "trl": trl}[side](case, load(path))
    step()
    took: list[float] = []
    for _ in range(repeats):
        begun = time.process_time()
        step()
        took.append(time.process_time() - begun)
    return {"seconds": took, "mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024}


def apart(side: str, name: str, args: argparse.Namespace) -> dict[str, Any]:
    """The same, in a process of its own."""
    command = [sys.executable, str(Path(__file__)), "--child", side, "--case", name]
    command += ["--path", args.path, "--repeats", str(args.repeats)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{side} failed: {done.stderr.strip().splitlines()[-1]}")
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--path", default="", help="model folder; default: random, 135M")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--case", choices=CASES)
    parser.add_argument("--child", choices=("agentrl", "trl"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        print(json.dumps(measure(args.child, CASES[args.case], args.path, args.repeats)))
        return
    print(f"{'case':34}{'':10}{'s':>8}{'tokens/s':>10}{'peak MB':>10}")
    for name in [args.case] if args.case else CASES:
        tokens = MEMBERS * (CASES[name].prompt + CASES[name].completion)
        found = {side: apart(side, name, args) for side in ("trl", "agentrl")}
        took = {side: statistics.median(one["seconds"]) for side, one in found.items()}
        for side, one in found.items():
            print(
                f"{name:34}{side:10}{took[side]:8.2f}{tokens / took[side]:10.0f}{one['mb']:10.0f}"
            )
        speed, memory = took["trl"] / took["agentrl"], found["agentrl"]["mb"] / found["trl"]["mb"]
        print(f"{'':34}{'ratio':10}{speed:8.2f}{'':10}{memory:10.2f}")


if __name__ == "__main__":
    main()
