"""The rerank API of Text Embeddings Inference on the wire."""
