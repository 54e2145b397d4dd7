"""Extraction for each model family: prepares the model's input and reads the findings in its answer."""
