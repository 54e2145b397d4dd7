"""The code that runs inside a sandbox. Imports the standard library only: nothing of the server is in there."""
