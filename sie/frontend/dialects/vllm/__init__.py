"""vLLM's APIs of pooling models on the wire: `/classify` and `/score`."""
