"""Loading of models and adapters on a worker, beside its step loop."""
