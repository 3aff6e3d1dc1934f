"""A text that every Python ships with: the documentation strings of its standard library."""

import ast
import sysconfig
from pathlib import Path

from .locate import read
from .types import DataError

# Modules written in Python that are part of every version which this package supports.
MODULES = sorted(
    """
    abc argparse ast asyncio.base_events asyncio.events asyncio.futures asyncio.locks
    asyncio.protocols asyncio.sslproto asyncio.streams asyncio.tasks asyncio.transports
    asyncio.unix_events base64 bdb bz2 calendar cmd code codecs collections compileall
    concurrent.futures.process configparser contextlib copy csv dataclasses datetime difflib dis
    doctest email.charset email.generator email.header email.headerregistry email.message
    email.policy email.quoprimime email.utils enum fileinput fractions ftplib functools glob
    graphlib gzip heapq http.client http.cookiejar http.cookies http.server imaplib importlib.abc
    importlib.metadata inspect ipaddress json json.decoder json.encoder locale logging
    logging.config logging.handlers lzma mailbox mimetypes multiprocessing.managers numbers optparse
    os pathlib pdb pickle pickletools pkgutil platform poplib py_compile pyclbr pydoc queue random
    re selectors shelve shutil site smtplib socket socketserver ssl statistics string subprocess
    tarfile tempfile textwrap threading timeit tokenize traceback typing unittest.case
    unittest.mock urllib.parse urllib.request uuid venv wave weakref wsgiref.handlers
    wsgiref.headers wsgiref.validate xml.etree.ElementTree xml.sax.handler xml.sax.xmlreader
    xmlrpc.client xmlrpc.server zipfile zipimport
    """.split()
)


def standard_library() -> bytes:
    """About 0.9 million characters. The modules are read, not run."""
    return "\n\n".join(text for name in MODULES for text in _docstrings(_source(name))).encode()


def _source(module: str) -> Path:
    stem = Path(sysconfig.get_paths()["stdlib"], *module.split("."))
    for path in (stem.with_name(f"{stem.name}.py"), stem / "__init__.py"):
        if path.exists():
            return path
    raise DataError(
        f"this Python comes without the source of its module {module} ({stem}.py), whose "
        "documentation is part of the default text; give the path of a text file instead."
    )


def _docstrings(path: Path) -> list[str]:
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = [node for node in ast.walk(ast.parse(read(path))) if isinstance(node, documented)]
    return [text for node in nodes if (text := ast.get_docstring(node))]
