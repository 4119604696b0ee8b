"""avmp below other people's libraries: one module for each, loaded only by whoever uses that library."""
