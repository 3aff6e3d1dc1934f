"""What holds of the package as a whole."""

import ast
import io
import pathlib
import subprocess
import sys
import tokenize
from collections.abc import Iterator, Sequence
from importlib import metadata

import lnb

FOLDER = pathlib.Path(lnb.__file__).parent

# The parts of the package. Each may import those before it, and none after it.
ORDER: Sequence[str] = """
    _version _renamed _features _neuron _plan _sharding _jaxpr _numerics _neurons _metric _checks
    _backprop _parameters _average _inverse _solvers _orthogonalize _norms _guard _optimizer
    _algorithms _diagnostics __init__
""".split()

DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
BUDGET = 3440  # lines of code in the package: a larger one asks for a reason


def test_version():
    assert lnb.__version__ == metadata.version("lnb")


def test_import_needs_nothing_but_jax_and_optax():
    optional = {"equinox", "flax", "haiku", "lineax", "matplotlib", "rich", "sklearn"}
    program = "import sys, lnb; print(*sys.modules)"
    modules = subprocess.check_output([sys.executable, "-c", program], text=True).split()
    assert not optional.intersection(modules)


def part_of(file: pathlib.Path) -> str:
    """The name of a module or folder of the package."""
    return file.relative_to(FOLDER).parts[0].removesuffix(".py")


def imports(node: ast.AST) -> Iterator[ast.ImportFrom]:
    """All imports of names in a program, but for those that only serve type checkers."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ImportFrom):
            yield child
        elif not (isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING"):
            yield from imports(child)


def imported_parts(file: pathlib.Path) -> set[str]:
    """The other parts of the package that a file imports."""
    parts = set()
    for node in imports(ast.parse(file.read_text())):
        if node.level == 0:
            continue
        folder = file.parents[node.level - 1]
        module = (node.module or "").split(".")
        paths = [folder.joinpath(*module)] if node.module else [folder / a.name for a in node.names]
        parts |= {part_of(path) for path in paths if path != FOLDER}
    return parts - {part_of(file)}


def test_imports_go_one_way():
    files = sorted(FOLDER.rglob("*.py"))
    assert {part_of(file) for file in files} == set(ORDER)
    for file in files:
        later = ORDER[ORDER.index(part_of(file)) :]
        wrong = imported_parts(file).intersection(later)
        assert not wrong, f"{file.relative_to(FOLDER)} imports {', '.join(sorted(wrong))}"


def code_lines(text: str) -> int:
    """Lines that are not blank and hold more than comments and docstrings."""
    no_code = {"COMMENT", "NL", "NEWLINE", "INDENT", "DEDENT", "ENDMARKER"}
    docstrings, lines = set(), set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, DOCUMENTED) and ast.get_docstring(node) is not None:
            first = node.body[0]
            docstrings |= set(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if tokenize.tok_name[token.type] not in no_code:
            lines |= set(range(token.start[0], token.end[0] + 1))
    return len(lines - docstrings)


def test_lines_of_code():
    counts = {file: code_lines(file.read_text()) for file in FOLDER.rglob("*.py")}
    assert sum(counts.values()) <= BUDGET
