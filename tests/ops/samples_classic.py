"""Sample nodes of ai.onnx.ml."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from .draws import floats, ints, words
from .rule_proof import Array, Constant, Sample


def _sample(op: str, operands: tuple[Array | Constant | None, ...], **attributes: Any) -> Sample:
    results = 2 if op.endswith("Classifier") else 1
    return Sample(op, operands, attributes, version=attributes.pop("version", 3), results=results, domain="ai.onnx.ml")


def _elementwise() -> Iterator[Sample]:
    yield _sample("Binarizer", (floats(5, 4),), threshold=0.3)
    yield _sample("LabelEncoder", (words(5, 4),), keys_strings=["a", "b", "c"], values_int64s=[3, -1, 7], version=2)
    yield _sample("LabelEncoder", (ints(5, 4),), keys_int64s=[1, 2, 3], values_floats=[0.5, 1.5, -2.0], version=2)
    names = {"cats_int64s": [1, 2, 3], "cats_strings": ["a", "b", "c"]}
    yield _sample("CategoryMapper", (words(5, 4),), **names, default_int64=-1)
    yield _sample("CategoryMapper", (ints(5, 4, low=1, high=4),), **names)
    yield _sample("Scaler", (floats(5, 4),), offset=[0.5], scale=[2.0])
    yield _sample("Scaler", (floats(5, 4),), offset=[0.5, 1.0, -1.0, 3.0], scale=[2.0, 3.0, 4.0, 1.0])
    data = floats(5, 4)
    data[::2, 1::2] = np.nan
    yield _sample("Imputer", (data,), imputed_value_floats=[0.25], replaced_value_float=float("nan"))
    yield _sample("Imputer", (data,), imputed_value_floats=[1.0, 2.0, 3.0, 4.0], replaced_value_float=float("nan"))
    yield _sample("OneHotEncoder", (ints(5, 4, low=0, high=4),), cats_int64s=[0, 1, 2], zeros=1)
    for norm in ("MAX", "L1", "L2"):
        yield _sample("Normalizer", (floats(5, 4),), norm=norm)


def _columns() -> Iterator[Sample]:
    yield _sample("ArrayFeatureExtractor", (floats(5, 6), ints(1, 4, low=0, high=6)))
    yield _sample("ArrayFeatureExtractor", (floats(3, 5, 6), ints(4, low=0, high=6)))
    yield _sample("FeatureVectorizer", (floats(5, 4), floats(5, 2)), inputdimensions=[4, 2])


def _models() -> Iterator[Sample]:
    data = floats(5, 4)
    weights = floats(12).tolist()
    yield _sample(
        "LinearClassifier",
        (data,),
        coefficients=weights,
        intercepts=[0.1, -0.2, 0.3],
        classlabels_ints=[4, 5, 7],
        post_transform="SOFTMAX",
    )
    yield _sample("LinearRegressor", (data,), coefficients=weights, intercepts=[0.1, -0.2, 0.3], targets=3)
    kernel = {"kernel_type": "RBF", "kernel_params": [0.3, 0.0, 3.0]}
    vectors = floats(12).tolist()
    yield _sample(
        "SVMRegressor",
        (data,),
        **kernel,
        support_vectors=vectors,
        coefficients=[1.0, -2.0, 0.5],
        rho=[0.1],
        n_supports=3,
    )
    yield _sample(
        "SVMClassifier",
        (data,),
        **kernel,
        support_vectors=vectors,
        coefficients=[1.0, -2.0, 0.5],
        rho=[0.1],
        vectors_per_class=[2, 1],
        classlabels_ints=[3, 8],
    )


def _trees() -> Iterator[Sample]:
    data = floats(5, 4)
    nodes = {
        "nodes_treeids": [0] * 5,
        "nodes_nodeids": [0, 1, 2, 3, 4],
        "nodes_featureids": [2, 0, 0, 0, 0],
        "nodes_values": [0.1, -0.4, 0.0, 0.0, 0.0],
        "nodes_modes": ["BRANCH_LEQ", "BRANCH_LEQ", "LEAF", "LEAF", "LEAF"],
        "nodes_truenodeids": [1, 3, 0, 0, 0],
        "nodes_falsenodeids": [2, 4, 0, 0, 0],
    }
    leaves = [2, 3, 4]
    yield _sample(
        "TreeEnsembleRegressor",
        (data,),
        **nodes,
        target_treeids=[0] * 3,
        target_nodeids=leaves,
        target_ids=[0, 1, 0],
        target_weights=[1.5, -2.0, 0.5],
        n_targets=2,
    )
    yield _sample(
        "TreeEnsembleClassifier",
        (data,),
        **nodes,
        class_treeids=[0] * 3,
        class_nodeids=leaves,
        class_ids=[0, 1, 2],
        class_weights=[1.0, 0.8, 0.6],
        classlabels_int64s=[4, 6, 9],
    )
    yield _sample(
        "TreeEnsemble",
        (data,),
        version=5,
        tree_roots=[0],
        nodes_featureids=[2, 0],
        nodes_splits=np.asarray([0.1, -0.4], np.float32),
        nodes_modes=np.asarray([0, 0], np.uint8),
        nodes_truenodeids=[1, 0],
        nodes_trueleafs=[0, 1],
        nodes_falsenodeids=[2, 1],
        nodes_falseleafs=[1, 1],
        leaf_targetids=[0, 1, 0],
        leaf_weights=np.asarray([1.5, -2.0, 0.5], np.float32),
        n_targets=2,
    )


CLASSIC = [*_elementwise(), *_columns(), *_models(), *_trees()]
