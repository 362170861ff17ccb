"""Text and pictures for people: values in, text out."""
