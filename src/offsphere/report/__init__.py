"""What a finished comparison says: terminal tables, figures, and one self-contained HTML page."""
