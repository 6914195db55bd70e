"""What sharing a group's prompt gains, beside what counting tokens says it should.

python benchmarks/prefix.py [--layers 6 --hidden 576 --prompt 1024 --response 256 --size 8]
"""

import argparse
import time
from random import Random

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from agentrl.algorithms import AlgorithmConfig
from agentrl.config import LearnerSection
from agentrl.learning.batch import Batch, collate
from agentrl.learning.learner import PolicyLearner
from agentrl.types import (
    ActionTokens,
    Ending,
    Group,
    ObservationTokens,
    Trajectory,
    Turn,
    Verdict,
    assistant,
    user,
)

VOCAB = 2048


def batch_of(prompt: int, response: int, size: int, algorithm: AlgorithmConfig) -> Batch:
    draw = Random(0)
    asked = tuple(draw.randrange(VOCAB) for _ in range(prompt))
    members = []
    for member in range(size):
        ids = tuple(draw.randrange(VOCAB) for _ in range(response))
        action = ActionTokens(
            token_ids=ids, logprobs=(-1.0,) * response, versions=(0,) * response, finish="stop"
        )
        observed = ObservationTokens(token_ids=asked)
        turn = Turn(observation=observed, action=action, message=assistant(""))
        members.append(
            Trajectory(
                id=str(member), task_id="t", member=member, seed=0, prompt=(user("?"),),
                turns=(turn,), ending=Ending.ANSWERED,
            )
        )  # fmt: skip
    verdicts = tuple(Verdict(reward=float(member % 2)) for member in range(size))
    return collate([Group(task_id="t", trajectories=tuple(members), verdicts=verdicts)], algorithm)


def seconds(given: argparse.Namespace, batch: Batch, algorithm: AlgorithmConfig, share: bool):
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCAB, hidden_size=given.hidden, intermediate_size=given.hidden * 8 // 3,
            num_hidden_layers=given.layers, num_attention_heads=given.hidden // 64,
            num_key_value_heads=given.hidden // 192, max_position_embeddings=4096,
        )
    ).to(given.device)  # fmt: skip
    section = LearnerSection(lr=1e-6, micro_batch_tokens=1 << 20, share_prefixes=share)
    learner = PolicyLearner(model, learner=section, algorithm=algorithm)
    times = []
    for _ in range(given.rounds + 1):
        began = time.perf_counter()
        stats = learner.update(batch)
        times.append(time.perf_counter() - began)
    return min(times[1:]), stats["grad_norm"]


def main() -> None:
    parser = argparse.ArgumentParser()
    sizes = {"layers": 6, "hidden": 576, "prompt": 1024, "response": 256, "size": 8, "rounds": 2}
    for name, value in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    given = parser.parse_args()
    algorithm = AlgorithmConfig(preset="dr-grpo", length_tokens=(given.response, 0))
    batch = batch_of(given.prompt, given.response, given.size, algorithm)
    plain, norm = seconds(given, batch, algorithm, share=False)
    shared, same = seconds(given, batch, algorithm, share=True)
    formula = given.size * (given.prompt + given.response)
    formula /= given.prompt + given.size * given.response
    print(f"plain {plain:.2f} s, shared {shared:.2f} s: {plain / shared:.2f} x")
    print(f"tokens say {formula:.2f} x: {plain / shared / formula:.0%} of it")
    print(f"gradient norms {norm:.6g} and {same:.6g}")


if __name__ == "__main__":
    main()
