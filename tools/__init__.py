"""What those who work on this project type: no part of the wheel."""
