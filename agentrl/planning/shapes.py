"""The shape of a dense decoder: what its floating-point work and its memory follow from."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentrl.config import ModelSection
from agentrl.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """A decoder with gated feed-forward layers (Llama, Qwen 2 and 3, …)."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    feed_forward: int
    vocab: int
    tied: bool

    @property
    def body(self) -> int:
        """Weights of the layers: each is one multiply-add for a token."""
        attention = 2 * self.hidden * self.head_dim * (self.heads + self.kv_heads)
        return self.layers * (attention + 3 * self.hidden * self.feed_forward)

    @property
    def head(self) -> int:
        """Weights of the output head."""
        return self.hidden * self.vocab

    @property
    def parameters(self) -> int:
        """All weights (norms and biases, below 0.1 %, are left out)."""
        return self.body + self.head * (1 if self.tied else 2)

    def kv_bytes(self, value_bytes: int) -> int:
        """Cache of one token."""
        return 2 * self.layers * self.kv_heads * self.head_dim * value_bytes

    def attention_flops(self, seen: float) -> float:
        """Work of one token's attention over `seen` tokens, forward."""
        return 4 * self.layers * self.heads * self.head_dim * seen


# layers, hidden, heads, kv heads, head dim, feed-forward, vocabulary, tied: from their config.json
KNOWN = {
    name: ModelShape(
        layers=row[0],
        hidden=row[1],
        heads=row[2],
        kv_heads=row[3],
        head_dim=row[4],
        feed_forward=row[5],
        vocab=row[6],
        tied=tied,
    )
    for name, row, tied in (
        ("smollm2-135m", (30, 576, 9, 3, 64, 1536, 49152), True),
        ("qwen3-0.6b", (28, 1024, 16, 8, 128, 3072, 151936), True),
        ("qwen2.5-1.5b", (28, 1536, 12, 2, 128, 8960, 151936), True),
        ("qwen2.5-3b", (36, 2048, 16, 2, 128, 11008, 151936), True),
        ("qwen2.5-7b", (28, 3584, 28, 4, 128, 18944, 152064), False),
        ("qwen2.5-32b", (64, 5120, 40, 8, 128, 27648, 152064), False),
        ("qwen3-8b", (36, 4096, 32, 8, 128, 12288, 151936), False),
        ("qwen3-32b", (64, 5120, 64, 8, 128, 25600, 151936), False),
        ("deepseek-math-7b", (30, 4096, 32, 32, 128, 11008, 102400), False),
    )
}


def find_shape(model: ModelSection) -> ModelShape:
    """The shape of the policy: from its folder, the table of well-known models, or the hub.

    Raises ConfigError when the model is not to be had or is no dense decoder.
    """
    if model.path == "tiny":
        return _tiny(model)
    file = Path(model.path) / "config.json"
    if file.is_file():
        return _from_config(_read(file), str(file))
    name = model.path.rpartition("/")[2].lower()
    known = [key for key in KNOWN if name == key or name.startswith(f"{key}-")]
    if known:
        return KNOWN[max(known, key=len)]
    return _from_hub(model.path)


def _tiny(model: ModelSection) -> ModelShape:
    from agentrl.models import tiny_tokenizer

    heads = max(1, model.tiny_hidden // 32)
    return ModelShape(
        layers=model.tiny_layers,
        hidden=model.tiny_hidden,
        heads=heads,
        kv_heads=heads,
        head_dim=model.tiny_hidden // heads,
        feed_forward=4 * model.tiny_hidden,
        vocab=len(tiny_tokenizer()),
        tied=True,
    )


def _read(file: Path) -> dict[str, Any]:
    try:
        tree: Any = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file}: {' '.join(str(error).split())}") from None
    if not isinstance(tree, dict):
        raise ConfigError(f"{file}: it is no model configuration")
    return tree


def _from_hub(name: str) -> ModelShape:
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(name)
    except Exception as error:  # foreign files make the library raise anything at all
        reason = " ".join(str(error).split())[:120]
        raise ConfigError(
            f"model.path: the shape of {name} is not known ({reason}); name its folder, or one of "
            f"{', '.join(KNOWN)}"
        ) from None
    return _from_config(config.to_dict(), name)


def _from_config(tree: dict[str, Any], where: str) -> ModelShape:
    if any("expert" in key for key in tree):
        raise ConfigError(f"{where}: a mixture of experts can't be planned")
    try:
        heads, hidden = int(tree["num_attention_heads"]), int(tree["hidden_size"])
        return ModelShape(
            layers=int(tree["num_hidden_layers"]),
            hidden=hidden,
            heads=heads,
            kv_heads=int(tree.get("num_key_value_heads") or heads),
            head_dim=int(tree.get("head_dim") or hidden // heads),
            feed_forward=int(tree["intermediate_size"]),
            vocab=int(tree["vocab_size"]),
            tied=bool(tree.get("tie_word_embeddings", True)),
        )
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        raise ConfigError(f"{where}: it is no configuration of a dense decoder: {error}") from None
