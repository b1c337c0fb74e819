"""Images in: sources, the prepared form on disk, and the windows that training is fed with."""
