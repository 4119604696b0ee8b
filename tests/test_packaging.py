"""The ways in which people get avmp, each in a fresh environment, and the two commands that the README promises.

Torch and triton are left out of these environments: what is tested is the packaging, and the policy needs neither.
"""

import os
import re
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

PRINT_ORIGIN = "import avmp, avmp.kernels; print(avmp.__file__, *avmp.kernels.__path__, sep='\\n')"


def run(*command: str | Path, cwd: Path) -> str:
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{command}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout


@pytest.fixture
def checkout(repository, tmp_path) -> Path:
    """A copy of the sources: building leaves files behind, and files that an earlier build left must not matter."""
    copy = tmp_path / "checkout"
    leftovers = shutil.ignore_patterns(".git", ".*_cache", ".hypothesis", ".venv", "__pycache__", "*.egg-info")
    shutil.copytree(
        repository,
        copy,
        symlinks=True,
        ignore=lambda folder, names: (
            leftovers(folder, names) | ({"build", "dist"} if Path(folder) == repository else set())
        ),
    )
    return copy


@pytest.fixture
def python(tmp_path) -> Path:
    """The interpreter of a fresh environment that holds numpy and nothing else."""
    venv.create(tmp_path / "environment", with_pip=True, symlinks=True)
    python = tmp_path / "environment" / "bin" / "python"
    run(python, "-m", "pip", "install", "--quiet", "numpy", cwd=tmp_path)
    return python


@pytest.fixture
def elsewhere(tmp_path) -> Path:
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    return folder


def check_runs(python: Path, cwd: Path) -> None:
    """The report comes out, by module and by script."""
    assert "backend" in run(python, "-m", "avmp", "env", cwd=cwd)
    assert "backend" in run(python.with_name("avmp"), "env", cwd=cwd)


@pytest.mark.slow
def test_install(checkout, python, elsewhere):
    run(python, "-m", "pip", "install", "--no-deps", ".", cwd=checkout)
    check_runs(python, elsewhere)
    check_runs(python, checkout)
    origin = run(python, "-c", PRINT_ORIGIN, cwd=elsewhere).splitlines()
    assert all("site-packages" in place for place in origin)


@pytest.mark.slow
def test_editable_install(checkout, python, elsewhere):
    run(python, "-m", "pip", "install", "--no-deps", "-e", ".", cwd=checkout)
    check_runs(python, elsewhere)
    package, kernels = run(python, "-c", PRINT_ORIGIN, cwd=elsewhere).splitlines()
    assert Path(package) == checkout / "avmp" / "__init__.py"
    assert Path(kernels).resolve() == checkout / "kernels"


@pytest.mark.slow
def test_bare_checkout(checkout, python):
    assert "backend" in run(python, "-m", "avmp", "env", cwd=checkout)
    package, kernels = run(python, "-c", PRINT_ORIGIN, cwd=checkout).splitlines()
    assert Path(package) == checkout / "avmp" / "__init__.py"
    assert Path(kernels).resolve() == checkout / "kernels"


@pytest.mark.slow
def test_wheel_and_sdist(checkout, python, elsewhere):
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", elsewhere, checkout, cwd=elsewhere)
    wheel, sdist = next(elsewhere.glob("avmp_triton-*.whl")), next(elsewhere.glob("avmp_triton-*.tar.gz"))
    check_contents(checkout, wheel_files(wheel))
    check_contents(checkout, sdist_files(sdist))
    for archive in (wheel, sdist):
        run(python, "-m", "pip", "install", "--no-deps", "--force-reinstall", archive, cwd=elsewhere)
        check_runs(python, elsewhere)


def wheel_files(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def sdist_files(sdist: Path) -> set[str]:
    """Names below the one folder of the archive; links would be of no use to whoever unpacks it."""
    with tarfile.open(sdist) as archive:
        members = [member for member in archive if not member.isdir()]
        assert all(member.isfile() for member in members)
        return {member.name.partition("/")[2] for member in members}


def check_contents(checkout: Path, files: set[str]) -> None:
    kernels = {f"avmp/kernels/{file.name}" for file in (checkout / "kernels").iterdir() if file.is_file()}
    modules = {str(file.relative_to(checkout)) for file in (checkout / "avmp").rglob("*.py")}
    assert kernels | modules | {"avmp/py.typed"} <= files
    assert any(Path(file).name == "LICENSE" for file in files)
    assert [file for file in files if file.startswith(("kernels", "tests", "bench"))] == []


@pytest.mark.parametrize("marker", ["main", "tests"])
def test_the_readme_gives_each_command_as_one_shell_line(repository, marker):
    readme = (repository / "README.md").read_text()
    blocks = re.findall(rf"^<!-- {marker} -->\n```bash\n(.*?)^```$", readme, re.MULTILINE | re.DOTALL)
    assert len(blocks) == 1
    assert re.fullmatch(r"python -m pip install torch==\S+ .+ && python -m .+\n", blocks[0])
