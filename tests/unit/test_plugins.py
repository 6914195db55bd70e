import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from agentrl.errors import ConfigError, PluginError
from agentrl.plugins import (
    AUTO,
    check_options,
    find_engine,
    find_environment,
    find_sandbox,
    list_plugins,
    open_sandboxes,
    problems_of,
    register,
    registered,
)
from agentrl.testing.fakes import FakeSandboxes
from agentrl.tools import ToolEnvironment, problem
from agentrl.verifiers import ExactMatch


class Everything(ToolEnvironment):
    verifier = ExactMatch()

    @staticmethod
    def problems(split, *, count: int = 2):
        return [problem(f"{split} {i}", str(i)) for i in range(count)]


MINE = (
    "from agentrl.tools import ToolEnvironment, problem\n"
    "from agentrl.verifiers import ExactMatch\n"
    "class Mine(ToolEnvironment):\n"
    "    verifier = ExactMatch()\n"
    "    @staticmethod\n"
    "    def problems(split): return [problem('q', 'a')]\n"
)


def test_options_are_checked_against_the_parameters_of_problems() -> None:
    assert len(problems_of(Everything, "train", {"count": 3})) == 3
    for options, message in [
        ({"cuont": 3}, "did you mean count"),
        ({"count": "many"}, "count: Input should be a valid integer"),
        ({"count": 0}, "no train problems"),
    ]:
        with pytest.raises(ConfigError, match=message):
            problems_of(Everything, "train", options)


def test_environments_are_found_by_name_module_and_file(tmp_path: Path) -> None:
    assert find_environment("calculator").__name__ == "Calculator"
    assert find_environment("agentrl_environments.calculator:Calculator").__name__ == "Calculator"
    own = tmp_path / "my_own_env.py"
    own.write_text(
        "from agentrl.tools import ToolEnvironment, problem\n"
        "from agentrl.verifiers import ExactMatch\n"
        "class Mine(ToolEnvironment):\n"
        "    verifier = ExactMatch()\n"
        "    @staticmethod\n"
        "    def problems(split): return [problem('q', 'a')]\n"
    )
    assert find_environment(str(own)).__name__ == "Mine"


@pytest.mark.parametrize(
    ("reference", "said"),
    [
        ("calculater", "did you mean calculator"),
        ("no.such:Thing", "does not import"),
        ("agentrl.tools:Nope", "has no Nope"),
        ("nope.py", "no such file"),
        ("agentrl.tools:problem", "has no"),
    ],
)
def test_what_can_not_be_found_is_one_line(reference: str, said: str) -> None:
    with pytest.raises(PluginError, match=said) as caught:
        find_environment(reference)
    assert "\n" not in str(caught.value)


def test_a_file_that_does_not_import_is_one_line(tmp_path: Path) -> None:
    bad = tmp_path / "broken_env.py"
    bad.write_text("def f(:\n")
    with pytest.raises(PluginError, match="SyntaxError"):
        find_environment(str(bad))
    assert str(tmp_path) not in sys.path
    with pytest.raises(PluginError, match=r"known sandboxes: .*bwrap"):
        find_sandbox("zzz")
    failing = tmp_path / "failing_env.py"
    failing.write_text("x = 1\n\n1 / 0\n")
    with pytest.raises(PluginError, match=r"ZeroDivisionError: .*failing_env\.py:3"):
        find_environment(str(failing))
    leaving = tmp_path / "leaving_env.py"
    leaving.write_text("raise SystemExit(0)\n")
    with pytest.raises(PluginError, match="SystemExit"):
        find_environment(str(leaving))


def test_a_file_can_be_imported_again_in_a_worker(tmp_path: Path) -> None:
    own = tmp_path / "worker_env.py"
    own.write_text(MINE)
    environment: Any = find_environment(f"{own}:Mine")
    assert environment is find_environment(str(own)), "the same class each time"
    script = tmp_path / "main.py"
    script.write_text(
        "import multiprocessing, sys\n"
        "from agentrl.plugins import find_environment\n"
        "if __name__ == '__main__':\n"
        "    found = find_environment(sys.argv[1])\n"
        "    with multiprocessing.get_context('spawn').Pool(1) as pool:\n"
        "        print(pool.apply(getattr, (found, '__name__')))\n"
    )
    (folder := tmp_path / "elsewhere").mkdir()
    done = subprocess.run(
        [sys.executable, str(script.rename(folder / "main.py")), str(own)],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.stdout.strip() == "Mine", done.stderr


def test_a_file_never_takes_the_place_of_a_module(tmp_path: Path) -> None:
    import json

    for stem in ("json", "numbers", "pytest"):
        own = tmp_path / f"{stem}.py"
        own.write_text(MINE)
        with pytest.raises(PluginError, match="rename the file"):
            find_environment(str(own))
    assert sys.modules["json"] is json
    first, second = tmp_path / "a" / "twice_env.py", tmp_path / "b" / "twice_env.py"
    for own in (first, second):
        own.parent.mkdir()
        own.write_text(MINE)
    find_environment(str(first))
    with pytest.raises(PluginError, match="rename the file"):
        find_environment(str(second))
    odd = tmp_path / "1.5.py"
    odd.write_text(MINE)
    with pytest.raises(PluginError, match="file name"):
        find_environment(str(odd))
    with pytest.raises(PluginError, match="no such file"):
        find_environment(str(tmp_path / "folder.py"))


def test_a_file_with_two_environments_asks_which(tmp_path: Path) -> None:
    own = tmp_path / "pair_env.py"
    own.write_text(MINE + MINE.replace("Mine", "Other").split("\n", 2)[2])
    with pytest.raises(PluginError, match="Mine, Other"):
        find_environment(str(own))
    assert find_environment(f"{own}:Other").__name__ == "Other"
    empty = tmp_path / "empty_env.py"
    empty.write_text("x = 1\n")
    with pytest.raises(PluginError, match="nothing with"):
        find_environment(str(empty))


def test_a_name_is_registered_by_one_call() -> None:
    register("environment", "unit-everything", Everything)
    register("environment", "unit-everything", Everything)
    assert find_environment("unit-everything") is Everything
    assert "unit-everything" in list_plugins("environment")
    assert "unit-everything" in registered("agentrl.environments")
    with pytest.raises(PluginError, match="choose another"):
        register("environment", "unit-everything", object())
    with pytest.raises(PluginError, match="choose another"):
        register("sandbox", "bwrap", object())
    with pytest.raises(PluginError, match="did you mean unit-everything"):
        find_environment("unit-everythin")


def test_engines_and_sandboxes_are_found_by_name() -> None:
    assert find_engine("transformers").__name__ == "TransformersEngine"
    assert find_sandbox("agentrl.testing.fakes:FakeSandboxes").__name__ == "FakeSandboxes"
    with pytest.raises(PluginError, match="there is no engine 'vlm'; did you mean vllm"):
        find_engine("vlm")
    with pytest.raises(PluginError, match="no load"):
        find_engine("agentrl.testing.fakes:FakeSandboxes")


def test_options_are_held_against_the_plugin() -> None:
    engine = find_engine("vllm")
    check_options(engine, {"kv_cache_mb": 512, "gpu_memory_share": 0.3}, where="engine.options")
    cases = {"kv_cache": (5, "did you mean kv_cache_mb"), "kv_cache_mb": ("5 GB", "integer")}
    for option, (value, said) in cases.items():
        with pytest.raises(ConfigError, match=f"engine.options.{option}: .*{said}"):
            check_options(engine, {option: value}, where="engine.options")


def test_without_vllm_the_engine_says_what_to_install() -> None:
    """Everything else imports, and the answer is one line, before any model is loaded twice."""
    code = """
import sys
sys.modules["vllm"] = None
import agentrl.build
from agentrl.engines.vllm.engine import VllmEngine
from agentrl.errors import ConfigError
try:
    VllmEngine(None)
except ConfigError as error:
    print(error)
"""
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "agentrl[vllm-cpu]" in out.stdout and out.stdout.count("\n") == 1, out.stdout


def test_a_sandbox_is_opened_with_its_own_options() -> None:
    fakes = "agentrl.testing.fakes:FakeSandboxes"
    assert open_sandboxes(fakes, {"delay_s": 0.5}).describe() == {"backend": "fake"}
    with pytest.raises(ConfigError, match="deley_s"):
        open_sandboxes(fakes, {"deley_s": 0.5})
    assert open_sandboxes("auto").describe()["backend"] in AUTO
    with pytest.raises(ConfigError, match="options are a backend"):
        open_sandboxes("auto", {"runtime": "runsc"})


def test_a_backend_that_marks_what_it_opens_is_told_the_run() -> None:
    class Marking(FakeSandboxes):
        def __init__(self, *, run_id: str = "") -> None:
            super().__init__()
            self.run_id = run_id

    register("sandbox", "unit-marking", Marking)
    opened = open_sandboxes("unit-marking", run_id="/runs/first")
    assert isinstance(opened, Marking)
    assert opened.run_id == "/runs/first"


def test_an_environment_must_be_made_from_its_sandbox() -> None:
    class Odd(Everything):
        def __init__(self, session: Any) -> None:
            super().__init__(sandbox=session)

    register("environment", "unit-odd", Odd)
    with pytest.raises(PluginError, match="sandbox="):
        find_environment("unit-odd")


def test_problems_that_are_none_are_refused() -> None:
    class Method(Everything):
        def problems(self, split):  # type: ignore[override]
            return []

    class Rows(Everything):
        @staticmethod
        def problems(split):
            return [{"prompt": "q"}]

    class Strict(Everything):
        @staticmethod
        def problems(split, *, size: int = 1):
            if size > 5:
                raise ValueError("size is 5 at most")
            return [problem("q", "a"), problem("q", "a")]

    class Broken(Everything):
        @staticmethod
        def problems(split):
            yield problem("q", "a")
            raise KeyError("row 7")

    cases: list[tuple[Any, dict[str, Any], type[Exception], str]] = [
        (Method, {}, PluginError, "first parameter is split"),
        (Rows, {}, PluginError, "gave a dict"),
        (Strict, {"size": 9}, ConfigError, "size is 5 at most"),
        (Strict, {}, ConfigError, "repeat the id"),
        (Broken, {}, PluginError, "KeyError: 'row 7'"),
        (Everything, {"split": "test"}, ConfigError, "split: unknown option"),
    ]
    for environment, options, kind, said in cases:
        with pytest.raises(kind, match=said):
            problems_of(environment, "train", options)
    assert len(problems_of(Broken, "train", {}, limit=1)) == 1, "no further than asked"
