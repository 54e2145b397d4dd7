"""Lists the kinds of models that are known but not served. A model of such a kind is always refused by its kind."""

from __future__ import annotations

from typing import Any, Final

from sie.catalog.files import Checkpoint, refuse

_KINDS: Final = {
    "TrOCR, Nougat or Pix2Struct, images to text": ("donut-swin", "trocr", "nougat", "pix2struct"),
    "ColPali, multivectors of image patches": ("colpali", "colqwen2", "colmodernvbert"),
    "SAM, masks of images": (
        "sam", "sam2", "sam2_video", "sam3", "sam3_lite_text", "sam3_tracker", "sam3_tracker_video", "sam3_video",
        "sam_hq", "edgetam", "edgetam_video",
    ),
    "Docling, documents to text": ("granite_docling",),
    "vision and language; ColPali, Docling and OCR models are built on such": (
        "idefics2", "idefics3", "internvl", "llava", "llava_next", "llava_onevision", "mllama", "modernvbert",
        "paligemma", "qwen2_5_vl", "qwen2_vl", "qwen3_vl", "smolvlm",
    ),
    "OCR, images to text": (
        "glm_ocr", "lighton_ocr", "deepseek_ocr2", "got_ocr2", "paddleocr_vl", "qianfan_ocr", "unlimited_ocr",
        "minicpm_ocr",
    ),
    "audio": (
        "audio-spectrogram-transformer", "clap", "cohere_asr", "encodec", "granite_speech", "hubert", "lasr_ctc",
        "moonshine", "moonshine_streaming", "nemotron_asr_streaming", "parakeet_ctc", "parakeet_encoder",
        "parakeet_tdt", "qwen2_audio", "qwen3_asr", "seamless_m4t", "seamless_m4t_v2", "sew", "sew-d", "speech_to_text",
        "speecht5", "unispeech", "unispeech-sat", "voxtral", "wav2vec2", "wav2vec2-bert", "wav2vec2-conformer", "wavlm",
        "whisper",
    ),
    "detector of other families or of fixed classes": (
        "conditional_detr", "d_fine", "deformable_detr", "detr", "lw_detr", "mm-grounding-dino", "omdet-turbo",
        "rf_detr", "rt_detr", "rt_detr_v2", "table-transformer", "yolos",
    ),
}  # fmt: skip
_MAX_LAYERS: Final = 10_000
_KIND_OF: Final = {model_type: kind for kind, model_types in _KINDS.items() for model_type in model_types}


def check_served(checkpoint: Checkpoint, config: dict[str, Any]) -> None:
    """Raise ModelLoadFailed for a checkpoint of a kind that is known not to be served; the message names the kind."""
    parts = [config, *(part for part in config.values() if isinstance(part, dict))]
    check_layers(
        checkpoint.id,
        {name: value for part in parts for name, value in part.items() if name == "n_layer" or name.endswith("layers")},
    )
    model_type = str(config.get("model_type", ""))
    kind = _KIND_OF.get(model_type)
    if kind is None:
        kind = _kind_by_parts(config)
    if kind is not None:
        raise refuse(checkpoint.id, f"its model_type {model_type!r} ({kind}) is of a kind that is not served yet")


def check_layers(model_id: str, counts: dict[str, Any]) -> None:
    """Raise ModelLoadFailed for a count of layers that no model has, because building a billion layers never ends."""
    for name, count in counts.items():
        if isinstance(count, int) and count > _MAX_LAYERS:
            raise refuse(model_id, f"{name} is {count}: over {_MAX_LAYERS} layers")


def _kind_by_parts(config: dict[str, Any]) -> str | None:
    """Return the kind of a model of another type with an audio part; models with only images are refused later."""
    parts = [part for part in (config, config.get("thinker_config")) if isinstance(part, dict)]
    hears, sees = (any(part.get(name) is not None for part in parts) for name in ("audio_config", "vision_config"))
    if not hears:
        return None
    return "images and audio beside text" if sees else "audio"
