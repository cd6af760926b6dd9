"""The programs in README.md and docs/ run, print what they say they print, and fail as they say.

Every fenced ```python block is run; the blocks of one page are one program. Words after
"python" change that: `no-run` leaves a block out, `raises` means that it must raise. A ```text
block that comes next is what the block prints, or the text of its error. White space does not
count in it, and "…" stands for anything.
"""

import ast
import contextlib
import importlib
import inspect
import io
import os
import re
import sys
import textwrap
import traceback
from pathlib import Path

import pytest
from helpers import processes

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
SECONDS = 240  # some pages start several processes, beside other tests

_FENCE = re.compile(
    r"^(?P<indent> *)```(?P<info>[^\n`]*)\n(?P<text>.*?)^(?P=indent)```\s*$", re.M | re.S
)
# NumPy 2 writes np.int64(6) for what NumPy 1 writes as 6.
_NUMPY_NUMBER = re.compile(r"np\.\w+\(([-+.\w]+)\)")


def page_name(path):
    return str(path.relative_to(ROOT))


def fences(path):
    """Returns (language, flags, text, line number) of each fenced block of a page."""
    page = path.read_text(encoding="utf-8")
    found = []
    for match in _FENCE.finditer(page):
        words = match["info"].split() or [""]
        line = page.count("\n", 0, match.start("text")) + 1
        found.append((words[0], words[1:], textwrap.dedent(match["text"]), line))
    return found


def programs(path):
    """Returns (flags, code, expected text or None, line number) of each block to run."""
    found = fences(path)
    following = [*found[1:], ("", [], "", 0)]
    return [
        (flags, code, after[2] if after[0] == "text" else None, line)
        for (language, flags, code, line), after in zip(found, following)
        if language == "python" and "no-run" not in flags
    ]


def same_text(expected, found):
    """Whether two texts agree, but for white space and what "…" stands for."""
    expected, found = (_NUMPY_NUMBER.sub(r"\1", text) for text in (expected, found))
    pieces = [re.escape(" ".join(piece.split())) for piece in expected.split("…")]
    pattern = r"\s*" + r".*".join(pieces) + r"\s*"
    return re.fullmatch(pattern, " ".join(found.split()), re.S) is not None


def run_block(path, namespace, flags, code, expected, line):
    """Runs one block; raises AssertionError if it does not do what the page says."""
    place = f"{page_name(path)}:{line}"
    compiled = compile("\n" * (line - 1) + code, str(path), "exec")
    printed = io.StringIO()
    error = None
    try:
        with contextlib.redirect_stdout(printed):
            exec(compiled, namespace)
    except Exception as e:
        error = e
        if "raises" not in flags:
            raise AssertionError(f"{place} failed:\n{traceback.format_exc()}") from e
    assert error is not None or "raises" not in flags, f"{place} should raise"
    found = printed.getvalue() if error is None else str(error)
    if expected is not None:
        assert same_text(expected, found), f"{place} says:\n{found}\nbut the page:\n{expected}"


def run_page(path, directory, log):
    """Runs the blocks of a page one after the other; exits with 0 if all is well."""
    os.chdir(directory)
    sys.path.append(str(ROOT / "examples"))
    if path.parent.name == "tutorial":
        os.environ["MTF_STRICT"] = "1"  # a tutorial says only what it means
    namespace = {"__name__": "__main__"}
    try:
        for block in programs(path):
            run_block(path, namespace, *block)
    except BaseException as e:
        Path(log).write_text(str(e), encoding="utf-8")
        os._exit(1)
    os._exit(0)


@pytest.mark.slow_but(8)
@pytest.mark.slow(
    "docs/api*",
    "docs/auto_mtf*",
    "docs/concepts/mixture_of_experts*",
    "docs/devices*",
    "docs/parallelism/expert*",
    "docs/parallelism/sequence*",
    "docs/parallelism/spatial*",
    "docs/tutorial/bert*",
    "docs/tutorial/choosing_a_layout*",
    "docs/tutorial/eager*",
    "docs/tutorial/estimator*",
    "docs/tutorial/images_3d*",
    "docs/tutorial/language_model*",
    "docs/tutorial/several_processes*",
    "docs/tutorial/simd*",
    "docs/tutorial/t5_checkpoints*",
    "docs/tutorial/training*",
)
@pytest.mark.parametrize("path", [p for p in PAGES if programs(p)], ids=page_name)
def test_programs_run(path, tmp_path):
    log = tmp_path / "error.txt"
    process = processes.context().Process(target=run_page, args=(path, str(tmp_path), str(log)))
    process.start()
    process.join(SECONDS)
    if process.exitcode is None:
        process.kill()
        pytest.fail(f"{path.name} did not end within {SECONDS} s")
    assert process.exitcode == 0, log.read_text() if log.exists() else f"exit {process.exitcode}"


def test_pages_have_programs():
    with_programs = {page_name(p) for p in PAGES if programs(p)}
    assert {"README.md", "docs/errors.md", "docs/adding_an_operation.md"} <= with_programs


def calls_that_do_not_run(path):
    """Returns (name, names of arguments, line number) of calls of the package in `no-run` blocks."""
    found = []
    for language, flags, code, line in fences(path):
        if language != "python" or "no-run" not in flags:
            continue
        try:
            tree = ast.parse(code)
        except SyntaxError:  # an entry of a table
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and (name := ast.unparse(node.func)).startswith("mtf."):
                keywords = [k.arg for k in node.keywords]  # None for those of a dictionary
                given = [ast.unparse(x) for x in node.args]
                found.append((name, given, keywords, line + node.lineno - 1))
    return found


@pytest.mark.parametrize("path", [p for p in PAGES if calls_that_do_not_run(p)], ids=page_name)
def test_calls_that_do_not_run_have_the_arguments_that_there_are(path):
    for name, given, keywords, line in calls_that_do_not_run(path):
        place = f"{page_name(path)}:{line}: {name}"
        try:
            fn = resolve(name.replace("mtf.", "mesh_tensorflow.", 1))
            parameters = inspect.signature(fn).parameters
        except (AttributeError, ValueError) as error:  # ValueError: a function of C
            raise AssertionError(f"{place}: {error}") from error
        if not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
            assert not {k for k in keywords if k} - parameters.keys(), place
        # What is named `loss` is a model function, and a step function is trained without one.
        if name == "mtf.train.fit" and given[0].endswith("loss"):
            assert "optimizer" in keywords, f"{place} lacks an optimizer"


# -- links, reference, commands


def anchors(path):
    """Returns the anchors of a page's headings."""
    page = _FENCE.sub("", path.read_text(encoding="utf-8"))
    heads = re.findall(r"^#+ +(.*?)(?: *\{#([\w-]+)\})?$", page, re.M)
    slugs = {re.sub(r"[^\w\- ]", "", text).strip().lower().replace(" ", "-") for text, _ in heads}
    return slugs | {given for _, given in heads if given}


@pytest.mark.parametrize("path", PAGES, ids=page_name)
def test_links_lead_somewhere(path):
    page = _FENCE.sub("", path.read_text(encoding="utf-8"))
    for target in re.findall(r"\]\(([^)\s]+)\)", page):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        file = (path.parent / name).resolve() if name else path
        assert file.exists(), f"{path.name}: {target}"
        if DOCS in path.parents:
            assert DOCS in file.parents, f"{path.name}: {target} is outside the site"
        if anchor and file.suffix == ".md":
            assert anchor in anchors(file), f"{path.name}: {target}"


def reference_entries():
    """Returns the names of entries, each with the members that it lists, or None for all."""
    pattern = re.compile(r"^::: ([\w.]+)$((?:\n[ ]{4}.*)*)", re.M)
    found = [
        match
        for path in sorted((DOCS / "api").rglob("*.md"))
        for match in pattern.findall(path.read_text())
    ]
    return [
        (name, tuple(re.findall(r"^ +- (\w+)$", options, re.M)) or None) for name, options in found
    ]


def resolve(name):
    """Returns the module or attribute that a dotted name means."""
    parts = name.split(".")
    for cut in range(len(parts), 0, -1):
        try:
            value = importlib.import_module(".".join(parts[:cut]))
        except ModuleNotFoundError:
            continue
        for part in parts[cut:]:
            value = getattr(value, part)
        return value
    raise ModuleNotFoundError(name)


def test_reference_names_exist():
    pytest.importorskip(
        "jax", "0.8", reason="the reference has mesh_tensorflow.pjrt, which needs it"
    )
    entries = reference_entries()
    assert len(entries) == len(set(entries))
    for name, members in entries:
        value = resolve(name)
        assert value.__doc__, name
        assert all(hasattr(value, member) for member in members or ()), name


def test_reference_has_every_family_of_operations():
    import mesh_tensorflow.ops as mtf

    entries = {name for name, _ in reference_entries()}
    for file in sorted((ROOT / "mesh_tensorflow" / "ops").glob("_[a-z]*.py")):
        module = importlib.import_module(f"mesh_tensorflow.ops.{file.stem}")
        if getattr(module, "__all__", None):
            assert module.__name__ in entries, f"docs/api lacks ::: {module.__name__}"
            assert all(hasattr(mtf, name) for name in module.__all__)


def public_objects():
    """Returns {id: (name, object)} of the functions and classes that programs reach from `mtf`."""
    import mesh_tensorflow as mtf

    found = {}
    inner = [m for name, m in vars(mtf).items() if inspect.ismodule(m) and name[0] != "_"]
    for module in [mtf, *(m for m in inner if hasattr(m, "__all__"))]:
        for name in getattr(module, "__all__", None) or dir(module):
            value = getattr(module, name)
            ours = getattr(value, "__module__", None) or ""
            if name[0] != "_" and callable(value) and ours.startswith("mesh_tensorflow"):
                found[id(value)] = (f"{module.__name__}.{name}", value)
    return found


def test_reference_has_each_public_name_once():
    """A name is shown by an entry of its own, or of a module whose `__all__` has it."""
    pytest.importorskip(
        "jax", "0.8", reason="the reference has mesh_tensorflow.pjrt, which needs it"
    )
    shown = {}
    for entry, members in reference_entries():
        value = resolve(entry)
        if inspect.ismodule(value):
            names = (
                members
                or getattr(value, "__all__", None)
                or [
                    name
                    for name, member in vars(value).items()
                    if name[0] != "_" and getattr(member, "__module__", None) == value.__name__
                ]
            )
            values = [getattr(value, name) for name in names]
        else:
            values = [value]
        for member in values:
            shown.setdefault(id(member), []).append(entry)
    wrong = {
        name: shown.get(key, [])
        for key, (name, value) in public_objects().items()
        if (inspect.isfunction(value) or inspect.isclass(value)) and len(shown.get(key, [])) != 1
    }
    assert not wrong, f"docs/api shows these in no place or in several: {wrong}"


def commands(path):
    """Returns the lines of the bash blocks of a page."""
    texts = [text for language, _, text, _ in fences(path) if language == "bash"]
    lines = [line.strip() for text in texts for line in text.splitlines()]
    return [line for line in lines if line and not line.startswith("#")]


def test_no_command_installs_the_package_of_this_name_in_an_index():
    """That is the classic; messages name the packages that are missing, and pages the clone."""
    files = [*PAGES, *(ROOT / "mesh_tensorflow").rglob("*.py"), *(ROOT / "examples").rglob("*.py")]
    command = re.compile(r"install[ \n\"\'`]+mesh[-_]tensorflow\b(?!\.)")
    found = [path for path in files if command.search(path.read_text(encoding="utf-8"))]
    assert found == []


def test_readme_commands_are_those_of_ci():
    ci = (ROOT / ".ci" / "run").read_text()
    shown = [part.strip() for line in commands(ROOT / "README.md") for part in line.split("&&")]
    assert "pytest -n 2" in shown
    for command in ('pip install ".[test]"', "pytest -n 2", "python examples/mnist.py"):
        assert command in shown, command
        assert command in ci, command
