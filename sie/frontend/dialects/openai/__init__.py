"""OpenAI's embeddings, chat, completions and models on the wire."""
