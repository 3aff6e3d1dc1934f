"""The loaders on small files in the official layouts: right, missing, damaged, downloaded."""

import gzip
import hashlib
import http.server
import io
import pickle
import struct
import tarfile
import threading
import tracemalloc
import warnings
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pooch
import pytest
from PIL import Image

from lnb_experiments import data
from lnb_experiments.data import DataError, Source
from lnb_experiments.data.cifar10 import BINARY, PYTHON, TRAIN
from lnb_experiments.data.inert_pickle import load_batch
from lnb_experiments.data.mnist import MNIST

RNG = np.random.default_rng(3)


def source(folder) -> Source:
    return Source(folder=str(folder))


def md5(content: bytes) -> str:
    return f"md5:{hashlib.md5(content).hexdigest()}"


def write(root, files, contents):
    """Writes files, and gives the layout with their checksums."""
    (root / files.folder).mkdir(parents=True)
    for name, content in contents.items():
        (root / files.folder / name).write_bytes(content)
    return replace(files, checksums={name: md5(content) for name, content in contents.items()})


def idx(array: np.ndarray) -> bytes:
    header = struct.pack(f">4B{array.ndim}I", 0, 0, 8, array.ndim, *array.shape)
    return gzip.compress(header + array.tobytes(), mtime=0)


def small_mnist():
    parts = [RNG.integers(256, size=(n, 28, 28), dtype=np.uint8) for n in (12, 5)]
    labels = [RNG.integers(10, size=n, dtype=np.uint8) for n in (12, 5)]
    contents = [idx(array) for pair in zip(parts, labels, strict=True) for array in pair]
    return parts, labels, dict(zip(MNIST.checksums, contents, strict=True))


def test_mnist(tmp_path):
    images, labels, contents = small_mnist()
    loaded = data.mnist(source(tmp_path), write(tmp_path, MNIST, contents))
    for split, image, label in zip(loaded[:2], images, labels, strict=True):
        assert split.inputs.dtype == np.uint8
        assert split.targets.dtype == np.int32
        np.testing.assert_array_equal(split.inputs.reshape(image.shape), image)
        np.testing.assert_array_equal(split.targets, label)


def test_missing_files_are_named(tmp_path, monkeypatch):
    _, _, contents = small_mnist()
    write(tmp_path, MNIST, contents)
    (tmp_path / "mnist" / "t10k-labels-idx1-ubyte.gz").unlink()
    with pytest.raises(
        DataError, match=r"--data-dir names.\n  missing:  mnist/{t10k-labels[^,]+}\n"
    ):
        data.mnist(source(tmp_path))
    monkeypatch.setenv("LNB_DATA", str(tmp_path))
    with pytest.raises(DataError, match=r"LNB_DATA names.\n.* cifar-10-batches-bin/{data_batch_1"):
        data.cifar10(Source())
    with pytest.raises(DataError, match=r"LNB_DATA names.\n.* VOCdevkit/VOC2012/{ImageSets"):
        data.voc2012(Source(), 32)


def test_other_files_than_the_official_ones_are_refused(tmp_path):
    _, _, contents = small_mnist()
    write(tmp_path, MNIST, contents)
    with pytest.raises(DataError, match=r"train-images-idx3-ubyte.gz is damaged.*md5 is"):
        data.mnist(source(tmp_path))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (idx(np.zeros((12, 28, 28), np.uint8))[:-30], "damaged"),
        (gzip.compress(b"\0\0\x08\x03"), "not an IDX file"),
        (idx(np.zeros(12, np.uint8)), "begins with 00 00 08 01, not with 00 00 08 03"),
        (gzip.compress(gzip.decompress(idx(np.zeros((12, 2, 2), np.uint8)))[:-1]), "47 values"),
        (idx(np.zeros((11, 28, 28), np.uint8)), "11 train images, but 12 labels"),
        (b"<html>", "Not a gzipped file"),
    ],
    ids=["truncated", "short", "labels", "too few", "unequal", "not gzip"],
)
def test_mnist_that_does_not_parse(tmp_path, content, message):
    contents = {**small_mnist()[2], "train-images-idx3-ubyte.gz": content}
    files = write(tmp_path, MNIST, contents)
    with pytest.raises(DataError, match=message):
        data.mnist(source(tmp_path), files)


def python2_pickle(pixels: np.ndarray, labels: np.ndarray) -> bytes:
    """A batch as Python 2 and NumPy wrote it, by its opcodes."""
    text = lambda value: b"T" + struct.pack("<i", len(value)) + value
    number = lambda value: b"J" + struct.pack("<i", value)
    dtype = b"cnumpy\ndtype\n(" + text(b"u1") + number(0) + number(1) + b"tR"
    dtype += b"(" + number(3) + text(b"|") + b"NNN" + 2 * number(-1) + number(0) + b"tb"
    array = b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(" + number(0) + b"t"
    array += text(b"b") + b"tR(" + number(1) + b"(" + b"".join(map(number, pixels.shape)) + b"t"
    array += dtype + b"\x89" + text(pixels.tobytes()) + b"tb"
    listed = b"](" + b"".join(number(int(label)) for label in labels) + b"e"
    return b"\x80\x02}(" + text(b"data") + array + text(b"labels") + listed + b"u."


def small_cifar10():
    names = [*TRAIN, "test_batch"]
    pixels = [RNG.integers(256, size=(4, 3072), dtype=np.uint8) for _ in names]
    labels = [RNG.integers(10, size=4, dtype=np.uint8) for _ in names]
    return names, pixels, labels


def test_both_layouts_of_cifar10_agree(tmp_path):
    names, pixels, labels = small_cifar10()
    records = [np.insert(x, 0, y, axis=1).tobytes() for x, y in zip(pixels, labels, strict=True)]
    pickles = [python2_pickle(x, y) for x, y in zip(pixels, labels, strict=True)]
    binary = dict(zip((f"{name}.bin" for name in names), records, strict=True))
    binary = write(tmp_path / "binary", BINARY, binary)
    python = write(tmp_path / "python", PYTHON, dict(zip(names, pickles, strict=True)))
    loaded = [
        data.cifar10(source(tmp_path / kind), binary, python) for kind in ("binary", "python")
    ]
    for one, other in zip(*(loaded[i].train + loaded[i].test for i in (0, 1)), strict=True):
        np.testing.assert_array_equal(one, other)
    inputs, targets, _ = loaded[0].train
    assert (inputs.shape, inputs.dtype, targets.dtype) == ((20, 32, 32, 3), np.uint8, np.int32)
    assert inputs[6, 30, 17, 2] == pixels[1][2, 2 * 1024 + 30 * 32 + 17]
    np.testing.assert_array_equal(loaded[0].test.targets, labels[-1])


def test_the_pickles_are_those_that_numpy_reads():
    _, pixels, labels = small_cifar10()
    content = python2_pickle(pixels[0], labels[0])
    with warnings.catch_warnings(action="ignore"):
        batch = pickle.loads(content, encoding="bytes")
    np.testing.assert_array_equal(batch[b"data"], pixels[0])
    np.testing.assert_array_equal(batch[b"labels"], labels[0])


def test_cifar10_that_does_not_parse(tmp_path):
    contents = dict.fromkeys(BINARY.checksums, bytes(2 * 3073))
    files = write(tmp_path, BINARY, {**contents, "data_batch_3.bin": bytes(2 * 3073 - 1)})
    with pytest.raises(DataError, match=r"data_batch_3.bin is damaged: 6145 bytes"):
        data.cifar10(source(tmp_path), files)


def test_pickles_run_nothing(tmp_path):
    class Malicious:
        def __reduce__(self):
            return (tmp_path.rmdir, ())

    for content in (pickle.dumps(Malicious()), pickle.dumps(print), b"cos\nsystem\n(S'true'\ntR."):
        with pytest.raises(DataError, match=r"batch is refused.*asks for"):
            load_batch(tmp_path / "batch", content)
    with pytest.raises(DataError, match="batch is refused"):
        load_batch(tmp_path / "batch", python2_pickle(*(a[0] for a in small_cifar10()[1:]))[:500])
    assert tmp_path.exists()


def nested_labels(levels: int) -> bytes:
    """A batch whose labels are a list of ten times one list, and so on: a number for each level."""
    nested = b"]K\x00a"
    for level in range(levels):
        nested += b"q%c0](" % level + 10 * (b"h%c" % level) + b"e"
    batch = python2_pickle(np.zeros((1, 3072), np.uint8), np.zeros(0))
    return batch.replace(b"](e", nested)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\x80\x02}r\xff\xff\xff\x00.", "entry 16777215 of its memo at byte 3"),
        (b"\x80\x02}p16777215\n.", "entry 16777215 of its memo at byte 3"),
        (b"\x80\x03B\xff\xff\xff\x0f.", "268435455 bytes"),
        (b"\x80\x04\x8e" + struct.pack("<Q", 2**28) + b".", "268435456 bytes"),
        (b"\x80\x05\x96" + struct.pack("<Q", 2**28) + b".", "268435456 bytes"),
        (b"\x80\x04\x95" + struct.pack("<Q", 2**28) + b".", "truncated"),
        (b"\x80\x02T\xff\xff\xff\x0f.", "268435455 bytes"),
        (nested_labels(6), "list"),
    ],
    ids=["memo", "memo as text", "bytes", "long bytes", "array", "frame", "text", "labels"],
)
def test_pickles_take_no_more_memory_than_their_size_allows(content, message):
    """What a length, an index or nested lists claim is not set aside before it is checked."""
    tracemalloc.start()
    with pytest.raises(DataError, match=rf"batch is refused.*{message}"):
        load_batch(Path("batch"), content)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2**20


def encoded(array: np.ndarray, kind: str) -> bytes:
    image = Image.fromarray(array)
    if array.ndim == 2:
        image.putpalette(RNG.integers(256, size=768).tolist())
    buffer = io.BytesIO()
    image.save(buffer, kind)
    return buffer.getvalue()


@pytest.fixture
def voc(tmp_path):
    folder = tmp_path / "VOCdevkit" / "VOC2012"
    for name in ("ImageSets/Segmentation", "JPEGImages", "SegmentationClass"):
        (folder / name).mkdir(parents=True)
    for name, shape in {"a": (375, 500), "b": (500, 333), "c": (120, 100)}.items():
        smooth = np.add.outer(np.arange(shape[0]), np.arange(shape[1]))[..., None] // [3, 4, 5]
        mask = RNG.choice([*range(21), 255], shape).astype(np.uint8)
        photograph = encoded(smooth.astype(np.uint8), "JPEG")
        (folder / "JPEGImages" / f"{name}.jpg").write_bytes(photograph)
        (folder / "SegmentationClass" / f"{name}.png").write_bytes(encoded(mask, "PNG"))
    (folder / "ImageSets/Segmentation/train.txt").write_text("a\nb\n")
    (folder / "ImageSets/Segmentation/val.txt").write_text("c\n")
    return folder


def triangles(size: int) -> np.ndarray:
    """Bilinear interpolation of 500 pixels as a matrix: a triangle as wide as two new pixels."""
    centres = (np.arange(size)[:, None] + 0.5) * 500 / size
    distance = np.abs(np.arange(500)[None, :] + 0.5 - centres) * min(1, size / 500)
    weights = np.maximum(0, 1 - distance)
    return weights / weights.sum(axis=1, keepdims=True)


@pytest.mark.parametrize("size", [64, 384])
def test_voc2012(voc, tmp_path, size):
    loaded = data.voc2012(source(tmp_path), size)
    assert loaded.note.startswith("2 of 1,464 training images and 1 of 1,449 validation images")
    for split, row, name in [(loaded.train, 0, "a"), (loaded.train, 1, "b"), (loaded.test, 0, "c")]:
        pixels = np.asarray(Image.open(voc / "JPEGImages" / f"{name}.jpg")) / 255
        height, width, _ = pixels.shape
        canvas = np.zeros((500, 500, 3))
        canvas[:height, :width] = (pixels - [0.485, 0.456, 0.406]) / [0.229, 0.224, 0.225]
        matrix = triangles(size)
        expected = np.einsum("ik,jl,klc->ijc", matrix, matrix, canvas, optimize=True)
        # Half of what one level of eight bits is worth, and more than float16 loses.
        np.testing.assert_allclose(
            split.inputs[row].astype(float), expected, atol=0.5 / 255 / 0.225
        )
        assert split.inputs.dtype == np.float16

        mask = np.full((500, 500), 255)
        mask[:height, :width] = np.asarray(Image.open(voc / "SegmentationClass" / f"{name}.png"))
        nearest = ((np.arange(size) + 0.5) * 500 / size).astype(int)
        np.testing.assert_array_equal(split.targets[row], mask[np.ix_(nearest, nearest)])
        assert split.targets.dtype == np.uint8


def test_voc2012_that_is_damaged(voc, tmp_path):
    load = partial(data.voc2012, source(tmp_path), 32)
    photograph, mask = voc / "JPEGImages/b.jpg", voc / "SegmentationClass/b.png"
    image, good = photograph.read_bytes(), mask.read_bytes()
    for path, content, message in [
        (photograph, image[: len(image) // 2], "b.jpg is damaged"),
        (photograph, b"", "b.jpg is damaged"),
        (mask, good[: len(good) // 2], "b.png is damaged"),
        (mask, encoded(np.full((500, 333), 21, np.uint8), "PNG"), r"b.png holds classes \[21\]"),
        (mask, encoded(np.zeros((500, 332), np.uint8), "PNG"), r"b.png has shape \(500, 332\)"),
        (mask, encoded(np.zeros((500, 333, 3), np.uint8), "PNG"), r"b.png is not a mask"),
    ]:
        path.write_bytes(content)
        with pytest.raises(DataError, match=message):
            load()
        photograph.write_bytes(image)
        mask.write_bytes(good)
    mask.unlink()
    with pytest.raises(DataError, match=r"1 of their files are missing: \S+b.png"):
        load()


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format, *args):
        pass


def test_downloads(tmp_path, monkeypatch):
    names, pixels, labels = small_cifar10()
    records = [np.insert(x, 0, y, axis=1).tobytes() for x, y in zip(pixels, labels, strict=True)]
    contents = dict(zip((f"{name}.bin" for name in names), records, strict=True))
    files = write(tmp_path / "site", BINARY, contents)
    archive = tmp_path / "site" / "small.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(tmp_path / "site" / BINARY.folder, BINARY.folder)
    monkeypatch.setattr(pooch, "os_cache", lambda name: tmp_path / "cache" / name)
    monkeypatch.setenv("NO_PROXY", "*")
    monkeypatch.delenv("LNB_DATA", raising=False)
    handler = partial(Quiet, directory=str(tmp_path / "site"))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever).start()
        url = f"http://127.0.0.1:{server.server_port}/small.tar.gz"
        with pytest.raises(DataError, match=r"could not be downloaded.*hash"):
            data.cifar10(Source(), replace(files, downloads={url: md5(b"other")}))
        files = replace(files, downloads={url: md5(archive.read_bytes())})
        loaded = data.cifar10(Source(), files)
        server.shutdown()
    np.testing.assert_array_equal(loaded.test.targets, labels[-1])
    # Now from the cache: nobody serves that address any more.
    np.testing.assert_array_equal(data.cifar10(Source(), files).train.inputs, loaded.train.inputs)
    gone = replace(MNIST, downloads={url: md5(b"")})
    with pytest.raises(
        DataError, match=rf"(?s)downloaded from {url}.*--data-dir DIR.*mnist/{{train-im"
    ):
        data.mnist(Source(), gone)


@pytest.mark.parametrize("kind", ["through a link", "by dots"])
def test_archives_write_nothing_outside_of_their_folder(tmp_path, monkeypatch, kind):
    monkeypatch.setattr(pooch, "os_cache", lambda name: tmp_path / "cache" / name)
    monkeypatch.delenv("LNB_DATA", raising=False)
    (tmp_path / "outside").mkdir()
    archive = tmp_path / "cache" / "lnb" / "downloads" / "bad.tar.gz"  # as if downloaded
    archive.parent.mkdir(parents=True)
    with tarfile.open(archive, "w:gz") as tar:
        link = tarfile.TarInfo(f"{BINARY.folder}/link")
        link.type, link.linkname = tarfile.SYMTYPE, str(tmp_path / "outside")
        if kind == "through a link":
            tar.addfile(link)
            tar.addfile(tarfile.TarInfo(f"{link.name}/file"))
        else:
            tar.addfile(tarfile.TarInfo(f"{BINARY.folder}/../../../outside/file"))
    bad = replace(BINARY, downloads={"http://nowhere/bad.tar.gz": md5(archive.read_bytes())})
    with pytest.raises(DataError, match=r"bad.tar.gz.*(outside the destination|absolute path)"):
        data.cifar10(Source(), bad)
    monkeypatch.delattr(tarfile, "data_filter")  # as before Python 3.11.4
    with pytest.raises(DataError, match=r"bad.tar.gz.*takes Python 3.11.4"):
        data.cifar10(Source(), bad)
    assert not list((tmp_path / "outside").iterdir())
