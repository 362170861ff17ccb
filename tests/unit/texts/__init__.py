"""Every text that users read, compared with snapshots, one file per subject.

syrupy keeps the expected texts of a file as plain lines in `__snapshots__/FILE.ambr`, so a changed
text reads in a review, and in a failing test, as it reads for a user. After a change, run
`pytest -n 0 tests/unit/texts --snapshot-update`, and review the difference. If test_coverage.py
then fails, run it once more: it reads the snapshots of the other files.
"""
