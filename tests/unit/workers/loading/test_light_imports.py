"""What a worker leaves out when it imports transformers, seen in a fresh process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

_CODE = """
import sys

from sie.workers.loading import light_imports

light_imports.prepare(has_shapes=False)
import transformers.models
from transformers.utils import import_utils

read = import_utils.create_import_structure_from_path.cache_info()
assert read.hits == 1, read  # transformers.models took the list that transformers had made
assert import_utils.fetch__all__("x = 1\\n__all__ = ['a']\\n__all__ = ['b', 'c']") == ["b", "c"]
assert import_utils.fetch__all__.__name__ == "<lambda>"  # the shortened one
assert not import_utils.fetch__all__("x = '__all__'")
from sie.catalog.checkpoint_card import read_card
from sie.catalog.spec import ModelSpec
from sie.workers.loading import pretrained
from sie.workers.loading.loader import load_encoder

import torch

with torch.device("meta"):
    torch.nn.Embedding(4, 4).register_buffer("positions", torch.arange(4))
    with light_imports.counting_on_cpu():
        assert (1 / 10.0 ** (torch.arange(0, 8, 2).float() / 8)).tolist()[0] == 1.0  # as rotary modules do
assert "sympy" not in sys.modules  # a worker that takes its weights from a file builds its model so
assert torch.randn(2, generator=torch.Generator().manual_seed(0)).isfinite().all()
load_encoder(read_card(ModelSpec(id="m"), sys.argv[1]), "cpu", "float32", lambda fraction, text: None)
assert not {"sympy", "torch._refs"} & set(sys.modules)  # a first load does without them, too
with torch.device("meta"):
    assert pretrained._with_metas(lambda: torch.where(torch.ones(2) > 0, torch.ones(2), 0)).shape == (2,)
assert "torch._refs" in sys.modules  # compiled code does not know the shape of that
assert not light_imports.register_metas()
assert torch.nn.init.normal_(torch.zeros(9)).any()
try:
    torch._check(False)
except RuntimeError:
    pass
else:
    raise AssertionError("a check that fails passed")
left_out = ("torch._dynamo.eval_frame", "torch._inductor", "torch.distributed.tensor", "scipy.optimize")
loaded = [name for name in left_out if name in sys.modules]
assert not loaded, loaded

import torch._dynamo.utils  # a module of it, by its name: it was loaded by the real package meanwhile, and is no other
from transformers import masking_utils

assert sys.modules["torch._dynamo"] is torch._dynamo
assert torch._dynamo.utils is sys.modules["torch._dynamo.utils"]
assert torch._dynamo.convert_frame.counters is torch._dynamo.utils.counters
assert torch._dynamo.utils.__spec__.origin == torch._dynamo.utils.__file__
with masking_utils.TransformGetItemToIndex():  # what transformers took from a stand-in
    assert torch.func.vmap(lambda index: torch.arange(3)[index])(torch.arange(2)).tolist() == [0, 1]
assert torch.export.Dim("n").__name__ == "n"
"""


def test_an_encoder_loads_without_compilers_which_are_there_for_who_asks(minilm_directory: Path):
    done = subprocess.run(
        [sys.executable, "-c", _CODE, str(minilm_directory)], capture_output=True, text=True, timeout=115, check=False
    )
    assert done.returncode == 0, done.stderr
