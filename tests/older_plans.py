"""Plans as irpar wrote them before they had a digest of each part's model: what is in a model is then looked at itself."""

import json
from pathlib import Path


def forget_programs(out: Path) -> None:
    """Take from a plan what it says of the files of models, so that they can be changed by hand."""
    plan = json.loads((out / "plan.json").read_text())
    for entry in plan["parts"]:
        entry.pop("program")
    (out / "plan.json").write_text(json.dumps(plan))
