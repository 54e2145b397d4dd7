"""LoRA adapters inside a model: their weights and the layers that apply them."""
