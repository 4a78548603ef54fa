"""The images: what their files promise, and, where Docker is, an image that runs a bundle it cannot write to."""

from __future__ import annotations

import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

from support.pages import ROOT
from support.tiny_bundle import make_bundle

FILES = sorted((ROOT / "docker").glob("*.Dockerfile"))
MEGABYTE = 10**6


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_an_image_has_the_runtime_alone_and_is_not_root(file: Path) -> None:
    text = file.read_text()
    assert re.search(r"^USER 10001$", text, re.MULTILINE)
    assert text.index("USER 10001") > text.rindex("RUN "), "nothing is run as root after it"
    (asked,) = re.findall(r"^ARG EXTRAS=(\S+)$", text, re.MULTILINE)
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    brought = " ".join(package for name in asked.split(",") for package in extras[name])
    assert "torch" not in brought
    assert "transformers" not in brought
    copied = re.findall(r"^COPY (?!--)(.+) \S+$", text, re.MULTILINE)
    let_in = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert {name for line in copied for name in line.split()} == let_in
    for name in let_in:
        assert (ROOT / name).exists(), name


def _has_docker() -> bool:
    command = shutil.which("docker")
    return command is not None and subprocess.run([command, "info"], capture_output=True).returncode == 0


@pytest.mark.skipif(not _has_docker(), reason="no Docker daemon runs here")
def test_the_image_for_cpus_runs_a_bundle_that_it_cannot_write_to(tmp_path: Path) -> None:
    def docker(*arguments: object) -> str:
        done = subprocess.run(["docker", *map(str, arguments)], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    docker("build", "--file", ROOT / "docker" / "cpu.Dockerfile", "--tag", "hdexport-test", ROOT)
    assert int(docker("image", "inspect", "--format", "{{.Size}}", "hdexport-test")) < 600 * MEGABYTE
    bundle = make_bundle(tmp_path / "bundle", task="sentence-similarity")
    (tmp_path / "work").mkdir(mode=0o777)
    (tmp_path / "work").chmod(0o777)
    (tmp_path / "work" / "texts.txt").write_text("long documents\n")
    volumes = ["--volume", f"{bundle}:/bundle:ro", "--volume", f"{tmp_path / 'work'}:/work"]
    docker("run", "--rm", "--network", "none", *volumes, "hdexport-test", "run", "/bundle", "texts.txt", "-o", "v.npy")
    assert (tmp_path / "work" / "v.npy").stat().st_uid == 10001
