"""The parts of a model's weights that the members of a group hold, and the sums and rows that they exchange."""
