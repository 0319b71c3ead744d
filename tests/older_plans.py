"""Plans as irpar wrote them before they had segments and a digest of each part's model, which is then looked at itself."""

import json
from pathlib import Path


def forget_programs(out: Path) -> None:
    """Take from a plan what it says of the programs and files of models, so that they can be changed by hand."""
    plan = json.loads((out / "plan.json").read_text())
    for entry in plan["parts"]:
        entry.pop("program")
        entry.pop("segments")
    (out / "plan.json").write_text(json.dumps(plan))
