"""Where the files of a data set lie: in a folder that is given, or in a cache of downloads."""

import hashlib
import os
import shutil
import tarfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory

import pooch

from .types import DataError, Source


@dataclass(frozen=True)
class Files:
    """A data set as its authors lay it out.

    Attributes:
      title: what the data set is called in messages.
      folder: where it lies below the data folder.
      checksums: what it consists of, each with "algorithm:digest", or None where none is published.
      downloads: addresses, with checksums: nothing is downloaded without one.
      archived: whether a download is an archive that holds `folder`, or one of the files.
    """

    title: str
    folder: str
    checksums: Mapping[str, str | None]
    downloads: Mapping[str, str]
    archived: bool = True

    @property
    def origin(self) -> str:
        """Where a person would get the files."""
        first, *others = self.downloads
        return first.rpartition("/")[0] + "/" if others else first

    def layout(self, names: Iterable[str]) -> str:
        return f"{self.folder}/{{{', '.join(names)}}}"

    def missing(self, root: Path) -> list[str]:
        return [name for name in self.checksums if not (root / self.folder / name).exists()]

    def read(self, folder: Path, name: str) -> bytes:
        """The content of a file, once its checksum is found right."""
        content = read(folder / name)
        expected = self.checksums[name]
        if expected is not None:
            algorithm, digest = expected.split(":")
            found = hashlib.new(algorithm, content).hexdigest()
            if found != digest:
                raise DataError(
                    f"{folder / name} is damaged, or not the official file of {self.title}: its "
                    f"{algorithm} is {found}, not {digest}. Delete it and get it again from "
                    f"{self.origin}"
                )
        return content


def read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error}.") from error


def root(source: Source) -> tuple[Path, str]:
    """The folder that data sets lie in, and what named it: an empty string for the cache."""
    if source.folder:
        return Path(source.folder).expanduser(), "--data-dir"
    if os.environ.get("LNB_DATA"):
        return Path(os.environ["LNB_DATA"]).expanduser(), "LNB_DATA"
    return Path(pooch.os_cache("lnb")), ""


def present(files: Files, source: Source) -> bool:
    return not files.missing(root(source)[0])


def find(files: Files, source: Source) -> Path:
    """The folder that holds all of the files, downloaded if no folder was given."""
    folder, given = root(source)
    missing = files.missing(folder)
    if missing and given:
        raise DataError(
            f"{files.title} is not complete in {folder}, which {given} names.\n"
            f"  missing:  {files.layout(missing)}\n"
            f"  expected: {files.layout(files.checksums)}\n"
            f"  from:     {files.origin}\n"
            "Without --data-dir and LNB_DATA, the same command downloads it."
        )
    if missing:
        _download(files, folder)
    return folder / files.folder


def _download(files: Files, cache: Path) -> None:
    for url, checksum in files.downloads.items():
        try:
            if files.archived:
                _unpack(url, checksum, files.folder, cache)
            else:
                pooch.retrieve(url, checksum, url.rpartition("/")[2], cache / files.folder)
        # No network, a full disk; a checksum that does not fit is a ValueError.
        except (OSError, ValueError, tarfile.TarError) as error:
            raise DataError(
                f"{files.title} could not be downloaded from {url}: {error}.\n"
                "Where there is no network, get it by other means, and name the folder with "
                "--data-dir DIR or LNB_DATA=DIR.\n"
                f"  expected there: {files.layout(files.checksums)}"
            ) from error


def _unpack(url: str, checksum: str, folder: str, cache: Path) -> None:
    """Downloads and extracts an archive's folder."""
    target = cache / folder
    archive = pooch.retrieve(url, checksum, url.rpartition("/")[2], cache / "downloads")
    if not hasattr(tarfile, "data_filter"):
        raise tarfile.ExtractError("unpacking it safely takes Python 3.11.4 or newer")
    target.parent.mkdir(parents=True, exist_ok=True)
    # Moved in one piece when complete, so that an interrupted run leaves nothing half done.
    with TemporaryDirectory(dir=cache) as fresh, tarfile.open(archive) as tar:
        wanted = [m for m in tar.getmembers() if PurePosixPath(m.name).is_relative_to(folder)]
        tar.extractall(fresh, wanted, filter="data")  # which writes nothing outside of `fresh`
        shutil.rmtree(target, ignore_errors=True)
        os.replace(Path(fresh) / folder, target)
