"""Models as a frontend sees them: their cards, states and adapters, and requests to load or unload them."""
