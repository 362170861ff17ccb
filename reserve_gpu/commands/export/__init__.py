"""What a status is given out as besides text and JSON."""
