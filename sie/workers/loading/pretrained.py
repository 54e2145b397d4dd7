"""Builds a model of transformers from a checkpoint, and reads its weights; or builds its skeleton, for prepared weights.

It never runs the model, and does not know what the model is for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Final, TypeVar

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.initialization import meta_device_safe_creation_ops
from transformers.utils import logging as transformers_logging

from sie.catalog.architecture import build_refusal, read_model_config
from sie.catalog.files import refuse
from sie.catalog.gguf_reader import WeightsReader, reading_with
from sie.values.card import ModelCard
from sie.workers.device.faults import is_out_of_memory
from sie.workers.loading.dequantised import LazyTensor, open_dequantised
from sie.workers.loading.direct_weights import OnRead, direct_weights, keep
from sie.workers.loading.gguf_weights import open_gguf
from sie.workers.loading.light_imports import counting_on_cpu, register_metas
from sie.workers.loading.renamed_weights import read_renamed_weights
from sie.workers.prepared import session
from sie.workers.sharded.shards import Shards

BuiltT = TypeVar("BuiltT")
ChooseClass = Callable[[str, PretrainedConfig], type[Any]]
"""Returns the auto class of transformers for (model id, configuration). Raises ModelLoadFailed if there is none."""
_CPU: Final = torch.device("cpu")
_BUILD_ERRORS: Final = (
    ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError,
)  # fmt: skip
"""The errors of libraries for a configuration that is contradictory, or does not fit its weights."""


def read_pretrained(
    card: ModelCard,
    choose_class: ChooseClass,
    unused: str | None = None,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device = _CPU,
    shards: Shards | None = None,
    kept: frozenset[str] = frozenset(),
    on_read: OnRead = lambda _: None,
) -> PreTrainedModel:
    """Return a card's model on a device, with its weights in dtype, or with one member's shards of them.

    unused is the prefix of the names of weights that the checkpoint need not have. The weights of modules named in kept
    stay in float32. A GGUF file of transformers' own architectures is read in float32 on the CPU, whatever dtype and
    device are; it always has a language model. In a load that takes prepared weights the model is a skeleton: float32,
    without weights, on the meta device. on_read is called with the part of the weights that was read (0 to 1).

    Raises ModelLoadFailed for a checkpoint that does not fit its class, and the errors of `storage_faults` as they are.
    """
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    if card.gguf_file and not card.weight_names:
        return _read_gguf(card)
    config = read_model_config(card.id, card.directory, card.config_changes, card.config_part)
    config.use_cache = False  # a decoder would keep keys and values that are never read
    if getattr(config, "attn_logit_softcapping", None):
        config._attn_implementation = "eager"  # transformers 5.17 chooses sdpa, which ignores the cap
    auto = choose_class(card.id, config)
    if session.is_skeleton():
        skeleton = _build_skeleton(card, config, auto)
        keep(skeleton, kept)
        return skeleton
    tensors: Mapping[str, LazyTensor] | None = None
    if card.gguf_file:
        tensors = open_gguf(card, dtype)
    elif card.quantised:
        tensors = open_dequantised(card, dtype, device if shards is None else _CPU)
    try:
        with (
            reading_with(WeightsReader) if card.gguf_file else nullcontext(),
            direct_weights(dtype, device, shards, tensors, kept, on_read=on_read),
        ):
            model, report = _with_metas(lambda: _read_weights(card, config, auto, tensors))
    except _BUILD_ERRORS as error:
        if is_out_of_memory(error):
            raise
        raise build_refusal(card.id, config, error) from error
    _check_complete(card, report, unused)
    if shards is not None:
        shards.install(model)
    torch.nn.Module.to(model, device)  # its buffers
    return model.eval().requires_grad_(False)


def _with_metas(build: Callable[[], BuiltT]) -> BuiltT:
    """Return what build returns. Import torch's Python code of shapes only if it is needed: it takes long."""
    try:
        return build()
    except NotImplementedError:
        if not register_metas():
            raise
        return build()


def _read_weights(
    card: ModelCard, config: PretrainedConfig, auto: Any, tensors: Mapping[str, LazyTensor] | None
) -> tuple[PreTrainedModel, dict[str, Any]]:
    if card.weight_names:
        return _build_renamed(card, config, auto, tensors)
    return auto.from_pretrained(
        card.directory,
        config=config,
        dtype=torch.float32,
        use_safetensors=True,
        local_files_only=True,
        output_loading_info=True,
    )


def _build_renamed(
    card: ModelCard, config: PretrainedConfig, auto: Any, tensors: Mapping[str, LazyTensor] | None
) -> tuple[PreTrainedModel, dict[str, Any]]:
    """Build a model whose weights have other names in the checkpoint, and perhaps other layers than the library's class.

    tensors are those of a GGUF file or of a checkpoint with quantised weights; None: the checkpoint's own.
    """
    weights = read_renamed_weights(card, tensors)
    cls: Any = auto._model_mapping[type(config)]
    if card.layers:
        from sie.workers.loading.variants import variant_class  # imports model classes that few checkpoints need

        cls = variant_class(card.layers)
        config.qk_norm = any(".q_proj.norm." in name for name in weights)  # type: ignore[attr-defined]  # only for them
        session.remember("qk_norm", config.qk_norm)  # type: ignore[attr-defined]
    return cls.from_pretrained(None, config=config, state_dict=weights, dtype=torch.float32, output_loading_info=True)


def _build_skeleton(card: ModelCard, config: PretrainedConfig, auto: Any) -> PreTrainedModel:
    """Build a model without weights, on the meta device. `prepared.placing` puts prepared weights in their places."""
    if card.layers:
        from sie.workers.loading.variants import variant_class  # as in `_build_renamed`

        config.qk_norm = session.recall("qk_norm")  # type: ignore[attr-defined]
    with torch.device("meta"), meta_device_safe_creation_ops(), counting_on_cpu():
        model = _with_metas(
            lambda: variant_class(card.layers)(config) if card.layers else auto.from_config(config, dtype=torch.float32)
        )
    return model.eval().requires_grad_(False)


def untie_head(model: Any) -> None:
    """Give a T5's skeleton a head of its own if its checkpoint has one: transformers builds every T5 with a tied head.

    Of a model with weights, remember which it is, for the loads that take prepared weights.
    """
    table = model.get_input_embeddings().weight
    if not session.is_skeleton():
        session.remember("has_own_head", model.lm_head.weight is not table)
    elif session.recall("has_own_head"):
        model.lm_head.weight = torch.nn.Parameter(torch.empty_like(table), requires_grad=False)


def _read_gguf(card: ModelCard) -> PreTrainedModel:
    """Build the model of a GGUF file of transformers' own architectures, in float32 on the CPU."""
    path = Path(card.gguf_file)
    auto: Any = AutoModelForCausalLM
    if session.is_skeleton():
        return _build_skeleton(card, AutoConfig.for_model(**session.recall("config")), auto)
    try:
        with reading_with(WeightsReader):
            model, report = _with_metas(
                lambda: auto.from_pretrained(
                    str(path.parent),
                    gguf_file=path.name,
                    dtype=torch.float32,
                    local_files_only=True,
                    output_loading_info=True,
                )
            )
    except _BUILD_ERRORS as error:
        if is_out_of_memory(error):
            raise
        raise refuse(card.id, f"transformers cannot read this GGUF file: {error}") from error
    model.config.use_cache = False
    session.remember("config", model.config.to_dict())
    _check_complete(card, report)
    return model.eval().requires_grad_(False)


def _check_complete(card: ModelCard, report: dict[str, Any], unused: str | None = None) -> None:
    """Refuse a model with weights that its files lack, or a GGUF file with weights that no layer reads.

    transformers only warns: it invents the missing ones. unused is the prefix of the names that may be missing.
    """
    missing = sorted(name for name in report["missing_keys"] if unused is None or not name.startswith(unused))
    wrong = sorted(str(key) for key in report["mismatched_keys"])
    if missing or wrong:
        some = ", ".join((missing + wrong)[:5])
        raise refuse(card.id, f"{len(missing) + len(wrong)} weights are missing or of the wrong shape: {some}")
    if card.gguf_file and card.weight_names:
        others = [name for name in report["unexpected_keys"] if not name.startswith("lm_head.")]  # not an encoder's
        if others:
            some = ", ".join(sorted(others)[:5])
            raise refuse(
                card.id, f"it has weights that its architecture {card.architecture!r} does not have here: {some}"
            )
