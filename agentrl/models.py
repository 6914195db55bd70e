"""The policy's model and tokenizer: a folder, a hub name, or the built-in tiny transformer."""

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    set_seed,
)

from agentrl.config import ModelSection
from agentrl.errors import ConfigError

ROLES = ("<|system|>", "<|user|>", "<|assistant|>", "<|tool|>")
TAGS = ("python", "search", "tool_call", "think", "answer")
TINY_TEMPLATE = (
    # The tiny policy learns its tools from traces: their schemas would be most of its context.
    "{% if tools %}{% endif %}"
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """One token for each byte (any text round-trips), one for each role mark and tool tag."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|end|>", pad_token="<|pad|>"
    )
    tags = [form for tag in TAGS for form in (f"<{tag}>", f"</{tag}>")]
    fast.add_special_tokens({"additional_special_tokens": [*ROLES, *tags]})
    fast.chat_template = TINY_TEMPLATE
    return fast


def tiny_model(
    tokenizer: PreTrainedTokenizerBase, *, layers: int, hidden: int, context_tokens: int, seed: int
) -> PreTrainedModel:
    """A small Llama with random weights drawn from `seed`."""
    set_seed(seed)
    ids: dict[str, int] = tokenizer.get_vocab()
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=hidden,
            intermediate_size=4 * hidden,
            num_hidden_layers=layers,
            num_attention_heads=max(1, hidden // 32),
            num_key_value_heads=max(1, hidden // 32),
            max_position_embeddings=context_tokens,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=ids["<|end|>"],
            pad_token_id=ids["<|pad|>"],
        )
    )


def load_policy(
    section: ModelSection, *, context_tokens: int, seed: int
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model that `section` names, on its device and in its dtype, and its tokenizer.

    Raises ConfigError in one line when there is no such model.
    """
    device = _device(section.device)
    dtype = getattr(torch, section.dtype)
    if section.path == "tiny":
        tokenizer = tiny_tokenizer()
        model = tiny_model(
            tokenizer,
            layers=section.tiny_layers,
            hidden=section.tiny_hidden,
            context_tokens=context_tokens,
            seed=seed,
        )
        built: Any = model
        return built.to(device=device, dtype=dtype), tokenizer
    tokenizer = load_tokenizer(section.path)
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(section.path, dtype=dtype)
        return loaded.to(device), tokenizer
    except Exception as error:  # foreign files make the libraries raise anything at all
        raise _unusable(section.path, error) from error


def load_tokenizer(path: str) -> PreTrainedTokenizerBase:
    """The tokenizer of a model folder or hub name, or of "tiny". Raises ConfigError in one line."""
    if path == "tiny":
        return tiny_tokenizer()
    if _is_local(path) and not Path(path).exists():
        raise ConfigError(
            f"model.path: there is no folder {path}; `agentrl list models` shows what there is"
        )
    try:
        return AutoTokenizer.from_pretrained(path)
    except Exception as error:  # as above
        raise _unusable(path, error) from error


def _unusable(path: str, error: Exception) -> ConfigError:
    folder = Path(path)
    if folder.is_dir():
        known = (folder / "config.json").exists()
        reason = _reason(error) if known else "it has no config.json"
        return ConfigError(f"model.path: no usable model in {path}: {reason}")
    if folder.exists():
        return ConfigError(f"model.path: {path} is a file: name the model's folder")
    return ConfigError(
        f"model.path: there is no folder {path}, and no model of this name can be had "
        f"({_reason(error)})"
    )


def _is_local(path: str) -> bool:
    """Whether it can only be a folder: a hub is not asked for models/x, which may take minutes."""
    first = Path(path).parts[:1]
    many = len(Path(path).parts) > 2 or path.startswith((".", "/", "~"))
    return many or first == ("models",) or (len(Path(path).parts) == 2 and Path(*first).is_dir())


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def _device(name: str) -> torch.device:
    """The device of this name, tried by a number that goes there and back."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.ones(1).to(device).item()
    except (RuntimeError, AssertionError) as error:
        reason = " ".join(str(error).split())[:200]
        raise ConfigError(
            f"model.device: {name!r} can't be used; try cpu, cuda or auto ({reason})"
        ) from None
    return device
