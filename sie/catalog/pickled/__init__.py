"""Reads the files that `torch.save` writes, without running a pickle, and writes their tensors as safetensors."""
