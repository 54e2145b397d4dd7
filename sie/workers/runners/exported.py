"""Runs a `torch.export` program, built from an archive that was checked and rewritten.

Inputs are copied: a program may change them in place, and the extents are read-only.
"""

from __future__ import annotations

import operator
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.export import ExportedProgram
from torch.export.passes import move_to_device_pass
from torch.utils import _pytree as pytree

from sie.catalog.exported import ExportedError, ExportedFile, open_exported
from sie.catalog.files import refuse
from sie.values.card import ModelCard
from sie.values.errors import BadRequest
from sie.workers.device.device import resolve_device
from sie.workers.device.fallbacks import note
from sie.workers.device.faults import is_device_lost, is_out_of_memory, raise_if_lost
from sie.workers.model_api import TensorInputs, TensorOutputs
from sie.workers.runners.tensor_arrays import as_array, cut_rows, input_of, names_sizes

_FAULTS = (RuntimeError, ValueError, KeyError, AssertionError, TypeError, AttributeError)
"""Errors that torch raises for a program that it cannot read; a broken program is not our fault."""


def load_exported(card: ModelCard, device: str, progress: Callable[[float, str], None]) -> ExportedRunner:
    """Return the ready runner of a card. Raises ModelLoadFailed for an archive that is broken or could run code."""
    assert card.tensor is not None
    path = Path(card.directory) / card.tensor.config["default_model_filename"]
    target = resolve_device(device)
    progress(0.1, "the archive is checked")
    try:
        file, archive = open_exported(path)
    except (ExportedError, OSError) as error:
        raise refuse(card.id, f"{path.name}: {error}") from error
    progress(0.3, "torch reads the program")
    try:
        program = torch.export.load(archive)
        if state := _changed_state(program):
            raise refuse(card.id, f"{path.name}: it changes its own state ({state})")
        if target.type != "cpu" and not _try_move(program, target):
            archive.seek(0)
            program, target = torch.export.load(archive), torch.device("cpu")
        module = program.module(check_guards=False)
    except _FAULTS as error:
        raise refuse(card.id, f"torch.export: {type(error).__name__}: {error}") from error
    return ExportedRunner(card, file, module, program.call_spec.in_spec, target)


def _changed_state(program: ExportedProgram) -> str:
    """Return the name of a weight or constant that the program writes to, or of a part of it; empty without one.

    What one request left there, the next ones would read. The operators say which arguments they write to, and which
    results are views of them.
    """
    signature = program.graph_signature
    state = {
        **signature.inputs_to_parameters, **signature.inputs_to_buffers, **signature.inputs_to_lifted_tensor_constants
    }  # fmt: skip
    for node in program.graph.nodes:
        if node.op != "call_function":
            continue
        for source, is_written in _aliased(node):
            if source.name in state and is_written:
                return state[source.name]
            if source.name in state and _dtype_of(source) == _dtype_of(node):  # else the result is a copy
                state[node.name] = state[source.name]
    return ""


def _aliased(node: torch.fx.Node) -> Iterator[tuple[torch.fx.Node, bool]]:
    """Yield each argument of which a node's result may be a view, and whether the node writes to it."""
    if node.target is operator.getitem:
        yield from ((source, False) for source in node.all_input_nodes)
    schema = getattr(node.target, "_schema", None)
    for place, argument in enumerate(schema.arguments if schema is not None else ()):
        if argument.alias_info is not None:
            given = node.args[place] if place < len(node.args) else node.kwargs.get(argument.name)
            sources = pytree.tree_leaves(given)
            yield from ((one, argument.alias_info.is_write) for one in sources if isinstance(one, torch.fx.Node))


def _dtype_of(node: torch.fx.Node) -> torch.dtype | None:
    """Return the dtype of a node's result, of several results the first one's."""
    values = pytree.tree_leaves(node.meta.get("val"))
    return values[0].dtype if values and isinstance(values[0], torch.Tensor) else None


def _try_move(program: ExportedProgram, target: torch.device) -> bool:
    """Move a program to a GPU in place; return False, and note the fallback, if it has parts that cannot be moved."""
    try:
        move_to_device_pass(program, target)
        tensors = [*program.state_dict.values(), *program.constants.values()]
        left = {tensor.device.type for tensor in tensors if isinstance(tensor, torch.Tensor)} - {target.type}
        reason = f"tensors of the program stay on {', '.join(sorted(left))}" if left else ""
    except Exception as error:  # the pass reads a stranger's graph
        if is_out_of_memory(error):
            raise
        raise_if_lost(error)
        reason = f"torch cannot move the program to the GPU: {type(error).__name__}: {error}"
    if reason:
        note("cpu", reason)
    return not reason


class ExportedRunner:
    """A loaded program."""

    def __init__(self, card: ModelCard, file: ExportedFile, module: Any, in_spec: Any, device: torch.device) -> None:
        assert card.tensor is not None
        self.card = card
        self.memory_bytes = 4 * card.num_weights
        self._rule = card.tensor
        self._inputs = [value.name for value in file.inputs]
        self._constants = file.constants
        self._outputs = {value.name: index for index, value in enumerate(file.outputs)}
        self._datatypes = {value.name: value.datatype for value in file.outputs}
        self._module = module
        self._in_spec = in_spec
        self._device = device

    def run_tensors(self, requests: Sequence[TensorInputs]) -> TensorOutputs:
        """Return each request's outputs. Raises BadRequest for inputs that the program rejects, else Internal.

        The run ends when its outputs are in the memory of the host.
        """
        began_ns = time.monotonic_ns()
        wanted = requests[0].task.outputs or tuple(spec.name for spec in self._rule.outputs)
        tensors = [self._input(name, requests) for name in self._inputs]
        fed_ns = time.monotonic_ns()
        results = self._run(tensors)
        arrays = [self._array(results, name) for name in wanted]
        ran_ns = time.monotonic_ns()
        outputs = cut_rows(self.card.id, requests, wanted, arrays, self._datatypes)
        return TensorOutputs(outputs, fed_ns - began_ns, time.monotonic_ns() - ran_ns)

    def _input(self, name: str, requests: Sequence[TensorInputs]) -> torch.Tensor:
        """Return one input of all requests, on the device; BF16 arrives as its bits."""
        parts = [as_array(*input_of(request, name)) for request in requests]
        tensor = torch.from_numpy(np.concatenate(parts) if len(parts) > 1 else parts[0].copy())
        if input_of(requests[0], name)[0].datatype == "BF16":
            tensor = tensor.view(torch.bfloat16)
        return tensor.to(self._device)

    def _arguments(self, tensors: list[torch.Tensor]) -> list[Any]:
        """Return all arguments of the program: the tensors, and the constants with which it was saved between them."""
        constants, left = self._constants, iter(tensors)
        places = range(len(tensors) + len(constants))
        return [constants[place] if place in constants else next(left) for place in places]

    def _run(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        try:
            args, kwargs = pytree.tree_unflatten(self._arguments(tensors), self._in_spec)
            with torch.inference_mode():
                results, _ = pytree.tree_flatten(self._module(*args, **kwargs))
        except (RuntimeError, IndexError, ValueError) as error:
            if is_out_of_memory(error) or is_device_lost(error):
                raise
            if isinstance(error, IndexError) or names_sizes(str(error)):
                reason = " ".join(str(error).split())
                raise BadRequest(f"Model '{self._rule.name}' rejects these inputs: {reason}") from error
            raise
        return results

    def _array(self, results: list[torch.Tensor], name: str) -> NDArray[Any]:
        tensor = results[self._outputs[name]].detach().cpu().contiguous()
        return (tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor).numpy()
