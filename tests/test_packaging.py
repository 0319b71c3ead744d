"""What is installed: the packages, and the lock that development and CI install from."""

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_every_package_is_listed() -> None:
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    homes = {"irpar": "irpar", **listed["package-dir"]}
    found = set()
    for name, folder in homes.items():
        for init in (ROOT / folder).rglob("__init__.py"):
            inner = init.parent.relative_to(ROOT / folder).parts
            found.add(".".join([name, *inner]))
    assert set(listed["packages"]) == found


def _name(requirement: str) -> str:
    found = re.match(r"[\w.-]+", requirement)
    assert found is not None, requirement
    return re.sub("[-_.]+", "-", found[0]).lower()


def test_the_lock_has_a_release_with_hashes_of_all_that_development_needs() -> None:
    text = (ROOT / "requirements" / "dev.lock").read_text()
    assert "://" not in text
    assert "--index" not in text
    assert "--find-links" not in text
    entries = re.split(r"\n(?=\w)", text.partition("\n")[2].replace("#    make lock\n", ""))
    locked = {_name(entry) for entry in entries}
    for entry in entries:
        assert re.match(r"[\w.-]+==\S+", entry), entry
        assert "--hash=sha256:" in entry, entry
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    extras = project["project"]["optional-dependencies"]
    needed = [
        *project["build-system"]["requires"],
        *project["project"]["dependencies"],
        *extras["test"],
        *extras["dev"],
    ]
    assert {_name(requirement) for requirement in needed} - {"irpar"} <= locked
