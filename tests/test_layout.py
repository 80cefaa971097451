"""The order of the house: which module imports which, how long files are, and that parts are not told apart by type."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from dataclasses import fields
from functools import cache
from pathlib import Path

import pytest

import kvjax
from kvjax import policy
from kvjax.cache import Entries
from kvjax.methods import registry
from kvjax.policy import Effects, Layout, Needs, Part

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = {"kvjax": ROOT / "kvjax", "kvjax.models": ROOT / "models", "kvjax.pallas_kernels": ROOT / "pallas_kernels"}
LONGEST = 350
PROTOCOLS = (
    policy.Part,
    policy.Score,
    policy.Budget,
    policy.AllocatedBudget,
    policy.Select,
    policy.Merge,
    policy.Storage,
)


@cache
def modules() -> dict[str, Path]:
    """The files of the library by module name, each once: the links in kvjax/ are not followed."""
    found = {}
    for package, folder in FOLDERS.items():
        for path in sorted(folder.rglob("*.py")):
            inside = path.relative_to(folder)
            if inside.parts[0] in ("models", "pallas_kernels"):
                continue
            parts = inside.with_suffix("").parts
            found[".".join((package, *(parts[:-1] if parts[-1] == "__init__" else parts)))] = path
    return found


def at_run_time(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes that run when a module is imported or one of its functions is called: not those for type checkers."""
    if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
        for statement in node.orelse:
            yield from at_run_time(statement)
        return
    yield node
    for child in ast.iter_child_nodes(node):
        yield from at_run_time(child)


def imports(name: str, source: str, known: set[str], is_package: bool) -> set[str]:
    """The modules of `known` that a module imports at run time, anywhere in it."""
    found = set()
    package = name if is_package else name.rpartition(".")[0]
    for node in at_run_time(ast.parse(source)):
        if isinstance(node, ast.Import):
            targets = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) + 1 - node.level] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            targets = [f"{base}.{alias.name}" if f"{base}.{alias.name}" in known else base for alias in node.names]
        else:
            continue
        found |= {target for target in targets if target in known}
    return found - {name}


@cache
def graph() -> dict[str, set[str]]:
    """What each module of the library imports at run time."""
    known = set(modules())
    return {
        name: imports(name, path.read_text(), known, path.name == "__init__.py") for name, path in modules().items()
    }


def circle(edges: dict[str, set[str]]) -> list[str]:
    """A path of imports that ends where it begins; empty if there is none."""
    done: set[str] = set()

    def follow(name: str, path: list[str]) -> list[str]:
        if name in path:
            return [*path[path.index(name) :], name]
        if name not in done:
            for target in sorted(edges[name]):
                if found := follow(target, [*path, name]):
                    return found
            done.add(name)
        return []

    return next(filter(None, (follow(name, []) for name in sorted(edges))), [])


def within(name: str, package: str) -> bool:
    return name == package or name.startswith(f"{package}.")


@pytest.mark.parametrize(
    ("source", "is_package", "expected"),
    [
        ("import kvjax.b", False, {"kvjax.b"}),
        ("from kvjax import b", False, {"kvjax.b"}),
        ("from .b import x", False, {"kvjax.b"}),
        ("from . import b", False, {"kvjax.b"}),
        ("from .b import x", True, {"kvjax.a.b"}),
        ("from .. import b", True, {"kvjax.b"}),
        ("def f():\n    from .b import x", False, {"kvjax.b"}),
        ("if TYPE_CHECKING:\n    from .b import x", False, set()),
        ("if TYPE_CHECKING:\n    pass\nelse:\n    from .b import x", False, {"kvjax.b"}),
        ("import numpy", False, set()),
    ],
)
def test_imports_are_found(source: str, is_package: bool, expected: set[str]) -> None:
    known = {"kvjax", "kvjax.a", "kvjax.b", "kvjax.a.b"}
    assert imports("kvjax.a", source, known, is_package) == expected


def test_circles_are_found() -> None:
    assert circle({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c", "b"]
    assert circle({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []


@pytest.mark.long
def test_no_circle_of_imports() -> None:
    assert len(graph()) > 100
    assert circle(graph()) == []


@pytest.mark.parametrize(
    ("package", "forbidden"),
    [
        ("kvjax.cache", ("kvjax.policy", "kvjax.policies", "kvjax.parts", "kvjax.methods", "kvjax.attend")),
        ("kvjax.policy", ("kvjax.policies", "kvjax.parts", "kvjax.methods", "kvjax.attend")),
        ("kvjax.attend", ("kvjax.policies", "kvjax.parts", "kvjax.methods")),
        ("kvjax.methods", ("kvjax.policies", "kvjax.parts", "kvjax.attend", "kvjax.kv_cache")),
        ("kvjax.engine", ("kvjax.cli", "kvjax.evaluation", "kvjax.generate", "kvjax.stream", "kvjax.methods")),
        ("kvjax.serve", ("kvjax.cli", "kvjax.evaluation", "kvjax.generate", "kvjax.stream", "kvjax.methods")),
        ("kvjax.models", ("kvjax",)),
        ("kvjax.pallas_kernels", ("kvjax",)),
    ],
)
def test_packages_import_nothing_above_them(package: str, forbidden: tuple[str, ...]) -> None:
    """Models know nothing of kvjax but the kernels, which are below them."""
    own = (package, "kvjax.pallas_kernels") if package == "kvjax.models" else (package,)
    found = [
        (name, target)
        for name, targets in graph().items()
        for target in targets
        if within(name, package)
        and not any(within(target, room) for room in own)
        and any(within(target, other) for other in forbidden)
    ]
    assert not found


ORDER = (  # from below, as CONTRIBUTING.md draws them
    *("pallas_kernels", "models", "checks", "runtime", "mesh", "cache", "policy", "attend", "kv_cache", "reading"),
    *("decoding", "extend", "request", "generate", "stream", "prefill_each", "engine", "serve", "cli"),
)


def test_rooms_import_what_lies_below_them() -> None:
    rank = {f"kvjax.{room}": i for i, room in enumerate(ORDER)}

    def room(name: str) -> int | None:
        return rank.get(".".join(name.split(".")[:2]))

    pairs = [(name, target) for name, targets in graph().items() for target in targets]
    assert {room(name) for name in graph()} == {None, *range(len(ORDER))}
    assert not [pair for pair in pairs if None not in (of := tuple(map(room, pair))) and of[0] < of[1]]


def test_the_root_holds_a_dozen_files() -> None:
    assert len(list((ROOT / "kvjax").glob("*.py"))) <= 12


def test_methods_are_imported_by_policies_and_parts_only() -> None:
    users = {name for name, targets in graph().items() if any(within(target, "kvjax.methods") for target in targets)}
    assert {name for name in users if not within(name, "kvjax.methods")} == {"kvjax.policies", "kvjax.parts"}


def test_the_engine_is_used_from_above_only() -> None:
    users = {name for name, targets in graph().items() if any(within(target, "kvjax.engine") for target in targets)}
    above = ("kvjax.engine", "kvjax.cli", "kvjax.evaluation", "kvjax.serve")
    assert {name for name in users if not any(within(name, room) for room in above)} == {"kvjax"}


MODES_OF_THEIR_OWN = (
    "generate",
    "prefill",
    "begin_each",
    "prefill_each",
    "stream",
    "extend",
    "empty_cache",
    "with_room",
)
ON_DISK_AND_AHEAD = ("save_cache", "restore_cache", "plan_cache")
OF_PARAMETERS = ("load", "restore", "save", "save_hf", "shard", "with_gates", "with_statistics")


@pytest.mark.parametrize("name", [*MODES_OF_THEIR_OWN, *ON_DISK_AND_AHEAD, *OF_PARAMETERS])
def test_public_functions_that_compute_set_the_modes_of_jax(name: str) -> None:
    function = ast.parse(inspect.getsource(getattr(kvjax, name))).body[0]
    assert isinstance(function, ast.FunctionDef)
    assert "own_modes()" in map(ast.unparse, function.decorator_list)


def test_files_are_short() -> None:
    lengths = {name: len(path.read_text().splitlines()) for name, path in modules().items()}
    assert not {name: length for name, length in lengths.items() if length > LONGEST}


def part_names() -> set[str]:
    """The names of all classes of parts, those of the language and those of methods."""
    language = {name for name, kind in vars(policy).items() if inspect.isclass(kind) and issubclass(kind, Part)}
    return language | set(registry.parts())


def tells_parts_apart(source: str) -> list[str]:
    """The expressions that ask for the type of a part: isinstance or issubclass of a part's class, or a compared type.

    `type(part).__name__` in an error message is no such expression.
    """
    names, found = part_names(), []
    for node in ast.walk(ast.parse(source)):
        called = node.func.id if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) else None
        if called in ("isinstance", "issubclass"):
            kinds = {
                n.id if isinstance(n, ast.Name) else n.attr
                for n in ast.walk(node.args[1])
                if hasattr(n, "ctx") and not isinstance(n, ast.Tuple)
            }
            if kinds & names:
                found.append(ast.unparse(node))
        elif isinstance(node, ast.Compare | ast.Match):
            asked = [node.left, *node.comparators] if isinstance(node, ast.Compare) else [node.subject]
            if any(isinstance(x, ast.Call) and ast.unparse(x.func) == "type" for x in asked):
                found.append(ast.unparse(node).splitlines()[0])
        if isinstance(node, ast.MatchClass) and ast.unparse(node.cls).rpartition(".")[2] in names:
            found.append(ast.unparse(node))
    return found


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("isinstance(part, Fixed)", 1),
        ("isinstance(part, (int, parts.Fixed))", 1),
        ("isinstance(part, Fixed | Fraction)", 1),
        ("type(part) is Fixed", 1),
        ("match part:\n    case Fixed(): pass", 1),
        ("match type(part):\n    case other: pass", 1),
        ("isinstance(budget, int | float)", 0),
        ("f'{type(part).__name__}'", 0),
        ("part.needs.slotwise", 0),
    ],
)
def test_types_that_are_asked_for_are_found(source: str, found: int) -> None:
    assert len(tells_parts_apart(source)) == found


ALLOWED = {
    "isinstance(self.base, Representatives)",  # an option that is not accepted
    "isinstance(default, Part)",  # text reads the options of a part
    "isinstance(value, Part)",  # the fields of a part within another are checked alike
    "issubclass(value, Part)",  # the registry finds the parts of all methods
}


def test_parts_are_not_told_apart_by_their_types() -> None:
    """Core code and other parts look at what a part declares: `needs`, `layout`, `compares` and `effects`."""
    core = {name: path for name, path in modules().items() if name.count(".") == 1 and path.name != "__init__.py"}
    for package in ("attend", "cache", "methods", "policy"):
        core |= {name: path for name, path in modules().items() if within(name, f"kvjax.{package}")}
    found = {(name, text) for name, path in core.items() for text in tells_parts_apart(path.read_text())}
    assert {text for _, text in found} <= ALLOWED, found


def hooks(protocol: type) -> set[tuple[str, str]]:
    """The public members that a protocol of parts defines, with their signatures; its dataclass fields left out."""
    found = set()
    for name, member in vars(protocol).items():
        if name == "__call__" or not name.startswith("_"):
            if isinstance(member, property):
                found.add((name, protocol.__name__))
            elif callable(member):
                found.add((name, str(inspect.signature(member))))
    return found


def test_protocols_of_parts_are_small() -> None:
    """A hook counts once where protocols share it, such as `check(policy)`, and what a subclass defines anew."""
    found = {protocol.__name__: hooks(protocol) for protocol in PROTOCOLS}
    names = {name for name, _ in found["Budget"]}
    found["AllocatedBudget"] = {hook for hook in found["AllocatedBudget"] if hook[0] not in names}
    assert len(set().union(*found.values())) <= 25, found


def test_parts_declare_few_facts() -> None:
    """What core code reads, and one open set of marks for what parts tell each other."""
    found = {kind.__name__: [field.name for field in fields(kind)] for kind in (Needs, Layout, Effects)}
    assert sum(map(len, found.values())) <= 20, found


@pytest.mark.long
def test_core_code_reads_no_marks() -> None:
    readers = {
        name
        for name, path in modules().items()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and node.attr == "marks"
    }
    assert readers
    assert all(within(name, "kvjax.methods") for name in readers), readers


def marks_in(tree: ast.AST) -> tuple[set[str], set[str]]:
    """The marks that parts set, which are sets assigned to `marks`, and those that they look for in `.marks`."""
    given, asked = set(), set()
    for node in ast.walk(tree):
        targets = [node.arg] if isinstance(node, ast.keyword) else map(ast.unparse, getattr(node, "targets", ()))
        if "marks" in targets:
            sets = (x for x in ast.walk(node) if isinstance(x, ast.Set))
            given |= {ast.literal_eval(name) for one in sets for name in one.elts}
        if isinstance(node, ast.Compare) and ast.unparse(node.comparators[0]).endswith(".marks"):
            asked.add(ast.literal_eval(node.left))
    return given, asked


def test_marks_are_set_and_looked_for_by_the_same_names() -> None:
    """A name that is written wrong would be a fact that nobody sees. The documentation has them all."""
    pairs = [marks_in(ast.parse(path.read_text())) for name, path in modules().items() if "methods" in name]
    given, asked = (set().union(*sets) for sets in zip(*pairs, strict=True))
    documented = (ROOT / "docs" / "extend" / "parts.md").read_text().split("| mark |")[1].split("\n\n")[0]
    assert given == asked == {line.split("`")[1] for line in documented.splitlines() if line.startswith("| `")}


def test_entries_have_few_members() -> None:
    own = {"__len__", "__getitem__", "__iter__"}
    members = {*vars(Entries), *Entries.__annotations__}
    assert len({name for name in members if name in own or not name.startswith("_")}) <= 25, members
