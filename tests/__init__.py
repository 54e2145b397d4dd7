"""The tests. A package, so that a folder `tests` which another distribution installs is never found in its place."""
