"""Bad shardings files, for a GPT over dp=2,tp=2, by what the error must say of them."""

DEEP = "[" * 3000 + "]" * 3000
LAUGHS = "tensors:\n  a0: &a0 [dp]\n" + "".join(
    f"  a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 10)
)
"""Lists of lists: 10^9 entries when all are written out."""

SHARDINGS = {
    "the shardings file is empty": "",
    "not UTF-8": "\xff\xfe",
    'no axis "xx"': "tensors: {input_ids: [xx, null]}",
    "nearest names: input_ids": "tensors: {input_id: [dp, null]}",
    "the annotation has 1 dims": "tensors: {input_ids: [dp]}",
    "the annotation has 3 dims": "tensors: {input_ids: [dp, null, null]}",
    "comes twice, first in line 1": "tensors: {input_ids: [dp, null],\n  input_ids: [null, dp]}",
    "used twice in one sharding": "tensors: {input_ids: [dp, dp]}",
    "has no list of dims": "tensors: {input_ids: dp}",
    "of the layout cannot be read": 'tensors: {x: {layout: "sharding_specs:dp, mesh:|dp=99999999999999999999,tp=2|"}}',
    "has 400,000,000 devices": 'tensors: {x: {layout: "sharding_specs:dp, mesh:|dp=200000000,tp=2|"}}',
    "2 is no mesh axis": "tensors: {input_ids: [2, 1]}",
    "1.5 is no mesh axis": "tensors: {input_ids: [1.5, null]}",
    ".nan is no mesh axis": "tensors: {input_ids: [.nan, null]}",
    "true is no mesh axis": "tensors: {input_ids: [true, null]}",
    '"?" must come last': 'tensors: {input_ids: [["?", dp], null]}',
    "there is no section": "a: &a [dp, null]\ntensors: {input_ids: *a}",
    '"input_ids": {"input_ids": {"input_ids"': "tensors: &t\n  input_ids: *t",
    "have the tag !foo": "tensors: !foo {input_ids: [dp, null]}",
    "have the tag !bar": "tensors: {input_ids: [!bar dp, null]}",
    "have the tag !!set": "tensors: !!set {input_ids}",
    "tensors must be a table": "tensors: [a]",
    "have the tag !!python/object/apply:os.system": 'tensors: !!python/object/apply:os.system ["false"]',
    "not YAML": "tensors: {a: [b",
    "nested too deep": "tensors: {a: " + DEEP + "}",
    "does not fit axis tp": 'tensors: {input_ids: ["tp:(1)3", null]}',
    'no op is called "foo"': "ops: {foo: {in: [[1]]}}",
    "is no list of cuts": "ops: {/h.0/attn/q/MatMul: {in: [[-1, 1, 1], [1, 1]]}}",
    "the cuts do not agree": "ops: {/h.0/attn/q/MatMul: {in: [[1, 1, 2], [1, 2]]}}",
    "annotated twice": "tensors:\n  h.*.attn.q.weight: [null, tp]\n  h.0.attn.*.weight: [tp, null]",
    "does not agree with the mesh": "mesh: {dp: 4}",
    "while parsing a flow mapping expected ',' or '}'": '{"tensors": {"input_ids": [["dp"], null]}',
    "the shardings must be a table": "- tensors",
    "mesh axis tp has size 0": "mesh: {dp: 2, tp: 0}",
    'mesh axis tp has the size "two"': "mesh: {dp: 2, tp: two}",
    "the mesh must be a table": "mesh: [2, 2]",
    "expected a single document": "tensors: {input_ids: [dp, null]}\n---\ntensors: {}",
    "sub-axis tp:(0)2 does not fit": 'tensors: {input_ids: ["tp:(0)2", null]}',
    "tensors must be a table, not null": "tensors:\n",
    "that cannot start any token": "tensors:\n\tinput_ids: [dp, null]",
    "special characters are not allowed": "tensors: {input_ids\x01: [dp, null]}",
    '"h.0.attn.q.weight": [["tp", "tp"], null]': "tensors: {h.0.attn.q.weight: [[tp, tp], null]}",
    '["dp"] is no mesh axis': LAUGHS,
    "no axes of the mesh dp=2,tp=2 have the sizes that the cuts [3, 1, 1]": "ops: {/h.0/attn/q/MatMul: {in: [[3, 1, 1], [1, 1]]}}",
    "the cuts [1, 1, 1] are for 3 dims": "ops: {/h.0/attn/q/MatMul: {in: [[1, 1, 1], [1, 1, 1]]}}",
    "has 2 operands": "ops: {/h.0/attn/q/MatMul: {in: [[1, 1, 1], [1, 1], [1]]}}",
    'has no "sideways"': "ops: {/h.0/attn/q/MatMul: {sideways: [[1]]}}",
}
"""File contents, one character a byte."""
