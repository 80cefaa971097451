"""The package as it is installed: the files of a wheel, imports without optional packages, and linked folders."""

import ast
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml

import kvjax

ROOT = Path(__file__).resolve().parents[1]
LINKED = ("models", "pallas_kernels")  # folders that kvjax/ links to


def files(folder: Path) -> Iterator[Path]:
    """All files below `folder`, links not followed, without caches and hidden files."""
    for path in folder.rglob("*"):
        parts = path.relative_to(folder).parts
        if path.is_file() and not any(part.startswith(".") or part == "__pycache__" for part in parts):
            yield path


def python_files() -> list[Path]:
    skipped = {"build", "dist"}
    folders = [path for path in ROOT.iterdir() if path.is_dir() and path.name not in skipped and path.name[0] != "."]
    found = [path for folder in folders for path in files(folder) if path.suffix == ".py"]
    return sorted(path.relative_to(ROOT) for path in found)


def run_python(code: str, cwd: Path, **environment: str) -> str:
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=cwd, env=os.environ | environment, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def run_module(*arguments: object) -> None:
    result = subprocess.run([sys.executable, "-m", *map(str, arguments)], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the tree, to build in."""
    source = tmp_path_factory.mktemp("source") / "kvjax"
    ignore = shutil.ignore_patterns(".*", "build", "dist", "*.egg-info", "__pycache__", "demo_output")
    shutil.copytree(ROOT, source, symlinks=True, ignore=ignore)
    return source


@pytest.fixture(scope="module")
def built(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a source distribution of the tree, and the wheel that was built from it."""
    dist = tmp_path_factory.mktemp("dist")
    run_module("build", "--no-isolation", "--outdir", dist, tree)
    assert [len(list(dist.glob(f"kvjax-{kvjax.__version__}{end}"))) for end in (".tar.gz", "-*.whl")] == [1, 1]
    return dist


@pytest.fixture(scope="module")
def installed(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """kvjax in a folder of its own, from the wheel of the source distribution."""
    target = tmp_path_factory.mktemp("target")
    (wheel,) = built.glob("*.whl")
    run_module("pip", "install", "--quiet", "--no-deps", "--no-index", "--target", target, wheel)
    return target


@pytest.fixture(scope="module")
def outside(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The package of tests/outside in a folder of its own, from a wheel."""
    folder = tmp_path_factory.mktemp("outside")
    shutil.copytree(ROOT / "tests" / "outside", folder / "source", ignore=shutil.ignore_patterns("__pycache__"))
    run_module("build", "--wheel", "--no-isolation", "--outdir", folder / "dist", folder / "source")
    (wheel,) = (folder / "dist").glob("*.whl")
    run_module("pip", "install", "--quiet", "--no-deps", "--no-index", "--target", folder / "target", wheel)
    return folder / "target"


@pytest.fixture
def with_outside(installed: Path, outside: Path, tmp_path: Path) -> Callable[[str], tuple[str, str]]:
    """Runs code with both packages. The result is what it prints, and what it warns of."""

    def run(code: str) -> tuple[str, str]:
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (installed, outside)))}
        result = subprocess.run(
            [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True
        )
        assert result.returncode == 0, result.stderr
        return result.stdout, result.stderr

    return run


@pytest.mark.long
def test_wheel_installs_no_top_level_module_but_kvjax_and_its_command(installed: Path) -> None:
    names = {path.name for path in installed.iterdir() if path.suffix != ".dist-info"}
    assert names - {"__pycache__"} == {"kvjax", "kvjax_command.py", "bin"}


@pytest.mark.long
def test_wheel_holds_every_file_of_the_package_and_no_links(installed: Path) -> None:
    expected = {path.relative_to(ROOT) for path in files(ROOT / "kvjax") if not path.is_symlink()}
    expected |= {"kvjax" / path.relative_to(ROOT) for name in LINKED for path in files(ROOT / name)}
    got = {path.relative_to(installed) for path in files(installed / "kvjax")}
    assert got == expected
    assert not [path for path in installed.rglob("*") if path.is_symlink()]


def test_source_distribution_has_no_links_and_no_tests(built: Path) -> None:
    """Linked folders lie in it once, below kvjax/; what a checkout has beside the package stays out."""
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        members = {Path(*Path(member.name).parts[1:]): member for member in archive.getmembers()}
    assert not [path for path, member in members.items() if not (member.isfile() or member.isdir())]
    names = {path.parts[0] for path in members if path.parts}
    assert names == {
        "kvjax", "kvjax_command.py", "kvjax.egg-info", "LICENSE", "README.md", "pyproject.toml", "setup.cfg",
        "MANIFEST.in", "PKG-INFO",
    }  # fmt: skip
    package = {path for path, member in members.items() if path.parts[:1] == ("kvjax",) and member.isfile()}
    expected = {path.relative_to(ROOT) for path in files(ROOT / "kvjax") if not path.is_symlink()}
    assert package == expected | {"kvjax" / path.relative_to(ROOT) for name in LINKED for path in files(ROOT / name)}


@pytest.mark.slow
def test_wheels_of_the_tree_and_of_the_source_distribution_are_equal(built: Path, tree: Path, tmp_path: Path) -> None:
    run_module("build", "--wheel", "--no-isolation", "--outdir", tmp_path, tree)
    contents = []
    for folder in (built, tmp_path):
        (wheel,) = folder.glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            contents.append({name: archive.read(name) for name in archive.namelist()})
    assert contents[0] == contents[1]


@pytest.mark.long
def test_the_version_has_one_source() -> None:
    """`kvjax.__version__`; what describes the project elsewhere agrees."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert (project["dynamic"], "version" in project) == (["version"], False)
    assert (citation["cff-version"], citation["version"]) == ("1.2.0", kvjax.__version__)
    assert (citation["license"], citation["authors"]) == (project["license"], [{"name": "The kvjax developers"}])
    assert run_python("from kvjax.cli import app; app(['--version'])", ROOT) == f"kvjax {kvjax.__version__}"


def test_texts_count_the_presets_that_there_are() -> None:
    texts = {name: (ROOT / name).read_text() for name in ("README.md", "CHANGELOG.md")}
    said = {name: set(re.findall(r"(\d+) presets\b", text)) for name, text in texts.items()}
    assert said["CHANGELOG.md"] == {str(len(kvjax.policies.PRESETS.own))} >= said["README.md"]


@pytest.mark.long
def test_wheel_imports_outside_the_checkout(installed: Path, tmp_path: Path) -> None:
    code = "import kvjax.models as m, kvjax.pallas_kernels as p; print(m.__file__, p.__file__, sep='\\n')"
    imported = run_python(code, cwd=tmp_path, PYTHONPATH=str(installed)).splitlines()
    assert [Path(path).resolve() for path in imported] == [
        (installed / "kvjax" / name / "__init__.py").resolve() for name in LINKED
    ]


@pytest.mark.long
def test_imports_without_torch_and_matplotlib(tmp_path: Path) -> None:
    code = """
import importlib, pkgutil, sys
sys.modules.update(torch=None, matplotlib=None)
import kvjax
for module in pkgutil.walk_packages(kvjax.__path__, "kvjax."):
    if not module.name.endswith(("__main__", "lm_eval_model", "figure", "tunix.rollout")):  # for what they import
        importlib.import_module(module.name)
        print(module.name)
"""
    assert "kvjax.models.decoder" in run_python(code, cwd=tmp_path, PYTHONPATH=str(ROOT)).split()


def forbidden_imports(path: Path, source: str) -> list[str]:
    """Imports that load a second copy of a linked folder, or that lead out of one.

    Two copies of a module mean two pytree types; and imports run one way, from kvjax to the folders it links to.
    """
    linked = path.parts[0] in LINKED
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level:
            # a module in a folder has one level to itself: models/x.py may climb one, models/a/x.py two
            names = ["kvjax"] if linked and node.level >= len(path.parts) else []
            if path.parts[0] == "models" and str(node.module).split(".")[0] == "pallas_kernels":
                names = []  # the one way from a linked folder to the other
        elif isinstance(node, ast.ImportFrom):
            names = [str(node.module)]
        else:
            continue
        top = {name.split(".")[0] for name in names}
        if top & {*LINKED, *(["kvjax"] if linked else [])}:
            found.append(f"{path}:{node.lineno}: {ast.unparse(node)}")
    return found


@pytest.mark.parametrize(
    ("path", "source", "forbidden"),
    [
        ("kvjax/cache.py", "import models", True),
        ("tests/test_cache.py", "from models.config import DecoderConfig", True),
        ("scripts/train.py", "def f():\n    import pallas_kernels.top_tokens as t", True),
        ("models/llama.py", "from kvjax.models import config", True),
        ("models/llama.py", "from .. import policy", True),
        ("models/llama.py", "from ..policy import Policy", True),
        ("models/linear.py", "from ..pallas_kernels import matmul", False),
        ("pallas_kernels/dispatch.py", "from ..models import Decoder", True),
        ("pallas_kernels/top_tokens/triton.py", "from ...cache import KVCache", True),
        ("pallas_kernels/top_tokens/triton.py", "from ..tiles import tile", False),
        ("models/llama.py", "from .config import DecoderConfig", False),
        ("models/llama.py", "import jax.numpy as jnp", False),
        ("kvjax/cache.py", "from kvjax.models import Decoder", False),
        ("kvjax/parts/score.py", "from ..policy import Policy", False),
    ],
)
def test_forbidden_imports_are_found(path: str, source: str, forbidden: bool) -> None:
    assert bool(forbidden_imports(Path(path), source)) == forbidden


@pytest.mark.long
def test_imports_run_one_way() -> None:
    found = [line for path in python_files() for line in forbidden_imports(path, (ROOT / path).read_text())]
    assert not found, "\n".join(found)


def test_files_are_short() -> None:
    paths = python_files()
    assert {path.parts[0] for path in paths} >= {"kvjax", "tests", *LINKED}
    lengths = {str(path): len((ROOT / path).read_text().splitlines()) for path in paths}
    assert not {path: length for path, length in lengths.items() if length > 350}


@pytest.mark.slow
def test_a_preset_is_read_by_text_and_generates(with_outside) -> None:
    said, warned = with_outside("""
import sys, kvjax
from kvjax import policies
assert policies.parse("snapkv:budget=64") and policies.parse(repr(policies.snapkv())) == policies.snapkv()
assert "kvjax_outside" not in sys.modules  # nothing has asked for it
policy = policies.parse("unlike_values:budget=48,threshold=0.3")
assert policies.unlike_values(48, 0.3) == policy == policies.parse(repr(policy))
assert kvjax.parts.UnlikeValues(0.3) == policy.score and "unlike_values" in policies.PRESETS
assert policies.snapkv.__module__ == "kvjax.methods.snapkv" and "broken" not in policies.PRESETS
try:
    policies.parse("unlike_values:threshold=3.0")
except ValueError as error:
    print(error)
params, tokenizer = kvjax.load("demo")
prompt = "the code of anna is lamp . " + "the tall king finds the door . " * 20
out = kvjax.generate(params, prompt, policy=policy, max_new_tokens=4, tokenizer=tokenizer)
cache = kvjax.prefill(params, prompt, policy=policy, tokenizer=tokenizer)
kvjax.save_cache("saved", cache, params)
print(out.cache.length.tolist()[0] > 120, kvjax.restore_cache("saved", params).policy == policy)
""")
    assert said.splitlines()[0] == "unlike_values: threshold=3.0: expected a number in [-1, 1]"
    assert said.splitlines()[1] == "True True"
    assert "'broken' in kvjax.presets of the package kvjax-outside 1.0 is left out: ModuleNotFoundError" in warned
    assert "'snapkv' in kvjax.presets of the package kvjax-outside 1.0 is left out: kvjax has that name" in warned
    assert warned.count("is left out") == 2


@pytest.mark.slow
def test_a_task_is_listed_and_run(with_outside, tmp_path: Path) -> None:
    grid = {
        "title": "outside",
        "model": "demo",
        "tasks": [{"name": "outside/*", "lengths": [64]}],
        "limit": 4,
        "policies": ["full", "unlike_values:budget={budget}"],
        "budgets": [0.5],
        "question": "after",
    }
    (tmp_path / "grid.yaml").write_text(json.dumps(grid))
    said, _ = with_outside("""
import sys
from kvjax.evaluation.tasks import registry
registry.find("demo/needle")
print([task.name for task in registry.find("outside/*")])
import kvjax_command
sys.argv = ["kvjax", "eval", "--config", "grid.yaml", "--out", "results"]
try:
    kvjax_command.main()
except SystemExit as done:
    assert not done.code
""")
    assert said.splitlines()[0] == "['outside/codes']"
    lines = [json.loads(line) for path in tmp_path.glob("results/*.jsonl") for line in path.read_text().splitlines()]
    scored = [line for line in lines if line.get("task") == "outside/codes"]
    assert len(scored) == 8
    assert all(line["scores"].keys() == {"first_word"} for line in scored)


@pytest.mark.slow
def test_a_checkpoint_of_a_family_is_loaded_and_saved(with_outside, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(ROOT / "kvjax" / "demo_model", folder, ignore=shutil.ignore_patterns("gates", "statistics"))
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "outsider", "architectures": ["OutsiderForCausalLM"]}
    (folder / "config.json").write_text(json.dumps(config))
    said, _ = with_outside("""
import json, kvjax, sys
demo, _ = kvjax.load("demo")
assert "kvjax_outside" not in sys.modules
params, _ = kvjax.load("model")
prompt = [list(range(20, 60))]
one, other = (kvjax.generate(p, prompt, max_new_tokens=6).tokens.tolist() for p in (demo, params))
assert one == other
kvjax.save_hf(params, "written")
print(params.config.family, json.load(open("written/config.json"))["architectures"])
""")
    assert said.strip() == "outsider ['OutsiderForCausalLM']"
