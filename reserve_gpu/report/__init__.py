"""What people read: values in, words and pictures out."""
