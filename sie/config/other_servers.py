"""Says what takes the place of a flag of another inference server. docs/coming-from.md has the same names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from sie.config.sources import did_you_mean

_ID_OF_DIRECTORY: Final = "write the name before the model: ID=DIR"
_CONTROL: Final = "use --repository-control, and --model for each model"
HINTS: Final[dict[str, str]] = {
    "--hostname": "use --host",
    "--rest-bind-address": "use --host",
    "--http-address": "use --host",
    "--grpc-bind-address": "use --grpc-host",
    "--grpc-address": "use --grpc-host",
    "--rest-port": "use --port",
    "--http-port": "use --port",
    "--api-key": "make a file with `sie keys new`, and use --api-keys",
    "--ssl-certfile": "use --tls-cert",
    "--ssl-keyfile": "use --tls-key",
    "--ssl-ca-certs": "use --tls-client-ca",
    "--allowed-origins": "use --cors-origin",
    "--cors-allow-origin": "use --cors-origin",
    "--payload-limit": "use --max-body-bytes",
    "--model-id": "use --model, or name the model without a flag",
    "--model-path": "use --model ID=DIR, or --model-repository for versions of a tensor model",
    "--model-name": _ID_OF_DIRECTORY,
    "--served-model-name": _ID_OF_DIRECTORY,
    "--revision": "write it after the id: ID@REVISION",
    "--max-model-len": "use --max-context-tokens",
    "--max-batch-tokens": "use --max-step-tokens",
    "--max-num-batched-tokens": "use --max-step-tokens, or --max-prefill-tokens for prompts",
    "--max-num-seqs": "use --max-sequences",
    "--batch-size": "use --max-step-items",
    "--max-client-batch-size": "use --max-items",
    "--max-concurrent-requests": "use --max-queued-tokens",
    "--auto-truncate": "texts are cut by default; a request's overflow_policy changes it",
    "--gpu-memory-utilization": "use --kv-cache-share",
    "--kv-cache-memory-bytes": "use --kv-cache-bytes",
    "--block-size": "use --kv-block-tokens",
    "--enable-prefix-caching": "use --prefix-cache, which is on by default",
    "--no-enable-prefix-caching": "use --no-prefix-cache",
    "--quantization": "a quantised checkpoint needs no flag; --weights or --encoder-weights rounds others at load",
    "--tensor-parallel-size": "use --tensor-parallel",
    "--trust-remote-code": "code of a model never runs here; ignore_remote_code serves some encoders without it",
    "--enable-lora": "use --lora",
    "--lora-modules": "use --lora",
    "--target-device": "use --devices",
    "--model-control-mode": _CONTROL,
    "--load-model": _CONTROL,
    "--config-path": "use --model-repository",
    "--allow-client-shm": "use --max-client-regions",
    "--exit-on-error": "use --no-strict-readiness",
    "--otlp-traces-endpoint": "use --tracing and --otlp-endpoint",
}
"""What to do instead, by flag; a flag with `_` in its name is listed with `-`."""


def hint_for_flag(flag: str, known: Sequence[str]) -> str:
    """Return what to use instead of an unknown flag, after `; `, or empty if nothing is near.

    known has this command's flags. The nearest of them is only a guess, so a flag that another server has comes first.
    """
    hint = HINTS.get(flag.replace("_", "-"))
    return f"; {hint}" if hint else did_you_mean(flag, known)
