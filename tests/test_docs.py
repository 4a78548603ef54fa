"""The documentation: commands that the command line takes, code that compiles, tables that agree with the code."""

from __future__ import annotations

import importlib
import re
import shlex
from collections.abc import Iterator

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from hdexport.cli import parser
from hdexport.graph.targets.tensorrt.packages import EngineTarget
from hdplugins.kernels.block_config import block_config_for
from hdruntime.bundle.manifest import Backend
from hdruntime.errors import InputError
from support.pages import ROOT, code_blocks, page

PAGES = ["README.md", *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md"))]
PROJECT = pytest.importorskip("tomllib", reason="Python 3.11 reads TOML").loads(page("pyproject.toml"))["project"]


def commands(text: str) -> Iterator[str]:
    """What is to be typed of `hdexport`, up to a pipe: in blocks, and in prose where nothing is left out."""
    for block in code_blocks(text, "sh"):
        yield from re.findall(r"^hdexport [^|\n]*", block.code.replace("\\\n", ""), re.MULTILINE)
    for command in re.findall(r"`(hdexport [a-z]+ [^`|\\]+)", text):
        if "..." not in command and "[" not in command:
            yield command


def refusal(command: str) -> str | None:
    """What the command line says against a command, whatever prose has left out of it."""
    errors = []
    for left_out in ([], ["b"], ["b", "-o", "o"], ["b", "i", "-o", "o"], ["m", "--max-len", "9", "-o", "o"]):
        words = [*shlex.split(command, comments=True)[1:], *left_out]
        try:
            parser(words).parse_args(words)
        except InputError as error:
            errors.append(str(error))
        else:
            return None
    return f"{command}\n" + "\n".join(errors)


def test_the_command_line_takes_every_command() -> None:
    typed = {command: name for name in PAGES for command in commands(page(name))}
    refused = {command: (name, refusal(command)) for command, name in typed.items()}
    assert len(refused) > 30
    assert {command: why for command, why in refused.items() if why[1]} == {}


@pytest.mark.parametrize("command", ["hdexport run b t.txt -o o.jsonl --no-such-option", "hdexport inspect --json b c"])
def test_a_wrong_command_is_found(command: str) -> None:
    (found,) = commands(f"Type `{command}`, or `hdexport run ...`.")
    assert found == command
    assert refusal(command)


def test_all_python_compiles() -> None:
    for name in PAGES:
        for block in code_blocks(page(name), "python"):
            if not block.code.startswith("--8<--"):
                compile(block.code, name, "exec")


def test_links_beside_the_site_lead_somewhere() -> None:
    for name in ("CHANGELOG.md", "CONTRIBUTING.md", "benchmarks/README.md"):
        links = [link for link in re.findall(r"\]\((.*?)\)", page(name)) if "://" not in link]
        assert links, name
        for link in links:
            assert ((ROOT / name).parent / link.partition("#")[0]).exists(), (name, link)


def test_every_public_name_is_in_the_reference() -> None:
    text = "".join(page(name) for name in PAGES if name.startswith("docs/api/"))
    shown = set(re.findall(r"^::: ([\w.]+)$", text, re.MULTILINE))
    modules = [
        "hdruntime",
        "hdruntime.jobs",
        "hdruntime.ray",
        "hdexport.publish",
        "hdexport.package.write",
        "hdexport.verify",
    ]
    modules += ["hdexport.build", "hdexport.extend"]
    public = {f"{name}.{each}" for name in modules for each in importlib.import_module(name).__all__}
    assert {name for name in public if not name.endswith("__version__")} <= shown


def test_the_table_of_gpus_is_that_of_the_packages() -> None:
    pytest.importorskip("tensorrt_rtx")
    default = EngineTarget(Backend.TENSORRT_RTX).architectures
    rows = re.findall(r"^\| [^|]+ \| (\d+)\.(\d) \| yes \| (.*?) \| (.*?) \|$", page("docs/install.md"), re.MULTILINE)
    found = {f"sm{major}{minor}": (rtx, ours) for major, minor, rtx, ours in rows}
    assert set(default) <= set(found)
    for name, (rtx, ours) in found.items():
        number = int(name.removeprefix("sm"))
        on_request = f"with `--sm {number}`" if builds_for(name) else "**no**"
        assert rtx == ("yes" if name in default else on_request), name
        assert ours.startswith("yes" if has_kernels(number) else "no"), name


def builds_for(architecture: str) -> bool:
    try:
        EngineTarget(Backend.TENSORRT_RTX, (architecture,))
    except InputError:
        return False
    return True


def has_kernels(architecture: int) -> bool:
    try:
        block_config_for(architecture, 64, "float16")
    except ValueError:
        return False
    return True


def test_the_page_names_every_extra() -> None:
    named = set(",".join(re.findall(r"\.\[([\w,]+)\]", page("docs/install.md"))).split(","))
    assert named == set(PROJECT["optional-dependencies"]) - {"dev", "docs"}


def test_no_major_version_is_allowed_that_was_never_tried() -> None:
    pinned = (line.split("==") for line in page("constraints.txt").splitlines() if "==" in line)
    tried = {canonicalize_name(name): Version(version) for name, version in pinned}
    extras = PROJECT["optional-dependencies"]
    for line in [*PROJECT["dependencies"], *(each for name in extras if name != "dev" for each in extras[name])]:
        requirement = Requirement(line)
        (bound,) = (Version(each.version) for each in requirement.specifier if each.operator == "<")
        version = tried.get(canonicalize_name(requirement.name))
        assert version is None or bound == Version(f"{version.major + 1}"), line
