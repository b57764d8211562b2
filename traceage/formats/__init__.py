"""One module a stored format, and what they share to get from bytes to rows."""
