"""The families of models by name, and building one from a preset and overrides."""

import dataclasses
import json
import os
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import onnx

from irpar.files.atomic import check_file, new_pair

from . import bert, control, dlrm, gpt, llama, mlp, moe, recurrent, resnet, t5, unet, vit
from .builder import GraphBuilder
from .config import ConfigError, ModelConfig, require
from .weights import ExternalWeights, InlineWeights, PlaceholderWeights, WeightStore, data_path

WeightMode = Literal["inline", "external", "none"]


@dataclass(frozen=True)
class Family:
    """A kind of model: its configuration class, its presets (field -> value) and its builder."""

    config: type[ModelConfig]
    presets: Mapping[str, Mapping[str, object]]
    builder: Callable[[Any, WeightStore], GraphBuilder]


FAMILIES: dict[str, Family] = {
    "mlp": Family(mlp.MlpConfig, mlp.PRESETS, mlp.build_mlp),
    "gpt": Family(gpt.GptConfig, gpt.PRESETS, gpt.build_gpt),
    "llama": Family(llama.LlamaConfig, llama.PRESETS, llama.build_llama),
    "bert": Family(bert.BertConfig, bert.PRESETS, bert.build_bert),
    "vit": Family(vit.VitConfig, vit.PRESETS, vit.build_vit),
    "t5": Family(t5.T5Config, t5.PRESETS, t5.build_t5),
    "moe": Family(moe.MoeConfig, moe.PRESETS, moe.build_moe),
    "resnet": Family(resnet.ResnetConfig, resnet.PRESETS, resnet.build_resnet),
    "dlrm": Family(dlrm.DlrmConfig, dlrm.PRESETS, dlrm.build_dlrm),
    "unet": Family(unet.UnetConfig, unet.PRESETS, unet.build_unet),
    "recurrent": Family(recurrent.RecurrentConfig, recurrent.PRESETS, recurrent.build_recurrent),
    "control": Family(control.ControlConfig, control.PRESETS, control.build_control),
}


@dataclass(frozen=True)
class ModelSize:
    """What `save` wrote: the number of nodes, of weight elements, and of bytes that these elements take."""

    nodes: int
    parameters: int
    weight_bytes: int


def family_of(name: str) -> Family:
    """Return the family by name; raises `ConfigError` if there is none."""
    require(name in FAMILIES, f"no model family {name!r}: there are {', '.join(FAMILIES)}")
    return FAMILIES[name]


def config_of(name: str, preset: str = "tiny", **overrides: object) -> ModelConfig:
    """Return the configuration of a family's preset with fields overridden.

    Raises:
        ConfigError: no such family, preset or field, or values that do not go together.
    """
    family = family_of(name)
    require(preset in family.presets, f"no preset {preset!r} for {name}: there are {', '.join(family.presets)}")
    fields = {field.name for field in dataclasses.fields(family.config)}
    for field in overrides:
        require(field in fields, f"{name} has no setting {field!r}: it has {', '.join(sorted(fields))}")
    return family.config(**{**family.presets[preset], **overrides})  # type: ignore[arg-type]


def build(name: str, preset: str = "tiny", **overrides: object) -> onnx.ModelProto:
    """Build a model with its weights inside.

    Args:
        name: the family, a key of `FAMILIES`.
        preset: a key of the family's presets.
        overrides: fields of the family's configuration, for instance `layers=4`.

    Raises:
        ConfigError: see `config_of`; also when the weights pass the 2 GB that an ONNX file can hold.
    """
    config = config_of(name, preset, **overrides)
    return _build(name, config, InlineWeights(config.seed))


def save(
    path: str | os.PathLike[str],
    name: str,
    preset: str = "tiny",
    *,
    weights: WeightMode = "inline",
    **overrides: object,
) -> ModelSize:
    """Build a model and write it to `path`.

    Args:
        path: the .onnx file; overwritten if it exists.
        name: the family, a key of `FAMILIES`.
        preset: a key of the family's presets.
        weights: "inline" in the file itself (2 GB at most), "external" in `<path>.data` beside it, or "none":
            as "external", but a sparse file that reads as zeros and takes no disk space, for huge shapes.
        overrides: fields of the family's configuration.

    Returns:
        The size of what was written.

    Raises:
        ConfigError: as `build` does.
        WriteError: the file cannot be written.
    """
    target = Path(path)
    config = config_of(name, preset, **overrides)
    check_file(target, "the model")
    with new_pair(target, data_path(target), "the model") as (fresh, fresh_data):
        with _store(fresh_data, data_path(target).name, weights, config.seed) as store:
            model = _build(name, config, store)
        fresh.write_bytes(model.SerializeToString())
    return ModelSize(len(model.graph.node), store.parameters, store.weight_bytes)


def _store(data: Path, data_name: str, weights: WeightMode, seed: int) -> AbstractContextManager[WeightStore]:
    match weights:
        case "inline":
            return nullcontext(InlineWeights(seed))
        case "external":
            return ExternalWeights(data, seed, data_name)
        case "none":
            return PlaceholderWeights(data, data_name)
    raise ConfigError(f'weights must be "inline", "external" or "none", not {weights!r}')


def _build(name: str, config: ModelConfig, weights: WeightStore) -> onnx.ModelProto:
    settings = json.dumps(dataclasses.asdict(config), sort_keys=True)
    return (
        family_of(name).builder(config, weights).model({"irpar.models.family": name, "irpar.models.config": settings})
    )
