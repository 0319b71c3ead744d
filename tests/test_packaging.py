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
