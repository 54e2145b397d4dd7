"""Loads any kind of model. Each kind imports only its own modules, because libraries take seconds to import."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from sie.config.settings import Settings
from sie.ipc.messages import CacheRoom, Launch
from sie.shm.inflight import InflightPage
from sie.values.card import ModelCard
from sie.values.extract import Detection, Gliclass, Gliner, GlinerUnion, Glirel, ImageToText
from sie.workers import stall_notices
from sie.workers.loading import light_imports
from sie.workers.model_api import Runner, TensorRunner

if TYPE_CHECKING:
    from sie.workers.generation.runner import TextGenerator
    from sie.workers.sharded.group import Group

Progress = Callable[[float, str], None]
"""Takes the fraction done, 0 to 1, and the current activity."""
_RUN_PART = 0.7
"""Part of watchdog_s after which a model's run is ended; looked at eight times in that time."""


class ModelLoader:
    """Loads models onto one worker's device. The first model that needs torch imports it; stubs never do."""

    def __init__(self, launch: Launch, settings: Settings, page: InflightPage) -> None:
        self._launch = launch
        self._settings = settings
        self._page = page

    def load(self, card: ModelCard, progress: Progress, room: CacheRoom) -> Runner:
        """Return a model that is ready for its first step; room is for its keys and values. Raises SieErrors."""
        if card.kind == "stub":
            return self._load_stub(card)
        if card.kind == "tensor":
            return self._load_tensor_model(card, progress)
        if isinstance(card.extract, Gliner | GlinerUnion | Glirel | Gliclass):
            return self._load_library_model(card, progress)
        return self._load_transformer(card, progress, room)

    def _load_stub(self, card: ModelCard) -> Runner:
        if card.generate is not None:
            from sie.workers.generation.stub import StubGenerator

            return StubGenerator(card, self._settings.generation.kv_block_tokens, self._launch.slot)
        from sie.workers.runners.stub import StubRunner

        return StubRunner(card, self._launch.slot)

    def _load_tensor_model(self, card: ModelCard, progress: Progress) -> TensorRunner:
        runner = self._read_tensor_model(card, progress)
        if card.tensor is not None and card.tensor.warm_ups:
            from sie.workers.runners.warm_up import warm_up

            warm_up(runner, card, self._settings.limits.max_body_bytes, progress)
        return runner

    def _read_tensor_model(self, card: ModelCard, progress: Progress) -> TensorRunner:
        if card.tensor is not None and card.tensor.platform == "pytorch_exported":
            with stall_notices.importing():
                from sie.workers.runners.exported import load_exported  # imports torch

            return load_exported(card, self._launch.device, progress)
        from sie.workers.runners.onnx import RunLimit, load_onnx  # imports onnxruntime, not torch

        def allowed_until_ns() -> int:
            status = self._page.read()
            return status.started_ns + status.allowed_ns

        num_threads = self._settings.devices.threads_per_worker or max(1, len(self._launch.cores))
        limit = RunLimit(_RUN_PART * self._settings.supervisor.watchdog_s, allowed_until_ns)
        return load_onnx(card, self._launch.device, num_threads, progress, limit)

    def _load_library_model(self, card: ModelCard, progress: Progress) -> Runner:
        with stall_notices.importing():
            light_imports.prepare()
            light_imports.register_metas()  # these libraries build models by themselves
            from sie.workers.loading import libraries  # imports torch

        device, dtype, limits = self._launch.device, self._settings.models.dtype, self._settings.limits
        if isinstance(card.extract, Gliclass):
            return libraries.load_gliclass(card, device, dtype, progress)
        if isinstance(card.extract, Gliner) and card.extract.library == "gliner2":
            return libraries.load_gliner2(card, device, progress, limits)
        if isinstance(card.extract, GlinerUnion):
            return libraries.load_gliner_union(card, device, dtype, progress, limits)
        if isinstance(card.extract, Glirel):
            return libraries.load_glirel(card, device, dtype, progress)
        return libraries.load_gliner(card, device, dtype, progress, limits)

    def _load_transformer(self, card: ModelCard, progress: Progress, room: CacheRoom) -> Runner:
        """Load a model of transformers: divided among processes, with shared weights on a CPU, or alone on a GPU."""
        with stall_notices.importing():
            light_imports.prepare()
            from sie.workers.device.capture import Capturer
            from sie.workers.loading import loader  # noqa: F401 -- imports torch and transformers, which takes seconds
            from sie.workers.loading.shared_weights import load_shared

        if self._launch.without_graphs:
            Capturer.forbidden = "a capture failed in an earlier process of this worker"
        if card.tensor_parallel > 1:
            from sie.workers.members.leader import load_divided

            load_part = partial(self._load_generator, card, progress, room)
            return load_divided(card, self._launch, self._settings, load_part, room=room)
        load = partial(self._load_alone, card, progress, room)
        if self._launch.device != "cpu":
            return load()
        lent = [core.number for core in self._launch.lent_cores]
        models, generation = self._settings.models, self._settings.generation
        return load_shared(card, models, generation.weights, load, progress, lent_cores=lent)

    def _load_alone(self, card: ModelCard, progress: Progress, room: CacheRoom) -> Runner:
        """Load a model of transformers in this process."""
        from sie.workers.loading import loader

        device, dtype = self._launch.device, self._settings.models.dtype
        if card.kind == "generator":
            return self._load_generator(card, progress, room)
        if card.kind == "dual-encoder":
            return loader.load_dual_encoder(card, device, dtype, progress)
        if isinstance(card.extract, Detection):
            return loader.load_detector(card, device, dtype, progress)
        if isinstance(card.extract, ImageToText):
            return loader.load_image_to_text(card, device, dtype, progress)
        if card.extract is not None:
            return loader.load_extractor(card, device, dtype, progress)
        if card.listwise is not None:
            return loader.load_list_scorer(card, device, dtype, progress)
        return (loader.load_encoder if card.score is None else loader.load_scorer)(card, device, dtype, progress)

    def _load_generator(
        self, card: ModelCard, progress: Progress, room: CacheRoom, group: Group | None = None
    ) -> TextGenerator:
        """Load a generator; with a group, this worker's part of it."""
        from sie.workers.loading import loader

        dtype, generation = self._settings.models.dtype, self._settings.generation
        return loader.load_generator(card, self._launch.device, dtype, generation, progress, room=room, group=group)
