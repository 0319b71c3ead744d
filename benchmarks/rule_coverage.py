"""Which operators can be sharded, and differentiated: a list by domain with what proves it.

Exit status 1 where an operator is in no list, or has a rule and neither a gradient nor a reason why not.

    python benchmarks/rule_coverage.py [--prove]

With --prove every rule is proven anew, as the tests do: what it allows gives the right numbers, what it forbids wrong
ones.
"""

import sys
from collections import Counter
from pathlib import Path

import onnx.defs
from onnxruntime.capi import onnxruntime_pybind11_state as runtime

from irpar.ops import OPEN_BODIES, Kind, OpDef, definitions, factor_rule
from irpar.ops.gradients.refused import Refused
from irpar.ops.gradients.zero import StraightThrough, zero
from irpar.ops.replicate_only import REPLICATE_ONLY

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.ops.rule_proof import Sample, cut, run_cut, same, works_by  # noqa: E402
from tests.ops.samples import SAMPLES  # noqa: E402
from tests.ops.test_rules import CONSERVATIVE, empty_blocks_are_right  # noqa: E402

PARTS = (2, 3)
Operator = tuple[str, str]


def known_operators() -> dict[Operator, list[int]]:
    """Every operator of ONNX, of any version, and of com.microsoft; with the versions in which ONNX changed it."""
    found: dict[Operator, list[int]] = {}
    for schema in onnx.defs.get_all_schemas_with_history():
        if schema.domain != "irpar":  # which irpar registers there itself
            found.setdefault((schema.domain, schema.name), []).append(schema.since_version)
    for schema in runtime.get_all_operator_schema():
        if schema.domain == "com.microsoft":
            found.setdefault((schema.domain, schema.name), []).append(schema.since_version)
    return found


def proven(sample: Sample) -> tuple[int, int, int]:
    """How many cuts that the rule allows gave the right numbers, of how many that left a device without elements, and
    how many that it forbids did not.

    Raises:
        AssertionError: one did otherwise.
    """
    rule = factor_rule(sample.node)
    assert rule is not None, f"{sample} has no rule"
    allowed = empty = forbidden = 0
    for factor, kind in enumerate(rule.kinds):
        if kind is Kind.PERMUTE:
            continue  # A local program takes blocks of any sizes: tests/ops/local_programs.
        for parts in PARTS:
            if kind is Kind.REPLICATE:
                place = (sample.operator, *rule.places[factor][0][:2])
                if place not in CONSERVATIVE:
                    assert works_by(sample, rule, factor, parts) is None, f"{sample}: {rule} forbids too much"
                    forbidden += 1
            else:
                how = cut(rule, sample.node, factor, parts)
                if how is not None:
                    assert same(sample, run_cut(sample, how)), f"{sample}: {rule} allows too much"
                    allowed += 1
        if rule.accepts_empty[factor]:
            found = empty_blocks_are_right(sample, rule, factor)
            assert found is not False, f"{sample}: {rule} accepts empty blocks"
            empty += found is True
    return allowed, empty, forbidden


def gradient_of(known: OpDef) -> str:
    """Whether an operator has a gradient: yes, zero, or missing with the reason."""
    if known.gradient is zero:
        return "zero"
    if isinstance(known.gradient, StraightThrough):
        return "zero, or straight through by option"
    if isinstance(known.gradient, Refused):
        return f"missing, {known.gradient.why}"
    if known.decompose is not None:
        return "yes, as plain operators"
    return "yes" if known.gradient is not None else "missing"


def named(operator: Operator) -> str:
    """The operator as models write it."""
    return f"{operator[0]}.{operator[1]}" if operator[0] else operator[1]


def main() -> int:
    """Print the lists and counts."""
    known = known_operators()
    ruled = {(found.domain, found.name) for found in definitions() if found.rule is not None}
    gradients = {(found.domain, found.name): gradient_of(found) for found in definitions() if not found.communicates}
    samples = Counter((sample.domain, sample.op) for sample in SAMPLES)
    unproven = sorted(ruled - set(samples))
    neither = sorted(set(known) - ruled - OPEN_BODIES - set(REPLICATE_ONLY))
    both = sorted(ruled & set(REPLICATE_ONLY))
    print("with a rule, and the number of nodes that prove it")
    for operator in sorted(ruled):
        print(f"  {named(operator):50} {samples[operator]:3}  gradient: {gradients.get(operator, 'missing')}")
    print("as their bodies are")
    for operator in sorted(OPEN_BODIES):
        print(f"  {named(operator)}")
    print("replicate only, because")
    for operator, why in sorted(REPLICATE_ONLY.items()):
        print(f"  {named(operator):50} {why}")
    if "--prove" in sys.argv[1:]:
        counts = [proven(sample) for sample in SAMPLES]
        allowed, empty, forbidden = (sum(count[side] for count in counts) for side in range(3))
        print(f"\nproven: {allowed} cuts that rules allow are right, {forbidden} that they forbid are wrong;")
        print(f"{empty} cuts that leave a device without elements are right")
    print(f"\n{'domain':26} {'rule':>5} {'proven':>7} {'replicate only':>15}")
    for domain in sorted({domain for domain, _ in (*ruled, *REPLICATE_ONLY)}):
        columns = (
            sum(key[0] == domain for key in ruled),
            sum(key[0] == domain for key in ruled & set(samples)),
            sum(key[0] == domain for key in REPLICATE_ONLY),
        )
        print(f"{domain or 'ai.onnx':26} {columns[0]:5} {columns[1]:7} {columns[2]:15}")
    print(f"{'all':26} {len(ruled):5} {len(ruled & set(samples)):7} {len(REPLICATE_ONLY):15}")
    kinds = Counter(kind.split(",")[0] for operator, kind in gradients.items() if operator in known)
    print("gradients: " + ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items(), reverse=True)))
    unexplained = sorted(operator for operator, kind in gradients.items() if kind == "missing" and operator in ruled)
    for what, found in (
        ("without a gradient or a reason", unexplained),
        ("in neither list", neither),
        ("in both lists", both),
        ("not proven", unproven),
    ):
        if found:
            print(f"{what}: {', '.join(map(named, found))}")
    return 1 if neither or both or unproven or unexplained else 0


if __name__ == "__main__":
    sys.exit(main())
