"""The download scripts against a server on this machine, with archives of a few kilobytes."""

import hashlib
import importlib.util
import io
import os
import re
import subprocess
import sys
import tarfile
import threading
import zipfile
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from data import load_dataset
from data.dataset import DataError
from data.images import read_mask
from data.palette import voc_palette
from scripts import merge_sbd

ROOT = Path(__file__).parents[1]
NOWHERE = "http://127.0.0.1:9"  # the port of "discard", where nobody listens
VOC_TAR, SBD_TGZ, ADE_ZIP = "VOCtrainval_11-May-2012.tar", "benchmark.tgz", "ADEChallengeData2016.zip"
needs_scipy = pytest.mark.skipif(not importlib.util.find_spec("scipy"), reason="scipy is not installed")


class Server:
    """Serves `files`; `cut` holds how many bytes the next answers give before the line goes dead."""

    def __init__(self):
        self.files: dict[str, bytes] = {}
        self.cut: list[int] = []
        self.ranges = True  # whether it can resume in the middle
        self.requests: list[tuple[str, str | None]] = []  # file, Range header
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                name, wanted = self.path.lstrip("/"), self.headers.get("Range")
                server.requests.append((name, wanted))
                content = server.files.get(name)
                if content is None:
                    return self.send_error(404)
                start = int(re.fullmatch(r"bytes=(\d+)-", wanted)[1]) if wanted and server.ranges else 0
                self.send_response(206 if start else 200)
                if start:
                    self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
                self.send_header("Content-Length", str(len(content) - start))
                self.end_headers()
                end = start + server.cut.pop(0) if server.cut else None
                self.wfile.write(content[start:end])

            def log_message(self, *_):
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}"
        threading.Thread(target=self.http.serve_forever, args=(0.02,), daemon=True).start()


@pytest.fixture
def server():
    server = Server()
    yield server
    server.http.shutdown()
    server.http.server_close()


@pytest.fixture
def download(tmp_path, server):
    """Runs a download script into tmp_path/data; `real_check` runs check_data instead of naming its
    arguments."""
    python = tmp_path / "python"
    python.write_text(
        '#!/bin/sh\ncase "$*" in "-m scripts.check_data"*) echo "checking $*"; exit 0 ;; esac\n'
        f'exec {sys.executable} "$@"\n'
    )
    python.chmod(0o755)

    def run(script: str, *arguments: str, real_check: bool = False, **environment: str):
        places = {f"{name}_URL": server.url for name in ("VOC", "SBD", "ADE")}
        settings = {
            "PYTHON": sys.executable if real_check else str(python),
            "RETRY_SECONDS": "0",
            "no_proxy": "*",
        }
        return subprocess.run(
            ["bash", str(ROOT / "scripts" / script), str(tmp_path / "data"), *arguments],
            env=os.environ | settings | places | environment,
            cwd=tmp_path,
            capture_output=True,
            text=True,
        )

    return run


def png(labels) -> bytes:
    mask = Image.fromarray(np.array(labels, np.uint8))
    mask.putpalette(voc_palette().tobytes())
    return encode(mask, "PNG")


def encode(image: Image.Image, kind: str) -> bytes:
    content = io.BytesIO()
    image.save(content, kind)
    return content.getvalue()


def tar(files: dict[str, bytes], mode: str = "w") -> bytes:
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode=mode) as archive:
        for name, data in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return content.getvalue()


def md5(content: bytes) -> str:
    return hashlib.md5(content).hexdigest()


def voc_files() -> dict[str, bytes]:
    """Images a, b (train), v (val) with masks; c and d only as images."""
    base = "VOCdevkit/VOC2012"
    files = {f"{base}/JPEGImages/{name}.jpg": encode(Image.new("RGB", (4, 3)), "JPEG") for name in "abcdv"}
    files |= {f"{base}/SegmentationClass/{name}.png": png(np.full((3, 4), 1)) for name in "abv"}
    lists = {"train": "a\nb\n", "val": "v\n"}
    return files | {f"{base}/ImageSets/Segmentation/{k}.txt": v.encode() for k, v in lists.items()}


@pytest.fixture
def voc_tar(server) -> bytes:
    server.files[VOC_TAR] = tar(voc_files())
    return server.files[VOC_TAR]


def data_folder(tmp_path) -> set[str]:
    """What a script has left in its folder."""
    return {path.name for path in (tmp_path / "data").iterdir()}


# --- fetching -----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_voc_is_fetched_verified_unpacked_and_checked(download, voc_tar, tmp_path, server):
    done = download("download_voc.sh", "--without-sbd", real_check=True, VOC_MD5=md5(voc_tar))
    assert done.returncode == 1, done.stderr  # usable, but not the whole of VOC
    assert "1,464" in done.stdout and "usable, but" in done.stdout
    assert data_folder(tmp_path) == {VOC_TAR, "VOCdevkit"}
    assert len(load_dataset("voc", tmp_path / "data").train) == 2
    assert server.requests == [(VOC_TAR, None)]


def test_what_is_there_is_not_fetched_again(download, voc_tar, tmp_path, server):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / VOC_TAR).write_bytes(voc_tar)
    for _ in range(2):  # first from the archive, then from nothing at all
        done = download("download_voc.sh", "--without-sbd", VOC_MD5=md5(voc_tar), VOC_URL=NOWHERE)
        assert done.returncode == 0, done.stderr
        assert f"checking -m scripts.check_data {tmp_path}/data --dataset voc" in done.stdout
        (tmp_path / "data" / VOC_TAR).unlink(missing_ok=True)
    assert data_folder(tmp_path) == {"VOCdevkit"} and not server.requests


def test_a_cut_transfer_goes_on_where_it_was_cut(download, voc_tar, tmp_path, server):
    server.cut = [1000, 500]
    done = download("download_voc.sh", "--without-sbd", VOC_MD5=md5(voc_tar))
    assert done.returncode == 0, done.stderr
    assert server.requests == [(VOC_TAR, None), (VOC_TAR, "bytes=1000-"), (VOC_TAR, "bytes=1500-")]
    assert (tmp_path / "data" / VOC_TAR).read_bytes() == voc_tar


def test_the_next_start_goes_on_where_the_last_one_gave_up(download, voc_tar, tmp_path, server):
    server.cut = [100] * 5
    done = download("download_voc.sh", "--without-sbd", VOC_MD5=md5(voc_tar))
    assert done.returncode == 1 and "resumes from there" in done.stderr
    assert data_folder(tmp_path) == {f"{VOC_TAR}.part"}
    assert download("download_voc.sh", "--without-sbd", VOC_MD5=md5(voc_tar)).returncode == 0
    assert server.requests[-1] == (VOC_TAR, "bytes=500-")
    assert data_folder(tmp_path) == {VOC_TAR, "VOCdevkit"}


def test_a_server_that_cannot_go_on_begins_again(download, voc_tar, tmp_path, server):
    server.cut, server.ranges = [1000], False
    assert download("download_voc.sh", "--without-sbd", VOC_MD5=md5(voc_tar)).returncode == 0
    assert (tmp_path / "data" / VOC_TAR).read_bytes() == voc_tar


def test_a_bad_checksum_leaves_nothing_behind(download, voc_tar, tmp_path):
    done = download("download_voc.sh", "--without-sbd")  # the MD5 of the real archive
    assert done.returncode == 1 and "damaged or another version" in done.stderr
    assert data_folder(tmp_path) == set()


def test_a_damaged_file_of_the_user_is_left_alone(download, voc_tar, tmp_path, server):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / VOC_TAR).write_bytes(voc_tar[:-1])
    done = download("download_voc.sh", "--without-sbd", VOC_MD5=md5(voc_tar))
    assert done.returncode == 1 and "delete it" in done.stderr
    assert (tmp_path / "data" / VOC_TAR).read_bytes() == voc_tar[:-1] and not server.requests


@pytest.mark.parametrize(("script", "file"), [("download_voc.sh", VOC_TAR), ("download_ade.sh", ADE_ZIP)])
def test_without_a_network_it_says_what_to_do(download, tmp_path, script, file):
    options = ["--without-sbd"] if file == VOC_TAR else []
    done = download(script, *options, VOC_URL=NOWHERE, ADE_URL=NOWHERE)
    assert done.returncode == 1
    assert f"put the file there yourself, as {tmp_path}/data/{file}" in done.stderr
    assert data_folder(tmp_path) == set()


def test_an_archive_of_something_else_is_refused(download, tmp_path, server):
    server.files[VOC_TAR] = tar({"other/file": b"x"})
    done = download("download_voc.sh", "--without-sbd", VOC_MD5=md5(server.files[VOC_TAR]))
    assert done.returncode == 1 and "holds no VOCdevkit/VOC2012" in done.stderr
    assert data_folder(tmp_path) == {VOC_TAR}


@pytest.mark.parametrize("script", ["download_voc.sh", "download_ade.sh"])
def test_help_and_wrong_arguments(download, script, server):
    def plain(*arguments):
        return subprocess.run(
            ["bash", str(ROOT / "scripts" / script), *arguments],
            env=os.environ | {"PYTHON": sys.executable},
            capture_output=True,
            text=True,
        )

    shown = plain("--help")
    assert shown.returncode == 0 and f"bash scripts/{script} <folder>" in shown.stdout
    assert "Without a network" in shown.stdout and "set -euo" not in shown.stdout
    nothing = plain()
    assert nothing.returncode == 2 and nothing.stdout == shown.stdout
    wrong = download(script, "--wrong")
    assert wrong.returncode == 1 and "--wrong" in wrong.stderr and not server.requests


# --- ADE20K -------------------------------------------------------------------------------------------------


@pytest.fixture
def ade_zip(server) -> bytes:
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        for split in ("training", "validation"):
            for name in ("x1", "x2"):
                place = f"ADEChallengeData2016/{{}}/{split}/{name}"
                archive.writestr(place.format("images") + ".jpg", encode(Image.new("RGB", (4, 3)), "JPEG"))
                archive.writestr(place.format("annotations") + ".png", png(np.full((3, 4), 7)))
    server.files[ADE_ZIP] = content.getvalue()
    return server.files[ADE_ZIP]


@pytest.mark.slow
def test_ade(download, ade_zip, tmp_path, server):
    server.cut = [700]
    done = download("download_ade.sh", real_check=True)
    assert done.returncode == 1, done.stderr
    assert "train has 2 images, the official one 20,210" in done.stdout
    assert server.requests == [(ADE_ZIP, None), (ADE_ZIP, "bytes=700-")]
    assert data_folder(tmp_path) == {ADE_ZIP, "ADEChallengeData2016"}


def test_ade_is_verified_by_its_members(download, ade_zip, tmp_path, server):
    place = ade_zip.index(b"IDAT")
    server.files[ADE_ZIP] = ade_zip[:place] + b"XXXX" + ade_zip[place + 4 :]
    done = download("download_ade.sh")
    assert done.returncode == 1 and "damaged or another version" in done.stderr
    assert data_folder(tmp_path) == set()


def test_ade_with_an_md5_of_ones_own(download, ade_zip):
    assert download("download_ade.sh", ADE_MD5="0" * 32).returncode == 1
    assert download("download_ade.sh", ADE_MD5=md5(ade_zip)).returncode == 0


# --- VOC and SBD --------------------------------------------------------------------------------------------


def write(folder: Path, files: dict[str, bytes]) -> Path:
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return folder


def sbd_files(mat: bytes = b"") -> dict[str, bytes]:
    """SBD knows a (which is VOC's train), c, d and v (VOC's val)."""
    lists = {"train.txt": b"d\nv\n", "val.txt": b"a\nc\n"}
    return lists | {f"cls/{name}.mat": mat for name in "acdv"}


def test_merge_sbd(tmp_path):
    voc = write(tmp_path, voc_files()) / "VOCdevkit/VOC2012"
    sbd = write(tmp_path / "sbd", sbd_files())
    assert merge_sbd.merge(voc, sbd, lambda path: np.full((3, 4), ord(path.stem) - 90, np.uint8)) == 4
    assert (
        voc / "ImageSets/Segmentation/train_aug.txt"
    ).read_text() == "a\nb\nc\nd\n"  # no v, which is in val
    masks = {path.stem: read_mask(path)[0, 0] for path in (voc / "SegmentationClassAug").iterdir()}
    assert masks == {"a": 1, "b": 1, "v": 1, "c": 9, "d": 10}  # VOC's own masks win
    with Image.open(voc / "SegmentationClassAug/c.png") as mask:
        assert mask.getpalette() == voc_palette().ravel().tolist()
    dataset = load_dataset("voc", voc, "train_aug")
    assert [image.name for image in dataset.train] == ["a", "b", "c", "d"]
    with pytest.raises(DataError, match="is there already"):
        merge_sbd.merge(voc, sbd, lambda path: pytest.fail("read again"))


def test_merge_sbd_names_all_that_is_missing_and_writes_nothing(tmp_path):
    voc = write(tmp_path, voc_files()) / "VOCdevkit/VOC2012"
    sbd = write(tmp_path / "sbd", sbd_files())
    (sbd / "cls/c.mat").unlink()
    (voc / "SegmentationClass/b.png").unlink()
    before = sorted(voc.rglob("*"))
    with pytest.raises(DataError, match=r"(?s)2 in all.*c\.mat: is missing.*b\.png: is missing"):
        merge_sbd.merge(voc, sbd, lambda path: pytest.fail("began"))
    (sbd / "cls/c.mat").write_bytes(b"")
    write(tmp_path, voc_files())

    def broken(path):
        raise DataError("broken")

    with pytest.raises(DataError, match="broken"):
        merge_sbd.merge(voc, sbd, broken)
    assert sorted(voc.rglob("*")) == sorted([*before, voc / "SegmentationClass/b.png"])


def test_merge_sbd_without_scipy_says_how_to_get_it(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "scipy.io", None)
    assert merge_sbd.main([str(tmp_path), str(tmp_path)]) == 1
    assert "-m pip install scipy" in capsys.readouterr().err


def test_scipy_is_asked_for_before_anything_is_fetched(download, tmp_path, server):
    python = tmp_path / "bare"
    python.write_text(f'#!/bin/sh\n[ "$2" != "import scipy" ] && exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    done = download("download_voc.sh", PYTHON=str(python))
    assert done.returncode == 1 and "pip install scipy" in done.stderr and "--without-sbd" in done.stderr
    assert not server.requests


@needs_scipy
@pytest.mark.slow
def test_voc_with_sbd(download, voc_tar, tmp_path, server):
    from scipy.io import savemat

    content = io.BytesIO()
    parts = [("Boundaries", "O"), ("Segmentation", "O"), ("CategoriesPresent", "O")]
    classes = np.zeros((1, 1), dtype=parts)
    classes["Segmentation"][0, 0] = np.full((3, 4), 8, np.uint8)
    savemat(content, {"GTcls": classes}, do_compression=True)
    files = {f"benchmark_RELEASE/dataset/{k}": v for k, v in sbd_files(content.getvalue()).items()}
    files["benchmark_RELEASE/dataset/img/a.jpg"] = b"not needed"
    server.files[SBD_TGZ] = tar(files, "w:gz")
    checksums = {"VOC_MD5": md5(voc_tar), "SBD_MD5": md5(server.files[SBD_TGZ])}
    done = download("download_voc.sh", **checksums)
    assert done.returncode == 0, done.stderr
    assert "train_aug has 4 images, officially 10,582" in done.stdout
    assert not (tmp_path / "data/benchmark_RELEASE/dataset/img/a.jpg").exists()
    dataset = load_dataset("voc", tmp_path / "data", "train_aug")
    assert [read_mask(image.mask)[0, 0] for image in dataset.train] == [1, 1, 8, 8]
    server.requests.clear()
    assert download("download_voc.sh", **checksums).returncode == 0
    assert not server.requests
