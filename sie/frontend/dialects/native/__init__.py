"""The native SIE API on the wire: encode, score, extract and generate."""
