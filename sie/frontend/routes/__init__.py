"""The handlers of the HTTP routes: decode with the dialect, run the operation, encode the reply."""
