"""The versions of transformers that work, at both ends, and what is said about those that do not."""

import importlib
import os
import site
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from avmp.errors import InvalidArgument, Unsupported
from avmp.integrations import transformers_versions as versions

HERE = "avmp.integrations.transformers"


@pytest.mark.parametrize("version", ["4.57.6", "5.19.3", "6.0.0"])
def test_a_version_that_does_not_work_is_refused_when_the_module_is_imported(
    version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(versions.metadata, "version", lambda name: version)
    monkeypatch.delitem(sys.modules, HERE, raising=False)
    with pytest.raises(Unsupported, match=rf"transformers {version} does not work with avmp: 5\.20 to 5\.24 do"):
        importlib.import_module(HERE)


def test_without_transformers_it_is_said_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise versions.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(versions.metadata, "version", missing)
    monkeypatch.delitem(sys.modules, HERE, raising=False)
    with pytest.raises(ImportError, match=r"pip install 'avmp-triton\[transformers\]'"):
        importlib.import_module(HERE)


def test_newer_versions_are_warned_of_and_others_are_let_through() -> None:
    assert versions.require_version("5.20.0") == (5, 20) and versions.require_version("5.24.0.dev0") == (5, 24)
    with pytest.warns(UserWarning, match=r"tested with transformers 5\.20 to 5\.24; this is 5\.31\.0"):
        versions.require_version("5.31.0")
    with pytest.raises(InvalidArgument, match="expected a version"):
        versions.require_version("newest")


@pytest.mark.slow
@pytest.mark.parametrize("version", ["5.20.0", "5.23.0", "5.24.0"])
def test_all_tests_of_the_integration_pass_with_this_version(version: str, repository: Path, tmp_path: Path) -> None:
    """In an environment of its own, which finds everything but transformers and its dependencies in this one."""
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    venv.create(tmp_path / "environment", with_pip=True, symlinks=True)
    python = tmp_path / "environment" / "bin" / "python"

    def run(*arguments: str) -> str:
        done = subprocess.run(
            [python, "-m", *arguments], cwd=repository, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"{done.stdout[-5000:]}\n{done.stderr[-3000:]}"
        return done.stdout

    run("pip", "install", "--quiet", f"transformers=={version}")
    packages = next((tmp_path / "environment" / "lib").glob("python3*/site-packages"))
    (packages / "this_environment.pth").write_text("\n".join(site.getsitepackages()) + "\n", encoding="utf-8")
    assert version in run("pip", "show", "transformers")
    tests = sorted(str(file) for file in (repository / "tests").glob("test_transformers_*.py"))
    assert len(tests) >= 6
    assert " passed" in run("pytest", "-q", "-p", "no:cacheprovider", *tests)
