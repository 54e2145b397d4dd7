"""A frontend's view of models: cards, states and adapters, and requests to load or unload them."""
