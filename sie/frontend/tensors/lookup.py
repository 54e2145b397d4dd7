"""Finds a model by name and version for the tensor APIs. Source: KServe v2 sheet, sections 1, 4 and 8."""

from __future__ import annotations

from sie.frontend.models.model_table import ModelTable
from sie.frontend.tensors.states import VersionState, reason_of, rule_of
from sie.frontend.tensors.text_models import with_rule
from sie.ipc.messages import ModelEntry
from sie.values.errors import NotFound


class TensorTable:
    """The models of the tensor APIs by name, each with its versions. They include text models.

    `names` has the order of the server's models. A version is the text of a decimal number.
    """

    def __init__(self, models: ModelTable) -> None:
        self._models = models
        self._seen: object = None
        self._found: dict[str, dict[str, ModelEntry]] = {}
        self._entries: dict[str, ModelEntry] = {}
        self._unversioned: dict[str, ModelEntry] = {}

    def _current(self) -> dict[str, dict[str, ModelEntry]]:
        """Return the current versions of each model. Every change replaces `entries` with another object."""
        if self._seen is not self._models.entries:
            self._seen = self._models.entries
            self._read()
        return self._found

    def _read(self) -> None:
        self._found, self._entries, self._unversioned = {}, {}, {}
        taken = {entry.card.tensor.name for entry in self._models.hosted_entries if entry.card.tensor is not None}
        for hosted in self._models.hosted_entries:
            entry = with_rule(hosted)
            if entry is None or (hosted.card.tensor is None and hosted.card.id in taken):
                continue
            self._entries[entry.card.id] = entry
            rule = entry.card.tensor
            assert rule is not None
            versions = self._found.setdefault(rule.name, {})
            if rule.version:
                versions[rule.version] = entry
            else:
                self._unversioned[rule.name] = entry

    def __contains__(self, name: object) -> bool:
        return name in self._current()

    @property
    def names(self) -> list[str]:
        """Every model's name, also without a version."""
        return list(self._current())

    def hosted(self, model: str) -> ModelEntry | None:
        """Return the entry of a hosted id, with its input and output tensors; None for an unknown id."""
        self._current()
        return self._entries.get(model)

    def versions(self, name: str) -> dict[str, ModelEntry]:
        """Return a model's versions, oldest first; empty for an unknown name or a model without versions."""
        found = self._current().get(name, {})
        return {version: found[version] for version in sorted(found, key=int)}

    def listed(self, name: str) -> list[ModelEntry]:
        """Return a model's entries for an index: its versions, and while none is loaded, the entry with the reason."""
        versions = list(self.versions(name).values())
        unversioned = self._unversioned.get(name)
        is_needed = not versions or (_has_failed(unversioned) if unversioned is not None else False)
        if unversioned is None or not is_needed or any(map(_is_or_will_be_servable, versions)):
            return versions
        return [unversioned, *versions]

    def states(self) -> list[VersionState]:
        """Return the state of every version of every model, in the server's order."""
        return [
            VersionState(name, rule_of(entry).version, entry.state, reason_of(entry))
            for name in self.names
            for entry in self.listed(name)
        ]

    def shown_versions(self, entry: ModelEntry) -> list[str]:
        """Return the versions to list in a model's metadata: those that take requests, or else the entry's own."""
        rule = entry.card.tensor
        assert rule is not None
        versions = self.versions(rule.name)
        return [version for version in versions if _is_or_will_be_servable(versions[version])] or [rule.version]

    def resolve(self, name: str, version: str = "") -> ModelEntry:
        """Return the entry of a version, loaded or not; without a version, the newest that takes requests.

        A version that is being reloaded counts as one that takes requests. If there is none, return the newest that is
        loading or loads at a request, or else the newest that has failed. Raises NotFound. Source: KServe v2 sheet,
        sections 1, 8.
        """
        versions = self._current().get(name)
        if versions is None:
            raise NotFound(f"Request for unknown model: '{name}' is not found")
        if version:
            entry = versions.get(version.lstrip("0"))
            if entry is None:
                raise NotFound(f"Request for unknown model: '{name}' version {version} is not found")
            return entry
        if len(versions) == 1:  # the usual case
            (entry,) = versions.values()
            if is_servable(entry):
                return entry
        newest = [versions[known] for known in sorted(versions, key=int, reverse=True)]
        for is_wanted in (_is_or_will_be_servable, _is_coming, _has_failed):
            found = next(filter(is_wanted, newest), None)
            if found is not None:
                return found
        raise NotFound(f"Request for unknown model: '{name}' has no available versions")


def is_servable(entry: ModelEntry) -> bool:
    """Tell whether a model takes requests: it is loaded, or waits for its workers to restart."""
    return bool(entry.workers and entry.state == "loaded") or entry.recovering


def _is_or_will_be_servable(entry: ModelEntry) -> bool:
    return is_servable(entry) or entry.reloading


def _is_coming(entry: ModelEntry) -> bool:
    """Tell whether a model is loading, or a request would start its load, as for text models."""
    return entry.state == "loading" or entry.card.kind != "tensor"


def _has_failed(entry: ModelEntry) -> bool:
    return entry.state == "failed"
