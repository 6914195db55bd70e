"""What the family `reasoning` asks in a killable process: which texts a reasoning-gym scorer takes.

A question is `[family, entry, texts]`, the entry pickled and in base64 (it comes from our own
generator). The answer is one boolean a text, true for a full score; or null when the entry's own
answer does not get one. From then on no code may be run and no program started: a
scorer that evaluates its input as Python raises, and the text is worth nothing.
"""

import base64
import pickle
import sys
from importlib import import_module
from typing import Any

FORBIDDEN = frozenset(
    ("exec", "os.system", "subprocess.Popen", "os.exec", "os.fork", "socket.connect")
)


def load() -> None:
    """Import the library once."""
    import_module("reasoning_gym")


def answer(question: tuple[str, str, list[str]] | list[Any]) -> list[bool] | None:
    """Whether each text gets the full score; None if the gold does not."""
    import reasoning_gym

    family, packed, texts = question
    entry = pickle.loads(base64.b64decode(packed))
    dataset: Any = reasoning_gym.create_dataset(family, seed=0, size=1)
    if not _full(dataset, entry, str(entry["answer"])):
        return None
    sys.addaudithook(_refuse)
    return [_full(dataset, entry, text) for text in texts]


def _full(dataset: Any, entry: Any, text: str) -> bool:
    try:
        score = float(dataset.score_answer(text, entry))
    except Exception:  # scorers raise anything at all on text that they did not expect
        return False
    return score == 1.0


def _refuse(event: str, arguments: Any) -> None:
    if event in FORBIDDEN:
        raise PermissionError(f"a scorer must not {event}")
