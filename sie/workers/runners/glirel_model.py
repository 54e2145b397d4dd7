"""GLiREL's model: scores relations, named in plain words, for pairs of a text's entities.

An encoder reads the labels and the words in one sequence. A two-way LSTM reads the words again; an entity is made of its
first and last word, and a pair of two entities. Labels and pairs are compared. Modules have the names of the weights.
Source: arXiv 2501.03172; glirel 1.2.1, model.py and modules/.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

HEAD_WIDTH: Final = 64
"""Values of a head of the attention that refines."""


class ReadText(NamedTuple):
    """A text and its labels, as far as they do not depend on pairs."""

    text: Tensor
    """(1, words, d)."""
    entities: Tensor
    """(entities, d)."""
    labels: Tensor
    """(1, labels, d)."""


class GlirelModel(nn.Module):
    """The encoder and the layers behind it, for one text at a time."""

    def __init__(self, settings: dict[str, Any], encoder: nn.Module, encoder_width: int) -> None:
        """Build the layers without weights. Raises KeyError for a setting that is missing, ValueError for an unknown one."""
        super().__init__()
        width: int = settings["hidden_size"]
        self._labels_by = settings["label_embed_strategy"]
        self.token_rep_layer = nn.ModuleDict({"bert_layer": nn.ModuleDict({"model": encoder})})
        if encoder_width != width:
            self.token_rep_layer["projection"] = nn.Linear(encoder_width, width)
        self.rnn = nn.ModuleDict({"lstm": nn.LSTM(width, width // 2, bidirectional=True, batch_first=True)})
        self.span_rep_layer = nn.ModuleDict({"rel_rep_layer": _Pairs(settings["span_marker_mode"], width)})
        self._encoder = [encoder]  # in a list, so that it has one name
        self.prompt_rep_layer = nn.Sequential(
            nn.Linear(width, width * 4), nn.Identity(), nn.ReLU(), nn.Linear(width * 4, width)
        )
        if settings.get("refine_relation"):
            self.refine_relation = _Refine(width, 1, settings["ffn_mul"])
        if settings.get("refine_prompt"):
            self.refine_prompt = _Refine(width, 2, settings["ffn_mul"])
        self.scorer = _Scorer(settings["scorer"], width)

    def read(self, token_ids: Tensor, places: Tensor, num_labels: int, spans: Tensor) -> ReadText:
        """Return what `score` compares. The cost of this grows with the tokens.

        token_ids (t,); places (words, 2), the first token of each word and the one behind its last, equal for a word
        without tokens: first the mark and the words of each label, then the text's mark, then its words. spans
        (entities, 2), the first and last word of each.
        """
        (encoder,) = self._encoder
        found = encoder(input_ids=token_ids[None], attention_mask=torch.ones_like(token_ids)[None])
        words = self.pool(found.last_hidden_state[0], places)
        if "projection" in self.token_rep_layer:
            words = self.token_rep_layer["projection"](words)
        labels = self._labels(words[: 2 * num_labels].view(num_labels, 2, -1))
        text = self.rnn["lstm"](words[None, 2 * num_labels + 1 :])[0]
        labels = self.prompt_rep_layer(labels)[None]
        if hasattr(self, "refine_prompt"):  # the library masks all pairs, because none is known: one stands for all
            labels = self.refine_prompt(labels, torch.zeros_like(text[:, :1]), is_masked=True)
        mark = self.span_rep_layer["rel_rep_layer"].get_submodule("span_marker")
        return ReadText(text, mark(text[0], spans), labels)

    def score(self, read: ReadText, pairs: Tensor) -> Tensor:
        """Return the logits (pairs, labels) in float32; pairs (pairs, 2) are numbers of entities.

        No pair reads another one, so all pairs of a text may be scored in pieces.
        """
        relations = self.span_rep_layer["rel_rep_layer"](read.entities, pairs)[None]
        if hasattr(self, "refine_relation"):
            relations = self.refine_relation(relations, read.text)
        return self.scorer(relations, read.labels)[0].float()

    def pool(self, states: Tensor, places: Tensor) -> Tensor:
        """Return the state of each word's first token; zero for a word without tokens."""
        first, behind = places.unbind(1)
        return states[first.clamp(max=len(states) - 1)] * (first < behind)[:, None]

    def _labels(self, pairs: Tensor) -> Tensor:
        if self._labels_by == "both":
            return pairs.mean(1)
        return pairs[:, 0 if self._labels_by == "ent_token" else 1]


def _projection(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, outputs * 4), nn.ReLU(), nn.Identity(), nn.Linear(outputs * 4, outputs))


class _Pairs(nn.Module):
    """Makes pairs of entities."""

    def __init__(self, mode: str, width: int) -> None:
        super().__init__()
        self.span_marker = _Ends(width) if mode == "markerv1" else _Mean(width)
        self.out_project = _projection(width * 2, width)

    def forward(self, entities: Tensor, pairs: Tensor) -> Tensor:
        return self.out_project(torch.cat((entities[pairs[:, 0]], entities[pairs[:, 1]]), -1))


class _Ends(nn.Module):
    """Makes an entity of its first and its last word."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.project_start = _projection(width, width)
        self.project_end = _projection(width, width)
        self.out_project = _projection(width * 2, width)

    def forward(self, words: Tensor, spans: Tensor) -> Tensor:
        ends = (self.project_start(words[spans[:, 0]]), self.project_end(words[spans[:, 1]]))
        return self.out_project(torch.cat(ends, -1).relu())


class _Mean(nn.Module):
    """Makes an entity of the mean of its words."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.projection = _projection(width, width)

    def forward(self, words: Tensor, spans: Tensor) -> Tensor:
        return self.projection(torch.stack([words[first : last + 1].mean(0) for first, last in spans.tolist()]))


class _Refine(nn.Module):
    """Lets rows read other rows."""

    def __init__(self, width: int, num_blocks: int, factor: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([_Block(width, factor) for _ in range(num_blocks)])
        self.output = nn.Linear(width, width)

    def forward(self, rows: Tensor, others: Tensor, *, is_masked: bool = False) -> Tensor:
        for block in self.blocks:
            rows = block(rows, others, is_masked=is_masked)
        return self.output(rows)


class _Block(nn.Module):
    def __init__(self, width: int, factor: int) -> None:
        super().__init__()
        attention = nn.MultiheadAttention(width, width // HEAD_WIDTH, batch_first=True, add_zero_attn=True)
        self.read = nn.ModuleDict({"mha": attention})
        self.norm_read = nn.LayerNorm(width)
        self.ffn = nn.Sequential(
            nn.Linear(width, width * factor), nn.GELU(), nn.Identity(), nn.Linear(width * factor, width)
        )
        self.norm_ffn = nn.LayerNorm(width)

    def forward(self, rows: Tensor, others: Tensor, *, is_masked: bool) -> Tensor:
        mask = torch.full(others.shape[:2], is_masked, device=others.device)
        rows = rows + self.read["mha"](self.norm_read(rows), others, others, key_padding_mask=mask)[0]
        return rows + self.norm_ffn(self.ffn(rows))


class _Scorer(nn.Module):
    """Compares pairs (1, n, d) with labels (1, m, d)."""

    def __init__(self, kind: str, width: int) -> None:
        super().__init__()
        if kind not in ("dot", "dot_thresh"):
            raise ValueError(f"its scorer {kind!r} is not known here")
        if kind == "dot_thresh":
            self.proj_thresh = _perceptron(width, width * 4, 2)
            self.proj_type = _perceptron(width, width * 4, width)

    def forward(self, pairs: Tensor, labels: Tensor) -> Tensor:
        if not hasattr(self, "proj_type"):
            return pairs @ labels.transpose(1, 2)
        factors, biases = self.proj_thresh(labels).transpose(1, 2).split(1, 1)
        return (pairs @ self.proj_type(labels).transpose(1, 2) + biases) * functional.softplus(factors)


def _perceptron(*widths: int) -> nn.Sequential:
    first, middle, last = widths
    return nn.Sequential(nn.Linear(first, middle), nn.ReLU(), nn.Identity(), nn.Linear(middle, last))
