"""Turns `modules.json` into a pipeline: the steps after the transformer's hidden states.

Follows sentence-transformers 2 to 6. A module that cannot run exactly as sentence-transformers runs it is refused by name.
"""

from __future__ import annotations

from typing import Any

import msgspec

from sie.catalog.files import Checkpoint, refuse
from sie.catalog.weights import check_weights
from sie.values.card import PipelineStep

POOLING_MODES = ("cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken")
_LEGACY_POOLING = {  # the order is that of the concatenated vectors
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
_PREFIX = "sentence_transformers."
_JINA = "custom_st.Transformer"
"""The first module of jina-embeddings-v3: a Transformer that also takes an adapter, here `adapter` in the file of models."""
_JINA_CODE = "modeling_lora.XLMRobertaLoRA"
_PYLATE_DENSE = "pylate.models.Dense.Dense"  # identical to sentence-transformers' Dense
_NAME_KEYS = ("module_input_name", "module_output_name")
_SENTENCE, _TOKENS = "sentence_embedding", "token_embeddings"


class Module(msgspec.Struct, frozen=True):
    """One entry of `modules.json`."""

    type: str
    path: str = ""

    @property
    def name(self) -> str:
        """The class name without its package, which has changed over the years."""
        return self.type.rpartition(".")[2]

    @property
    def folder(self) -> str:
        """The folder of its files, relative to the checkpoint; empty for the checkpoint itself."""
        return self.path.rstrip("/")


class Pipeline(msgspec.Struct, frozen=True, kw_only=True):
    """The steps of `modules.json`; a final normalise is kept apart, because a request may turn it off."""

    steps: tuple[PipelineStep, ...]
    dims: int
    normalize: bool


def read_modules(checkpoint: Checkpoint) -> list[Module] | None:
    """Return the modules of `modules.json`, or None for a bare checkpoint. Raises ModelLoadFailed for custom code."""
    modules = checkpoint.read_json("modules.json", list[Module])
    if modules and modules[0] == Module(_JINA) and _has_jina_code(checkpoint):
        modules[0] = Module(f"{_PREFIX}models.Transformer")
    for module in modules or ():
        if not module.type.startswith(_PREFIX) and module.type != _PYLATE_DENSE:
            raise refuse(checkpoint.id, f"modules.json names {module.type!r}, which is code of its own")
    return modules


def _has_jina_code(checkpoint: Checkpoint) -> bool:
    """Tell whether the checkpoint names the module that is known here. Other models have another module of that name."""
    named = checkpoint.read_object("config.json").get("auto_map")
    return isinstance(named, dict) and str(named.get("AutoModel")).rpartition("--")[2] == _JINA_CODE


def read_pipeline(checkpoint: Checkpoint, modules: list[Module], hidden_size: int) -> Pipeline:
    """Read the modules of a sentence-transformers checkpoint. hidden_size is the transformer's own width."""
    if not modules or modules[0].name != "Transformer":
        first = modules[0].name if modules else "nothing"
        raise refuse(checkpoint.id, f"modules.json begins with {first}; only a Transformer can be run")
    pipeline = read_sentence_steps(checkpoint, modules[1:], hidden_size)
    kinds = [step.kind for step in pipeline.steps]
    if kinds.count("pooling") != 1 or kinds[0] != "pooling":
        raise refuse(checkpoint.id, "modules.json must have exactly one Pooling, directly after the Transformer")
    return pipeline


def read_sentence_steps(checkpoint: Checkpoint, modules: list[Module], width: int) -> Pipeline:
    """Read the modules that follow the first one, which gives vectors of this width."""
    steps: list[PipelineStep] = []
    for module in modules:
        if module.name == "Dropout":  # does nothing outside training
            continue
        step, width = _read_step(checkpoint, module.name, module.folder, width)
        steps.append(step)
    normalize = bool(steps) and steps[-1].kind == "normalize"
    return Pipeline(steps=tuple(steps[:-1] if normalize else steps), dims=width, normalize=normalize)


def read_token_steps(
    checkpoint: Checkpoint, modules: list[Module], hidden_size: int
) -> tuple[tuple[PipelineStep, ...], int, bool]:
    """Read the modules for token vectors: return the steps, the width after them, and whether they normalise last.

    A MultiVectorMask is skipped, because it does not change vectors.
    """
    steps: list[PipelineStep] = []
    dims = hidden_size
    for module in modules:
        if module.name in ("Dropout", "MultiVectorMask"):
            continue
        if module.name == "Pooling":
            raise refuse(checkpoint.id, "modules.json names a Pooling, but its vectors are those of tokens")
        step, dims = _read_step(checkpoint, module.name, module.folder, dims, level=_TOKENS)
        steps.append(step)
    normalize = bool(steps) and steps[-1].kind == "normalize"
    return tuple(steps[:-1] if normalize else steps), dims, normalize


def default_pipeline(config: dict[str, Any], hidden_size: int, mode: str | None = None) -> Pipeline:
    """Return the pipeline of a bare checkpoint: one pooling.

    Without a mode it is the mean, or the last token for a causal model, as in sentence-transformers.
    """
    architectures = config.get("architectures") or [""]
    causal = str(architectures[0]).endswith("ForCausalLM") and config.get("is_causal", True)
    pooling = PipelineStep(kind="pooling", config={"modes": [mode or ("lasttoken" if causal else "mean")]})
    return Pipeline(steps=(pooling,), dims=hidden_size, normalize=False)


def _read_step(
    checkpoint: Checkpoint, name: str, folder: str, dims: int, *, level: str = _SENTENCE
) -> tuple[PipelineStep, int]:
    """Return one step and the width after it; level is the name of the step's input and output."""
    config = checkpoint.read_object(f"{folder}/config.json")
    directory = str(checkpoint.root / folder)
    if name == "Pooling":
        modes = _pooling_modes(checkpoint, config, dims)
        skips = {} if config.get("include_prompt", True) else {"include_prompt": False}
        return PipelineStep(kind="pooling", config={"modes": modes, **skips}), dims * len(modes)
    if name not in ("Dense", "LayerNorm", "Normalize"):
        raise refuse(checkpoint.id, f"modules.json names the module {name}, which cannot be run")
    for key in _NAME_KEYS:
        if (config.get(key) or level) != level:
            raise refuse(checkpoint.id, f"{folder}: {key} {config[key]!r}; only {level!r} can be run")
    if name == "Normalize":
        return PipelineStep(kind="normalize"), dims
    check_weights(checkpoint, folder)
    if name == "LayerNorm":
        _check_width(checkpoint, folder, "dimension", config, dims)
        return PipelineStep(kind="layer_norm", directory=directory, config={"dimension": dims}), dims
    _check_width(checkpoint, folder, "in_features", config, dims)
    step = PipelineStep(kind="dense", directory=directory, config=_dense_config(checkpoint, folder, config))
    return step, int(config["out_features"])


def _pooling_modes(checkpoint: Checkpoint, config: dict[str, Any], dims: int) -> list[str]:
    width = config.get("embedding_dimension", config.get("word_embedding_dimension", dims))
    if width != dims:
        raise refuse(checkpoint.id, f"its pooling expects {width} dimensions, the transformer has {dims}")
    modes = config.get("pooling_mode")
    if modes is None:
        modes = [mode for key, mode in _LEGACY_POOLING.items() if config.get(key, False)] or ["mean"]
    modes = [modes] if isinstance(modes, str) else list(modes)
    for mode in modes:
        if mode not in POOLING_MODES:
            raise refuse(checkpoint.id, f"pooling mode {mode!r} is not one of {', '.join(POOLING_MODES)}")
    return modes


def _check_width(checkpoint: Checkpoint, folder: str, key: str, config: dict[str, Any], dims: int) -> None:
    if config.get(key) != dims:
        raise refuse(checkpoint.id, f"{folder}: {key} is {config.get(key)!r}, but {dims} dimensions arrive")


def _dense_config(checkpoint: Checkpoint, folder: str, config: dict[str, Any]) -> dict[str, Any]:
    """Return in_features, out_features, bias, use_residual and activation (a class name in torch.nn)."""
    width = config.get("out_features")
    if not isinstance(width, int) or width < 1:
        raise refuse(checkpoint.id, f"{folder}: out_features is {width!r}")
    activation = config.get("activation_function", "torch.nn.modules.activation.Tanh")
    if not isinstance(activation, str) or not activation.startswith("torch.nn.modules."):
        raise refuse(checkpoint.id, f"{folder}: activation {activation!r} is code of its own")
    return {
        "in_features": config["in_features"],
        "out_features": width,
        "bias": bool(config.get("bias", True)),
        "use_residual": bool(config.get("use_residual", False)),
        "activation": activation.rpartition(".")[2],
    }
