"""Loads models of the optional libraries `gliner`, `gliner2` and `gliclass`, which users install themselves, and GLiREL.

The error for a missing library names the command that installs it. Everything is read from the model's directory: the
encoder's configuration from the library's own, the tokenizers from their files. It never looks on a hub and runs no
code of a checkpoint. Runs in a thread beside the step loop.
"""

from __future__ import annotations

import importlib
import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModel, AutoTokenizer
from transformers.utils import logging as transformers_logging

from sie.catalog.architecture import plain_config
from sie.catalog.files import refuse
from sie.catalog.gli import GLINER2_ENCODER, GLINER_CONFIG, GLIREL_CONFIG, LABELS_TOKENIZER
from sie.config.limits import Limits
from sie.values.card import ModelCard
from sie.values.errors import ModelLoadFailed
from sie.values.extract import ExtractTask, Gliclass, Gliner, GlinerUnion, Glirel
from sie.values.glirel_items import GlirelItem
from sie.workers.device.device import DtypeSetting, choose_dtype, resolve_device
from sie.workers.device.fallbacks import note
from sie.workers.device.faults import raise_if_lost
from sie.workers.loading.storage_faults import storage_faults
from sie.workers.runners.gliclass import GliclassRunner
from sie.workers.runners.gliner import GlinerRunner
from sie.workers.runners.gliner2 import Gliner2Runner
from sie.workers.runners.gliner_union import GlinerUnionRunner
from sie.workers.runners.glirel import GlirelRunner
from sie.workers.runners.glirel_model import GlirelModel
from sie.workers.stall_notices import read_tokenizer, reading

_INSTALL = {
    # gliner declares an older transformers than the version here. It runs with this one, but pip would refuse the pair.
    "gliner": "pip install --no-deps gliner",
    "gliner2": "pip install gliner2",
    "gliclass": "pip install gliclass",
}
_ENCODERS = ("encoder_config", "labels_encoder_config")
_HALF_FORMATS = (torch.bfloat16, torch.float16)

Built = TypeVar("Built")
Progress = Callable[[float, str], None]
"""Takes the fraction done, 0 to 1, and the current activity."""


def load_gliner(
    card: ModelCard, device_name: str, dtype_setting: DtypeSetting, on_progress: Progress, limits: Limits
) -> GlinerRunner:
    """Return a GLiNER model that is ready for its first step.

    Arguments and errors as in `loader.load_encoder`; error_class DEPENDENCY if the library is not installed. limits
    bound the spans of a window, and the entities between which relations are searched.
    """
    assert isinstance(card.extract, Gliner)
    device, dtype = resolve_device(device_name), choose_dtype(dtype_setting, resolve_device(device_name))
    library = _import(card, "gliner")
    on_progress(0.1, "reading weights")
    with _faults(card), reading(str(Path(card.directory, "tokenizer.json"))):
        model = _build_gliner(card, library)
        _read_weights(card, model.model)
    model.eval().requires_grad_(requires_grad=False)

    def build(chosen: torch.dtype) -> GlinerRunner:
        model.model.to(device, chosen)
        return GlinerRunner(card, model, _name(chosen), limits)

    def probe(runner: GlinerRunner) -> bool:
        task = ExtractTask(labels=("a",), threshold=0.5)
        runner.run_extract([np.frombuffer(b"a b", np.uint8)], [task])
        return True

    return _try_formats(card, build, probe, dtype, on_progress)


def load_gliner_union(
    card: ModelCard, device_name: str, dtype_setting: DtypeSetting, on_progress: Progress, limits: Limits
) -> GlinerUnionRunner:
    """Return a union of GLiNER models that is ready for its first step. Arguments and errors as in `load_gliner`."""
    union = card.extract
    assert isinstance(union, GlinerUnion)
    runners: list[GlinerRunner] = []
    for member in union.members:
        share = len(runners) / len(union.members)
        own = msgspec.structs.replace(
            card,
            directory=member.directory,
            extract=member.rule,
            tokenizer_file=str(Path(member.directory, "tokenizer.json")),
        )
        runners.append(load_gliner(own, device_name, dtype_setting, _part_of(on_progress, share, union), limits))
    return GlinerUnionRunner(card, runners)


def _part_of(on_progress: Progress, share: float, union: GlinerUnion) -> Progress:
    """Return a function that takes a member's progress; share is the part of the union that was loaded before."""
    return lambda fraction, activity: on_progress(share + fraction / len(union.members), activity)


def load_gliner2(card: ModelCard, device_name: str, on_progress: Progress, limits: Limits) -> Gliner2Runner:
    """Return a GLiNER2 model that is ready for its first step. Arguments and errors as in `load_gliner`."""
    rule = card.extract
    assert isinstance(rule, Gliner)
    device = resolve_device(device_name)
    library = _import(card, "gliner2")
    logging.getLogger("gliner2").setLevel(logging.ERROR)  # its warnings quote words of texts
    on_progress(0.1, "reading weights")
    with _faults(card), reading(str(Path(card.directory, "tokenizer.json"))):
        encoder = AutoConfig.for_model(**_settings(card, GLINER2_ENCODER))
        model = library.AutoExtractor.from_config(
            library.ExtractorConfig.from_dict(_settings(card, "config.json")),
            encoder_config=encoder,
            tokenizer=importlib.import_module("gliner2.models.base").load_extractor_tokenizer(card.directory),
        )
        _read_weights(card, model, importlib.import_module("gliner2.models.loading").reconcile_encoder_embeddings)
    model.eval().requires_grad_(requires_grad=False)

    def build(chosen: torch.dtype) -> Gliner2Runner:
        return Gliner2Runner(card, model.to(device, chosen), limits)

    def probe(runner: Gliner2Runner) -> bool:
        runner.run_extract([np.frombuffer(b"a b", np.uint8)], [ExtractTask(labels=("a",), threshold=0.5)])
        return True

    return _try_formats(card, build, probe, torch.float32, on_progress)


def load_glirel(card: ModelCard, device_name: str, dtype_setting: DtypeSetting, on_progress: Progress) -> GlirelRunner:
    """Return a GLiREL model, which needs no library, ready for its first step. Arguments and errors as in `load_gliner`."""
    assert isinstance(card.extract, Glirel)
    device, dtype = resolve_device(device_name), choose_dtype(dtype_setting, resolve_device(device_name))
    on_progress(0.1, "reading weights")
    with _faults(card):
        settings = _settings(card, GLIREL_CONFIG)
        config = AutoConfig.for_model(**settings["encoder_config"])
        model = GlirelModel(settings, AutoModel.from_config(config), config.hidden_size)
        _read_weights(card, model)
        tokenizer = read_tokenizer(card.tokenizer_file)
        tokenizer.no_truncation()
        tokenizer.no_padding()
    model.eval().requires_grad_(requires_grad=False)
    distance = settings.get("max_entity_pair_distance")

    def build(chosen: torch.dtype) -> GlirelRunner:
        return GlirelRunner(card, model.to(device, chosen), tokenizer, max_distance=distance, dtype=_name(chosen))

    def probe(runner: GlirelRunner) -> bool:
        item = np.frombuffer(msgspec.json.encode(GlirelItem(["a", "b"], [(0, 0), (1, 1)])), np.uint8)
        found = runner.run_extract([item], [ExtractTask(labels=("a",), threshold=0.0)])
        return all(np.isfinite(one.score) for one in found[0].relations)

    return _try_formats(card, build, probe, dtype, on_progress)


def load_gliclass(
    card: ModelCard, device_name: str, dtype_setting: DtypeSetting, on_progress: Progress
) -> GliclassRunner:
    """Return a GLiClass model that is ready for its first step. Arguments and errors as in `load_gliner`."""
    rule = card.extract
    assert isinstance(rule, Gliclass)
    device, dtype = resolve_device(device_name), choose_dtype(dtype_setting, resolve_device(device_name))
    library = _import(card, "gliclass")
    on_progress(0.1, "reading weights")
    with _faults(card):
        settings = _settings(card, "config.json")
        settings.update(encoder_model=card.directory, encoder_model_name=card.directory)
        model, report = library.GLiClassModel.from_pretrained(
            card.directory,
            config=library.GLiClassModelConfig(**settings),
            dtype=torch.float32,
            use_safetensors=True,
            local_files_only=True,
            output_loading_info=True,
        )
    _check_weights(card, sorted(report["missing_keys"]), sorted(map(str, report["mismatched_keys"])))
    model.eval().requires_grad_(requires_grad=False)

    def build(chosen: torch.dtype) -> GliclassRunner:
        model.to(device, chosen)
        return GliclassRunner(card, model, device, _name(chosen))

    def probe(runner: GliclassRunner) -> bool:
        return bool(np.isfinite(runner.run_token_logits([np.array([rule.label_token_id] * 2, np.int32)])[0]).all())

    return _try_formats(card, build, probe, dtype, on_progress)


def _try_formats(
    card: ModelCard,
    build: Callable[[torch.dtype], Built],
    probe: Callable[[Built], bool],
    dtype: torch.dtype,
    on_progress: Progress,
) -> Built:
    """Return build's result in the wanted number format, or in float32 if the probe fails in a 16-bit one.

    The libraries were written for float32, and parts of some models have no 16-bit kernel. Raises ModelLoadFailed if
    the probe fails in float32 as well, DeviceLostError if the device is lost.
    """
    for chosen in dict.fromkeys((dtype, torch.float32)):
        on_progress(0.7, f"trying the model in {_name(chosen)}")
        try:
            built = build(chosen)
            if probe(built):
                on_progress(1.0, f"in {_name(chosen)}")
                return built
            reason = "its logits are not finite"
        except torch.OutOfMemoryError:
            raise  # not the model's fault
        except Exception as error:  # libraries raise many types for a model that they cannot run
            raise_if_lost(error)
            reason = f"{type(error).__name__}: {error}"
        if chosen in _HALF_FORMATS:
            note("float32", f"{_name(chosen)}: {reason}")
    raise refuse(card.id, f"the library cannot run it: {reason}")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _import(card: ModelCard, name: str) -> Any:
    """Return a library. Raises ModelLoadFailed DEPENDENCY if it is not installed or cannot be imported."""
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise refuse(card.id, f"it needs the library {name}: `{_INSTALL[name]}` ({error})", "DEPENDENCY") from error


def _build_gliner(card: ModelCard, library: Any) -> Any:
    """Return the library's model without its weights, and with the directory's tokenizers."""
    settings = _settings(card, GLINER_CONFIG)
    settings["model_name"] = card.directory
    apart: dict[str, Any] = {}
    if settings.get("labels_encoder") is not None:
        folder = str(Path(card.directory, LABELS_TOKENIZER))
        settings["labels_encoder"] = folder
        apart["labels_tokenizer"] = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the tokenizers of some published models lack tokens
        return library.GLiNER.from_config(
            settings, backbone_from_pretrained=False, map_location="cpu", local_files_only=True, **apart
        )


def _settings(card: ModelCard, name: str) -> dict[str, Any]:
    """Return a library's settings without the keys that change the format in which a new model is built.

    `dtype` in an encoder's configuration would become torch's default for the whole process during the build.
    """
    settings: dict[str, Any] = plain_config(msgspec.json.decode(Path(card.directory, name).read_bytes()))
    for part in (settings, *(settings[key] for key in _ENCODERS if isinstance(settings.get(key), dict))):
        for key in ("dtype", "torch_dtype"):
            part.pop(key, None)
    return settings


def _read_weights(card: ModelCard, model: torch.nn.Module, prepare: Callable[..., None] | None = None) -> None:
    """Load a module's weights from safetensors. Raises ModelLoadFailed if some are missing.

    prepare: makes the model and the weights fit each other first.
    """
    weights = load_file(Path(card.directory, "model.safetensors"))
    if prepare is not None:
        prepare(model, weights)
    own = model.state_dict()
    shared: dict[int, list[str]] = {}
    for name, weight in own.items():
        shared.setdefault(weight.data_ptr(), []).append(name)
    # A weight that several modules share is saved once, under one of its names.
    for names in shared.values():
        saved = next((name for name in names if name in weights), None)
        weights.update({name: weights[saved] for name in names if saved is not None and name not in weights})
    wrong = sorted(name for name in own.keys() & weights.keys() if own[name].shape != weights[name].shape)
    _check_weights(card, sorted(own.keys() - weights.keys()), wrong)
    model.load_state_dict({name: weights[name] for name in own})


def _check_weights(card: ModelCard, missing: list[str], wrong: list[str]) -> None:
    if missing or wrong:
        some = ", ".join((missing + wrong)[:5])
        raise refuse(card.id, f"{len(missing) + len(wrong)} weights are missing or of the wrong shape: {some}")


@contextmanager
def _faults(card: ModelCard) -> Iterator[None]:
    """Translate errors of a damaged file or an unreadable configuration into ModelLoadFailed."""
    try:
        with storage_faults(card):
            yield
    except ModelLoadFailed:
        raise
    except (ImportError, KeyError, NotImplementedError, RuntimeError, TypeError, ValueError) as error:
        raise refuse(card.id, f"the library cannot build it: {type(error).__name__}: {error}") from error
