# SPDX-License-Identifier: Apache-2.0
"""Scripts for images and clusters that lack what they need, or are asked for what is not there, say so. Offline."""

from __future__ import annotations

import os
import shutil
import subprocess
from typing import TYPE_CHECKING

import pytest

from tests.support.processes import ROOT

if TYPE_CHECKING:
    from pathlib import Path

ABSENT = {"buildah", "go", "etcd"}


def run(*words: str, path: str | None = None) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PATH": path or os.environ["PATH"], "PROGRAMS": str(ROOT)}
    command = [str(ROOT / "scripts" / words[0]), *words[1:]]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=30, check=False)


@pytest.fixture(scope="module")
def path_without(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A search path with every program of this machine but those that only images and clusters need."""
    folder = tmp_path_factory.mktemp("programs")
    for place in os.environ["PATH"].split(os.pathsep):
        for name in os.listdir(place) if os.path.isdir(place) else ():
            if name not in ABSENT and not (folder / name).is_symlink():
                (folder / name).symlink_to(os.path.join(place, name))
    assert shutil.which("bash", path=folder)
    return str(folder)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("images",), "images: there is no buildah; install it: apt-get install -y buildah"),
        (("kube/build",), "kube: Kubernetes wants Go 1.24 or newer, and here is: none"),
        (("kube/up",), "kube: etcd is missing; scripts/bootstrap kube installs what a cluster needs"),
    ],
    ids=lambda value: "" if isinstance(value, str) else value[0],
)
def test_what_is_missing_is_named(words: tuple[str, ...], sentence: str, path_without: str, tmp_path: Path) -> None:
    done = run(*words, *([] if words == ("images",) else [str(tmp_path / "folder")]), path=path_without)
    assert (done.returncode, done.stderr) == (1, f"{sentence}\n")


@pytest.mark.parametrize(
    ("files", "sentence"),
    [
        (None, "images: worker-cuda needs TensorRT: name a folder with its include/ in TENSORRT"),
        ({}, "images: TENSORRT: {folder} has no include/NvInferVersion.h"),
        (
            {"include/NvInferVersion.h": "#define NV_TENSORRT_MAJOR 10 //!< major\n#define NV_TENSORRT_MINOR 6\n"
             "#define NV_TENSORRT_PATCH 0\n#define NV_TENSORRT_BUILD 26\n", "lib/libnvinfer.so.11": ""},
            "images: TENSORRT: include/ is of TensorRT 10.6.0, and lib/ has no libnvinfer.so.10",
        ),
    ],
)  # fmt: skip
def test_what_the_image_for_cards_lacks_is_said_before_anything_is_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, str] | None, sentence: str
) -> None:
    monkeypatch.setenv("TENSORRT", "" if files is None else str(tmp_path))
    for name, text in (files or {}).items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    done = run("images", "worker-cuda")
    assert (done.returncode, done.stderr.strip()) == (1, sentence.format(folder=tmp_path))


def test_an_image_that_there_is_not_is_refused_before_anything_is_built() -> None:
    done = run("images", "services", "borker")
    assert done.returncode == 2
    assert done.stderr == "images: borker is none of them: services, broker, provisioner, worker-cpu, worker-cuda\n"


def test_only_a_cluster_is_taken_away(tmp_path: Path) -> None:
    (tmp_path / "kept").write_text("")
    done = run("kube/down", str(tmp_path))
    assert (done.returncode, done.stderr) == (1, f"kube: there is no cluster in {tmp_path}\n")
    assert (tmp_path / "kept").exists()
    assert run("kube/down", str(tmp_path / "never")).returncode == 0
