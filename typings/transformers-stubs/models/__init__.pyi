# The families that the server names. The library's own list has all of its four hundred, and pyright would read each:
# 2,000 files and 1.4 GB. Whoever names a model of another family adds a line.
from .auto import *  # noqa: F403  # the library's own names
from .llama import *  # noqa: F403  # as above
