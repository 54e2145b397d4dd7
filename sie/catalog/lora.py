"""Reads a LoRA adapter's directory: `adapter_config.json` as peft writes it, and the path of its weights.

Pure except for reading files. A pattern is an untrusted program that may run for ever under the interpreter lock, so a
worker has `answer` run in a confined process. Refuses by name each field that would change the vectors and is not supported, and each
unknown field that is not empty.
Source: arXiv 2106.09685 (LoRA), 2312.03732 (rank-stabilised); peft 0.21, tuners/lora/config.py and tuners_utils.py.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec
from msgspec import Meta

from sie.catalog.files import Checkpoint, open_checkpoint
from sie.values.errors import Internal, ModelLoadFailed, SieError

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"

_TRAINING_ONLY = frozenset({
    "auto_mapping", "base_model_name_or_path", "corda_config", "ensure_weight_tying", "eva_config",
    "fan_in_fan_out", "inference_mode", "loftq_config", "lora_dropout", "lora_ga_config", "megatron_config",
    "megatron_core", "peft_version", "qalora_group_size", "revision", "runtime_config", "task_type",
})  # fmt: skip
"""Fields that do not affect the forward pass; fan_in_fan_out matters only when weights are merged."""
_MAX_PATTERN_CHARS = 1 << 18
_MAX_PLAIN_ENTRIES = 256
_MAX_REASON_CHARS = 1000
_ALL = "all-linear"
_PLAIN_NAME = re.compile(r"[\w.-]+")
_PLAIN_STARTS = (True, False, None, "gaussian", "orthogonal", "eva")
"""Values of `init_lora_weights` that leave the model's own weights unchanged."""


class LoraConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The rules to apply an adapter's weights. Module names are those of the model that it was trained on."""

    r: Annotated[int, Meta(ge=1, le=65536)] = 8
    lora_alpha: float = 8.0
    use_rslora: bool = False
    target_modules: list[str] | str
    exclude_modules: list[str] | str | None = None
    layers_to_transform: list[int] | int | None = None
    layers_pattern: list[str] | str | None = None
    rank_pattern: dict[str, Annotated[int, Meta(ge=1, le=65536)]] = {}
    alpha_pattern: dict[str, float] = {}

    @property
    def is_plain(self) -> bool:
        """Whether no pattern of its own and no long table is matched, so that matching is quick."""
        tables = (*self.rank_pattern, *self.alpha_pattern)
        return (
            not [pattern for pattern in _patterns(self) if pattern != _ALL]
            and len(tables) <= _MAX_PLAIN_ENTRIES
            and all(map(_PLAIN_NAME.fullmatch, tables))
        )

    def rank(self, module: str) -> int:
        """Return the rank of a module's update."""
        return _by_pattern(self.rank_pattern, module, self.r)

    def scale(self, module: str) -> float:
        """Return the factor of a module's update: alpha / r, or alpha / sqrt(r) when rank-stabilised."""
        rank = self.rank(module)
        return _by_pattern(self.alpha_pattern, module, self.lora_alpha) / (math.sqrt(rank) if self.use_rslora else rank)

    def targets(self, module: str) -> bool:
        """Tell whether the adapter was trained on a module of this name."""
        if _is_named(self.exclude_modules, module):
            return False
        if not _is_named(self.target_modules, module):
            return False
        return isinstance(self.target_modules, str) or self._has_layer(module)

    @property
    def targets_all(self) -> bool:
        """Whether the adapter targets all linear layers of the model."""
        return self.target_modules == _ALL

    def _has_layer(self, module: str) -> bool:
        wanted = self.layers_to_transform
        if wanted is None or wanted == []:
            return True
        patterns = [self.layers_pattern] if isinstance(self.layers_pattern, str) else self.layers_pattern
        expressions = [rf"(?:^|.*?\.){pattern}\.(\d+)\." for pattern in patterns or ()] or [r".*?\.[^.]*\.(\d+)\."]
        found = next(filter(None, (re.match(expression, module) for expression in expressions)), None)
        return found is not None and int(found[1]) in ([wanted] if isinstance(wanted, int) else wanted)


class LoraRule(NamedTuple):
    """The settings of a config for one module. Rank and scale count only if the adapter has weights for the module."""

    is_target: bool
    rank: int
    scale: float


def apply_config(config: LoraConfig, modules: Sequence[str]) -> list[LoraRule]:
    """Return the rule of each module."""
    return [LoraRule(config.targets(module), config.rank(module), config.scale(module)) for module in modules]


def answer(request: bytes) -> bytes:
    """Do the work of `apply_config`, on its arguments and result as JSON. A confined process runs this."""
    config, modules = msgspec.json.decode(request, type=tuple[LoraConfig, list[str]])
    return msgspec.json.encode(apply_config(config, modules))


def read_lora_config(adapter_id: str, directory: str) -> LoraConfig:
    """Return the config of the adapter in a directory. Raises Internal, with the reason, if it cannot be served."""
    try:
        raw = open_checkpoint(adapter_id, directory).read_json(CONFIG_FILE, dict[str, Any])
    except ModelLoadFailed as error:
        raise refuse_adapter(adapter_id, reason_of(error)) from error
    if raw is None:
        raise refuse_adapter(adapter_id, f"there is no {CONFIG_FILE} in {directory}")
    if raw.get("peft_type") != "LORA":
        raise refuse_adapter(adapter_id, f"its peft_type is {raw.get('peft_type')!r}, not 'LORA'")
    _check_fields(adapter_id, raw)
    known = {name: value for name, value in raw.items() if name in LoraConfig.__struct_fields__}
    try:
        config = msgspec.convert(known, LoraConfig)
        patterns = (*config.rank_pattern, *config.alpha_pattern, *_patterns(config))
        if sum(map(len, patterns)) > _MAX_PATTERN_CHARS:
            raise refuse_adapter(adapter_id, f"{CONFIG_FILE}: patterns of over {_MAX_PATTERN_CHARS} characters")
        for pattern in patterns:
            re.compile(pattern)
    except (msgspec.ValidationError, re.error, OverflowError, RecursionError) as error:
        raise refuse_adapter(adapter_id, f"{CONFIG_FILE}: {error}") from error
    return config


def find_lora_weights(adapter_id: str, directory: str) -> str:
    """Return the path of the adapter's safetensors. Raises Internal when it is missing; pickles are never read."""
    try:
        checkpoint = open_checkpoint(adapter_id, directory)
        path = checkpoint.find(WEIGHTS_FILE)
    except ModelLoadFailed as error:
        raise refuse_adapter(adapter_id, reason_of(error)) from error
    if path is None:
        raise refuse_adapter(adapter_id, _missing_weights(checkpoint))
    return str(path)


def refuse_adapter(adapter_id: str, reason: str) -> Internal:
    """Return the error for an adapter that cannot be served."""
    if len(reason) > _MAX_REASON_CHARS:  # it quotes the files of strangers
        reason = f"{reason[:_MAX_REASON_CHARS]}..."
    return Internal(f"Adapter '{adapter_id}' cannot be loaded: {reason}")


def reason_of(error: SieError) -> str:
    """Return the reason why a file was refused, without the prefix that calls its directory a model."""
    return error.message.partition(" cannot be loaded: ")[2] or error.message


def _check_fields(adapter_id: str, raw: dict[str, Any]) -> None:
    """Refuse by name each field that would be computed differently here."""
    for name, value in raw.items():
        if name in LoraConfig.__struct_fields__ or name in _TRAINING_ONLY or name == "peft_type":
            continue
        if name == "bias" and value == "none":
            continue
        if name == "init_lora_weights" and value in _PLAIN_STARTS:
            continue
        if value:
            raise refuse_adapter(adapter_id, f"{CONFIG_FILE}: {name} {value!r} is not supported")


def _missing_weights(checkpoint: Checkpoint) -> str:
    pickled = sorted(path.name for path in Path(checkpoint.root).glob("adapter_model.*"))
    if pickled:
        return f"only pickled weights ({', '.join(pickled)}); convert them to {WEIGHTS_FILE}"
    return f"there is no {WEIGHTS_FILE} in {checkpoint.root}"


def _patterns(config: LoraConfig) -> list[str]:
    """Return the regular expressions of a config that are not keys of a table."""
    layers = config.layers_pattern
    single = [value for value in (config.target_modules, config.exclude_modules) if isinstance(value, str)]
    return [*single, *([layers] if isinstance(layers, str) else layers or [])]


def _is_named(names: list[str] | str | None, module: str) -> bool:
    """Tell whether names match a module: a regular expression matches its whole name, a list the end of it."""
    if isinstance(names, str):
        return re.fullmatch(names, module) is not None
    return any(module == name or module.endswith(f".{name}") for name in names or ())


def _by_pattern(table: dict[str, Any], module: str, default: Any) -> Any:
    """Return the value of the first key that matches the whole name, or its end after a dot."""
    return next((value for key, value in table.items() if re.match(rf"(.*\.)?({key})$", module)), default)
