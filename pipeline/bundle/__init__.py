"""A trained model as files that need none of this code: a file a format, what is known of it, and how alike all are."""
