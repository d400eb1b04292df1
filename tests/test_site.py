"""The reference of the docs site is complete: each public name and parameter, and which calls are collective.

Run as a script, this writes the table of docs/collectives.md.

The package is read as source, so no test here needs mkdocs, or the libraries that some packages adapt.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PACKAGE = ROOT / "fsdp2_strategy"
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
STRATEGIES = (
    "TrainingStrategy",
    "FSDPV2Strategy",
    "integrations.vitra.VLAFSDPStrategy",
    "integrations.lightrft.LightRFTStrategy",
    "integrations.trl.FSDP2Trainer",
    "integrations.verl.StrategyEngine",
    "integrations.lerobot.script.Accelerator",
)
"""Classes whose every public method says whether it is collective."""

MODULES = ("errors", "integrations.lerobot.script")
"""Public modules that are no packages."""

STATEMENT = re.compile(r"\b(not )?collective\b([^;]*?)(?=;|: |\. |\.$|$)", re.IGNORECASE)
"""The part of a docstring's first paragraph that says whether the call is collective, and under which condition."""


# --- the package, as source ------------------------------------------------------------------------------------------


@cache
def parsed(path):
    return ast.parse(path.read_text())


def file_of(module):
    path = ROOT / module.replace(".", "/")
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def exported(module):
    """Return where each public name of a package is imported from: name -> (module, name there)."""
    tree = parsed(file_of(module))
    imports = {
        alias.asname or alias.name: (node.module, alias.name)
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            names = table_of(tree) if ast.unparse(node.value) == "list(_MODULE_OF)" else ast.literal_eval(node.value)
            return {name: imports.get(name, (module, name)) for name in names}
    if module == "fsdp2_strategy.errors":
        return {node.name: (module, node.name) for node in tree.body if isinstance(node, ast.ClassDef)}
    return {}


def table_of(tree):
    """Return the modules of names that are imported when they are first used."""
    [table] = [n.value for n in tree.body if isinstance(n, ast.Assign) and ast.unparse(n.targets[0]) == "_MODULE_OF"]
    return ast.literal_eval(table)


def packages():
    found = [".".join(path.parent.relative_to(ROOT).parts) for path in PACKAGE.rglob("__init__.py")]
    found += [f"fsdp2_strategy.{module}" for module in MODULES]
    return sorted(name for name in found if exported(name))


@cache
def public():
    """Return the path under which the reference shows each public object, by where the object is defined."""
    found = {}
    for package in sorted(packages(), key=lambda name: name.count(".")):  # the root comes first
        for name in exported(package):
            found.setdefault(defined_at(package, name), f"{package}.{name}")
    return found


def defined_at(module, name):
    """Return the module that defines a name, and its name there; packages may import it from each other."""
    source = exported(module).get(name, (module, name))
    return source if source == (module, name) else defined_at(*source)


def definition(module, name):
    """Return the statement that defines a name, and its docstring."""
    body = parsed(file_of(module)).body
    for number, node in enumerate(body):
        if isinstance(node, (*FUNCTIONS, ast.ClassDef)) and node.name == name and not is_overload(node):
            return node, ast.get_docstring(node)
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if any(isinstance(target, ast.Name) and target.id == name for target in targets):
            following = body[number + 1] if number + 1 < len(body) else None
            value = following.value if isinstance(following, ast.Expr) else None
            return node, value.value if isinstance(value, ast.Constant) and isinstance(value.value, str) else None
    raise AssertionError(f"{module} does not define {name}")


def decorators(node):
    return {ast.unparse(each).split("(")[0] for each in getattr(node, "decorator_list", ())}


def is_overload(node):
    return "overload" in decorators(node)


def is_value(node):
    """Return whether a method is read like an attribute."""
    return bool(decorators(node) & {"property", "cached_property"}) or any("." in each for each in decorators(node) - {
        "contextlib.contextmanager", "torch.no_grad"
    })  # fmt: skip


def methods(node):
    for each in node.body:
        if isinstance(each, FUNCTIONS) and not each.name.startswith("_") and not is_overload(each):
            yield each


def documented():
    """Yield each public object and each public method: its path, its definition, its docstring."""
    for (module, name), path in public().items():
        node, text = definition(module, name)
        yield path, node, text
        if isinstance(node, ast.ClassDef):
            for each in methods(node):
                if not any(decorator.endswith(".setter") for decorator in decorators(each)):
                    yield f"{path}.{each.name}", each, ast.get_docstring(each)


def first_paragraph(text):
    return " ".join((text or "").split("\n\n")[0].split())


# --- the reference ---------------------------------------------------------------------------------------------------


def test_the_reference_has_each_public_name_once():
    pages = [page.read_text() for page in (DOCS / "api").glob("*.md")]
    shown = Counter(path for page in pages for path in re.findall(r"^::: (\S+)$", page, flags=re.MULTILINE))
    assert len(public()) > 100
    assert shown == Counter(public().values())


def test_every_public_name_has_a_docstring_that_begins_with_a_sentence():
    problems = [
        path
        for path, _, text in documented()
        if not re.match(r"\S.*[.:]$", first_paragraph(text)) or first_paragraph(text)[0].isdigit()
    ]
    assert not problems, "\n".join(map(str, problems.items() if isinstance(problems, dict) else problems))


def args_of(text):
    """Return the names of the parameters in a docstring's section Args; None if it has no such section.

    Several parameters may share an entry, as in "a, b: as for `f`"; the site shows them one by one.
    """
    section = re.search(r"^Args:\n((?:(?: .*)?\n)*)", f"{text}\n", flags=re.MULTILINE)
    if section is None:
        return None
    entries = re.findall(r"^    (\*{0,2}\w+(?:,\s+\*{0,2}\w+)*):", section[1], flags=re.MULTILINE)
    return [name for entry in entries for name in re.split(r",\s+", entry)]


def parameters_of(node):
    """Return the names of a function's parameters; of a class, of its constructor or of its fields."""
    if isinstance(node, ast.ClassDef):
        constructor = next((e for e in node.body if isinstance(e, FUNCTIONS) and e.name == "__init__"), None)
        if constructor is None and "dataclass" in {each.split(".")[-1] for each in decorators(node)}:
            return [e.target.id for e in node.body if isinstance(e, ast.AnnAssign)]
        if constructor is None:
            (base,) = (where for where in public() if where[1] == ast.unparse(node.bases[0]))
            return parameters_of(definition(*base)[0])
        node = constructor
    found = [each.arg for each in [*node.args.posonlyargs, *node.args.args]]
    found += [f"*{node.args.vararg.arg}"] if node.args.vararg else []
    found += [each.arg for each in node.args.kwonlyargs]
    found += [f"**{node.args.kwarg.arg}"] if node.args.kwarg else []
    return [name for name in found if name not in ("self", "cls") and not name.lstrip("*").startswith("_")]


def test_a_section_of_arguments_has_each_parameter_once():
    problems = {}
    for path, node, text in documented():
        if isinstance(node, (*FUNCTIONS, ast.ClassDef)) and (names := args_of(text)) is not None:
            expected = parameters_of(node)
            if sorted(names) != sorted(expected):
                problems[path] = sorted({*expected} ^ {*names})
    assert not problems, "\n".join(map(str, problems.items() if isinstance(problems, dict) else problems))


def test_the_navigation_has_each_page_once():
    listed = re.findall(r"(?:: |- )(\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), flags=re.MULTILINE)
    pages = [page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md")]
    assert sorted(page for page in listed if not page.startswith("repository/")) == sorted(pages)


# --- collective calls ------------------------------------------------------------------------------------------------

PAGE = DOCS / "collectives.md"
START, END = "<!-- written by tests/test_site.py -->", "<!-- end of the tables -->"
OF_A_MODEL = {"model", "models", "actor", "parameters", "optimizer", "policy", "loss"}
"""Parameters of the calls that run on the ranks of a model's mesh."""
OTHER_RANKS = {
    "linear_log_probs": "those of `group`",
    "shard_model": "those of `mesh`",
    "gather_and_generate": "those that share an engine",
    "forward_backward_batch": "the model's",
    "prepare_model": "all that train",
    "prepare_models_and_optimizers": "all that train",
    "prepare": "all that train",
    "create_optimizer": "all that train",
    "run_training": "the model's",
    "save_checkpoint": "the model's",
    "load_optimizer_and_scheduler": "the model's",
    "resume_after_prepare": "the model's",
    "rollout.WeightStream.close": "the model's",
    "integrations.lightrft.LightRFTStrategy.moving_average": "the model's",
    "integrations.trl.FSDP2Trainer.save_model": "the model's",
    "integrations.trl.FSDP2Trainer.push_to_hub": "the model's",
    "integrations.verl.StrategyEngine.optimizer_step": "the model's",
    "integrations.verl.StrategyEngine.get_per_tensor_param": "the model's",
    "load_checkpoint": "the model's",
    "clip_grad_norm_": "the model's",
}
"""Ranks of the calls whose parameters do not tell them, by path or by the last part of it."""


def is_collective(text):
    """Return what a docstring says: True, False, a condition as text, or None if it says nothing."""
    found = STATEMENT.search(first_paragraph(text))
    if found is None:
        return None
    further = r"^(,| over| as) .*" if not found[1] else r"^, and .*"
    condition = re.sub(further, "", found[2]).strip(" ,")
    return condition or not found[1]


@cache
def calls():
    """Return the public functions and methods that say whether they are collective: path -> (statement, definition)."""
    found = {}
    for path, node, text in documented():
        if isinstance(node, FUNCTIONS) and not is_value(node) and (statement := is_collective(text)) is not None:
            found[path] = statement, node
    return found


def row_of(path, statement, node):
    name = path.removeprefix("fsdp2_strategy.")
    if statement is False:
        return f"| `{name}` | no | any | nothing happens |"
    condition = "yes" if statement is True else statement.replace("``", "`")
    if "not collective" in first_paragraph(ast.get_docstring(node)):
        return f"| `{name}` | no, {condition} | any | nothing happens at once |"
    ranks = "the model's" if OF_A_MODEL & {*parameters_of(node)} else "all that train"
    ranks = OTHER_RANKS.get(name) or OTHER_RANKS.get(node.name, ranks)
    is_named = "collective" in decorators(node) or "add_note" in ast.unparse(node)
    return f"| `{name}` | {condition} | {ranks} | {'error with a note' if is_named else 'error'} |"


def tables():
    found = []
    for file in re.findall(r"(api/\w+\.md)$", (ROOT / "mkdocs.yml").read_text(), flags=re.MULTILINE):
        page = (DOCS / file).read_text()
        shown = re.findall(r"^::: (\S+)$", page, flags=re.MULTILINE)
        rows = [
            row_of(path, *call)
            for name in shown
            for path, call in calls().items()
            if path == name or path.rpartition(".")[0] == name
        ]
        if rows:
            title = re.match("# (.*)", page)[1]
            rows.sort(key=lambda row: "| no | any |" in row)  # stable
            head = "| Call | Every rank must call it | Ranks | If a rank does not |\n|---|---|---|---|"
            found.append("\n".join([f"## {title}\n\nArguments and results: [{title}]({file}).\n", head, *rows]))
    return "\n\n".join(found)


def test_the_page_on_collective_calls_is_what_the_code_says():
    page = PAGE.read_text()
    written = page.partition(START)[2].partition(END)[0].strip()
    assert written == tables(), "run python tests/test_site.py"
    assert written.count("error with a note") > 30


def test_functions_and_methods_of_strategies_say_whether_they_are_collective():
    strategies = {f"fsdp2_strategy.{name}" for name in STRATEGIES}
    assert strategies <= set(public().values())
    silent = [
        path
        for path, node, _ in documented()
        if isinstance(node, FUNCTIONS) and not is_value(node) and path not in calls()
        and (path in public().values() or path.rpartition(".")[0] in strategies)
    ]  # fmt: skip
    assert not silent


def test_what_is_decorated_as_collective_says_so():
    wrong = [
        path
        for path, node, text in documented()
        if isinstance(node, FUNCTIONS) and "collective" in decorators(node)
        and (is_collective(text) is False or "not collective" in first_paragraph(text))
    ]  # fmt: skip
    assert not wrong
    decorated = [path for path, node, _ in documented() if "collective" in decorators(node)]
    assert len(decorated) > 30 and set(decorated) <= calls().keys()


def test_calls_that_run_on_the_ranks_of_a_model_are_shown_so():
    found = [path for path, (_, node) in calls().items() if "on_model_ranks" in decorators(node)]
    assert len(found) >= 4
    assert all("| the model's |" in row_of(path, *calls()[path]) for path in found)


def test_the_ranks_that_are_given_by_hand_are_those_of_calls():
    names = {name for path in calls() for name in (path.removeprefix("fsdp2_strategy."), path.rpartition(".")[2])}
    assert not OTHER_RANKS.keys() - names


def test_the_page_on_collective_calls_has_each_collective_constructor():
    section = PAGE.read_text().partition("## Constructors")[2].partition(START)[0]
    listed = re.findall(r"^\| `([\w.]+)` \|", section, flags=re.MULTILINE)
    expected = [
        path.removeprefix("fsdp2_strategy.")
        for path, node, text in documented()
        if isinstance(node, ast.ClassDef) and re.search(r"(?<!not )\bcollective\b", text, re.IGNORECASE)
    ]
    assert sorted(listed) == sorted(expected)


if __name__ == "__main__":
    before, after = PAGE.read_text().split(START)[0], PAGE.read_text().split(END)[1]
    PAGE.write_text(f"{before}{START}\n\n{tables()}\n\n{END}{after}")
